"""All known facts of a snapshot, as lines; pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.observe.terminal.formats import local_time, number, plural, size, span
from elasticflow.snapshots.format.manifest import FORMAT
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.observe.snapshots.rows import SnapshotRow
    from elasticflow.protocol.snapshot_settings import Keep
    from elasticflow.snapshots.format.manifest import Manifest

_WIDTH = 11
_MOST_FILES = 16


def page(row: SnapshotRow, rules: Keep | None, now: float) -> list[str]:
    """Return the facts of a snapshot, then its files and its tensors.

    Args:
        rules: Rules for keeping snapshots; None if the job is not known.
        now: Unix time.
    """
    facts = [("step", _step(row)), *_facts(row, rules, now)]
    lines = [f"{name:<{_WIDTH}} {text}" for name, text in facts if text]
    if row.manifest is not None:
        lines += ["", *_files(row.manifest), "", *_tensors(row.manifest)]
    return [printable(line) for line in lines]  # names of tensors and data may hold any text


class TensorSum(NamedTuple):
    """Count and bytes of the tensors of one part (model, optimizer ...) and dtype."""

    prefix: str
    dtype: str
    tensors: int
    bytes: int


def tensors_by_prefix(manifest: Manifest) -> list[TensorSum]:
    """Return the sums of all tensors, by part and dtype."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for key, tensor in manifest.whole.items():
        total = sums[key.partition("/")[0], tensor.dtype]
        total[0] += 1
        total[1] += tensor.nbytes
    return [TensorSum(*part, *amounts) for part, amounts in sorted(sums.items())]


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
    manifest = row.manifest
    if manifest is None:
        return
    age = span(max(0.0, now - manifest.created))
    yield "taken", f"{local_time(manifest.created)}, {age} ago; trigger: {manifest.trigger}"
    yield "by", f"generation {manifest.generation}, {plural(manifest.world_size, 'worker')}"
    yield "parent", manifest.parent or "none: trained from the beginning"
    yield "metric", "" if manifest.metric is None else number(manifest.metric)
    yield (
        "size",
        f"{size(manifest.size)} in {plural(len(manifest.files), 'file')}, {span(manifest.seconds)} from staged to committed",
    )
    yield "borrowed", _borrowed(manifest)
    yield "aliases", ", ".join(f"{key} is {other}" for key, other in sorted(manifest.aliases.items()))
    yield "layouts", ", ".join(f"{key}: {layout}" for key, layout in sorted(manifest.memory_formats.items()))
    yield (
        "data",
        ", ".join(f"{name} {str(mark)[:16]}" for name, mark in sorted(manifest.fingerprints.items())),
    )
    yield "versions", ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items()))


def _kept(row: SnapshotRow, rules: Keep | None) -> str:
    if not row.kept:
        return "no rule keeps it" if rules else "not known: no job is recorded there"
    return f"{', '.join(row.kept)} ({'permanent' if row.is_permanent else 'ephemeral'})"


def _borrowed(manifest: Manifest) -> str:
    if not manifest.borrowed:
        return ""
    total = sum(entry.size for entry in manifest.borrowed.values())
    return f"{size(total)} of tensors unchanged since, from {', '.join(sorted(manifest.borrowed_from))}"


def _files(manifest: Manifest) -> Iterator[str]:
    yield "files"
    files = {**manifest.files, **manifest.borrowed}
    width = max(map(len, list(files)[:_MOST_FILES]), default=0)
    held = _held_by_file(manifest)
    for name, entry in list(files.items())[:_MOST_FILES]:
        sha = f"  sha256 {entry.sha256}" if entry.sha256 else ""
        sums = f"{plural(len(entry.crc32), 'block')} of CRC-32{sha}"
        yield f"  {name:<{width}}  {size(entry.size):>10}  {sums}{held.get(name, '')}"
    if len(files) > _MOST_FILES:
        yield f"  ... {len(files) - _MOST_FILES} more"


def _held_by_file(manifest: Manifest) -> dict[str, str]:
    """Return how many whole tensors and how many pieces lie in each file of a snapshot of a sharded model; else nothing."""
    if manifest.format == FORMAT:
        return {}
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for place in manifest.tensors.values():
        counts[place.file][place.piece is not None] += 1
    return {
        file: f"  {plural(whole, 'tensor')}, {plural(cut, 'piece')}" for file, (whole, cut) in counts.items()
    }


def _tensors(manifest: Manifest) -> Iterator[str]:
    yield "tensors"
    sums = tensors_by_prefix(manifest)
    width = max((len(part.prefix) for part in sums), default=0)
    for part in sums:
        count = plural(part.tensors, "tensor")
        yield f"  {part.prefix:<{width}}  {part.dtype:<8} {count:>14}  {size(part.bytes):>10}"
    in_pieces = [len(whole.pieces) for whole in manifest.whole.values() if whole.pieces[0].piece]
    if in_pieces:
        yield f"  {plural(len(in_pieces), 'tensor')} in pieces, up to {max(in_pieces)} each"
