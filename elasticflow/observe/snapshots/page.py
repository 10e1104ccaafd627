"""All that is known of one snapshot, as lines; pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from elasticflow.observe.terminal.formats import local_time, number, plural, size, span
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.observe.snapshots.rows import SnapshotRow
    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.format.policy import Keep

_WIDTH = 11
_MOST_FILES = 16


def page(row: SnapshotRow, rules: Keep | None, now: float) -> list[str]:
    """Return the facts of a snapshot, then its files and its tensors.

    Args:
        row: The snapshot.
        rules: Which snapshots stay; None if the job is not known.
        now: Unix time.
    """
    facts = [("step", _step(row)), *_facts(row, rules, now)]
    lines = [f"{name:<{_WIDTH}} {text}" for name, text in facts if text]
    if row.manifest is not None:
        lines += ["", *_files(row.manifest), "", *_tensors(row.manifest)]
    return [printable(line) for line in lines]  # names of tensors and data are anybody's


def tensors_by_prefix(manifest: Manifest) -> list[dict[str, Any]]:
    """Return count and bytes of the tensors by part (model, optimizer ...) and dtype."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for key, tensor in manifest.tensors.items():
        total = sums[key.partition("/")[0], tensor.dtype]
        total[0] += 1
        total[1] += tensor.nbytes
    return [
        {"prefix": prefix, "dtype": dtype, "tensors": count, "bytes": nbytes}
        for (prefix, dtype), (count, nbytes) in sorted(sums.items())
    ]


def _step(row: SnapshotRow) -> str:
    if row.manifest is None:
        return str(row.step)
    passes = plural(row.manifest.epoch, "epoch")
    return f"{row.step} ({passes} finished, {plural(row.manifest.samples, 'sample')})"


def _facts(row: SnapshotRow, rules: Keep | None, now: float) -> Iterator[tuple[str, str]]:
    yield "state", row.state + (f": {row.reason}" if row.reason else "")
    if row.state == "committed":
        yield "kept", _kept(row, rules)
    if row.note:
        yield "pinned", row.note
    found = row.manifest
    if found is None:
        return
    age = span(max(0.0, now - found.created))
    yield "taken", f"{local_time(found.created)}, {age} ago; trigger: {found.trigger}"
    yield "by", f"generation {found.generation}, {plural(found.world_size, 'worker')}"
    yield "parent", found.parent or "none: trained from the beginning"
    yield "metric", "" if found.metric is None else number(found.metric)
    yield (
        "size",
        f"{size(found.size)} in {plural(len(found.files), 'file')}, {span(found.seconds)} from staged to committed",
    )
    yield "borrowed", _borrowed(found)
    yield "aliases", ", ".join(f"{key} is {other}" for key, other in sorted(found.aliases.items()))
    yield "layouts", ", ".join(f"{key}: {layout}" for key, layout in sorted(found.memory_formats.items()))
    yield "data", ", ".join(f"{name} {str(mark)[:16]}" for name, mark in sorted(found.fingerprints.items()))
    yield "versions", ", ".join(f"{name} {version}" for name, version in sorted(found.versions.items()))


def _kept(row: SnapshotRow, rules: Keep | None) -> str:
    if not row.kept:
        return "no rule keeps it" if rules else "not known: no job is recorded there"
    return f"{', '.join(row.kept)} ({'permanent' if row.is_permanent else 'ephemeral'})"


def _borrowed(found: Manifest) -> str:
    if not found.borrowed:
        return ""
    total = sum(entry.size for entry in found.borrowed.values())
    return f"{size(total)} of tensors unchanged since, from {', '.join(sorted(found.borrowed_from))}"


def _files(found: Manifest) -> Iterator[str]:
    yield "files"
    files = {**found.files, **found.borrowed}
    width = max(map(len, list(files)[:_MOST_FILES]), default=0)
    for name, entry in list(files.items())[:_MOST_FILES]:
        sha = f"  sha256 {entry.sha256}" if entry.sha256 else ""
        yield f"  {name:<{width}}  {size(entry.size):>10}  {plural(len(entry.crc32), 'block')} of CRC-32{sha}"
    if len(files) > _MOST_FILES:
        yield f"  ... {len(files) - _MOST_FILES} more"


def _tensors(found: Manifest) -> Iterator[str]:
    yield "tensors"
    rows = tensors_by_prefix(found)
    width = max((len(row["prefix"]) for row in rows), default=0)
    for row in rows:
        count = plural(row["tensors"], "tensor")
        yield f"  {row['prefix']:<{width}}  {row['dtype']:<8} {count:>14}  {size(row['bytes']):>10}"
