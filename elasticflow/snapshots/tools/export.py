"""Exports a snapshot's weights and state in other libraries' formats; every byte is verified on its way.

A target is whole or absent: it is written under a hidden name beside, and renamed. Nothing is overwritten unless that
was asked for; then old and new change places in one act.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.errors import ExportError
from elasticflow.snapshots.format.shard_file import header
from elasticflow.snapshots.format.state_json import Ref, StateMark, refs
from elasticflow.snapshots.tools import durable
from elasticflow.snapshots.tools.exported import copy, slice_of
from elasticflow.system.atomic_files import temporary_beside

if TYPE_CHECKING:
    from elasticflow.snapshots.tools.exported import Export

Format = Literal["safetensors", "torch", "dcp", "transformers"]
SaveModel = Callable[[Path, Path], None]
"""Writes a model with the weights of a safetensors file into a folder that does not exist yet."""

# Files by which a folder is known: what torch.distributed.checkpoint writes last, what `save_pretrained` writes.
_MARKS = {"dcp": (".metadata",), "transformers": ("config.json", "adapter_config.json")}


def write(
    export: Export, form: Format, path: Path, *, replaces: bool = False, save_model: SaveModel | None = None
) -> int:
    """Write the export to *path* and return the number of its tensors.

    `safetensors` needs no torch; the others do. `transformers` needs *save_model*, which builds the model.

    Raises:
        ExportError: something is at *path*, the part is not in the snapshot or not of that format's kind, or
            *path* cannot be written. Nothing is left behind.
        DamagedSnapshotError: the snapshot is not what was written.
        SnapshotError: it cannot be read.
    """
    _check_target(path, form, replaces=replaces)
    temporary = temporary_beside(path)
    try:
        count = _write(export, form, temporary, save_model)
        durable.put(temporary, path, replaces=replaces)
    except FileExistsError:
        raise _taken(path, "give another place (-o PATH), or replace it: --force") from None
    except OSError as error:
        raise ExportError(
            f"{path} cannot be written: {error.strerror or error}", "give another place: -o PATH"
        ) from error
    finally:
        durable.remove(temporary)
    return count


def _write(export: Export, form: Format, temporary: Path, save_model: SaveModel | None) -> int:
    if form == "transformers":
        return _write_model(export, temporary, save_model)
    if form == "safetensors":
        return write_safetensors(export, temporary)
    from elasticflow.snapshots.tools import export_torch

    return (
        export_torch.write(export, temporary)
        if form == "torch"
        else export_torch.write_dcp(export, temporary)
    )


def _write_model(export: Export, temporary: Path, save_model: SaveModel | None) -> int:
    if export.part not in {"model", "ema"}:
        raise ExportError(
            f"--format transformers holds a model, not {export.part}",
            "leave --part out, or use another format",
        )
    assert save_model is not None, "the command gives it"
    weights = temporary.with_name(f"{temporary.name}.weights")
    try:
        count = write_safetensors(export, weights)
        save_model(weights, temporary)
    finally:
        durable.remove(weights)
    durable.sync_tree(temporary)
    return count


def _check_target(path: Path, form: Format, *, replaces: bool) -> None:
    if not os.path.lexists(path):
        return
    if not replaces:
        raise _taken(path, "give another place (-o PATH), or replace it: --force")
    # Replaced is only what an export could have made: never a folder of the user's own.
    marks = _MARKS.get(form)
    is_ours = path.is_file() if marks is None else any((path / mark).is_file() for mark in marks)
    if not is_ours:
        kind = {"dcp": "DCP folder", "transformers": "folder of a saved model"}.get(form, "file")
        raise _taken(path, f"it is no {kind}, so it is not replaced; give another place: -o PATH")


def _taken(path: Path, remedy: str) -> ExportError:
    return ExportError(f"{path} exists", remedy)


def write_safetensors(export: Export, path: Path) -> int:
    """Write the part as one safetensors file and return the number of its tensors; it survives a power cut.

    Names are those of the model's `state_dict()`, all of them: tied tensors, which safetensors cannot share, are written
    under each of their names, so that `model.load_state_dict(load_file(path))` is complete. The header's metadata names
    the snapshot, the ties (`tied`), and, of an optimizer or of all state, everything that is no tensor (`state`, JSON).

    Raises:
        ExportError: a model's state that is no tensor.
        OSError: the file cannot be written.
    """
    value = export.value()
    if export.part in {"model", "ema"}:
        _refuse_what_is_no_tensor(export, value)
    found = dict(refs(value))
    # The widest first: every tensor is aligned to its own width, which readers that map the file need.
    pieces = {key: slice_of(export, ref) for key, ref in found.items()}
    # Then by name: the same state makes the same file, wherever its pieces lie.
    order = sorted(pieces, key=lambda key: (-pieces[key].itemsize, key))
    front, offsets = header(_metadata(export, value, found), {key: pieces[key] for key in order})
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        total = len(front) + sum(piece.nbytes for piece in pieces.values())
        _reserve(descriptor, total)
        _write_at(descriptor, 0, 0, memoryview(front))
        copy(export, [(pieces[key], partial(_write_at, descriptor, offsets[key])) for key in order])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return len(pieces)


def _refuse_what_is_no_tensor(export: Export, value: dict[str, Any]) -> None:
    for key, item in value.items():
        if not isinstance(item, Ref):
            raise ExportError(
                f"{key} of the {export.part} is no tensor, and a safetensors file holds nothing else",
                "export it with --format torch",
            )


def _metadata(export: Export, value: Any, found: dict[str, Ref]) -> dict[str, str]:
    manifest = export.manifest
    about = {"format": "pt", "run_id": manifest.run_id, "snapshot": manifest.name, "step": str(manifest.step)}
    first: dict[Ref, str] = {}
    tied = {key: first[ref] for key, ref in found.items() if first.setdefault(ref, key) != key}
    if tied:
        about["tied"] = json.dumps(tied)
    if export.part in {"optimizer", "all"}:
        about["state"] = json.dumps(_plain(value, ""))
    return about


def _plain(value: Any, path: str) -> Any:
    """Return *value* as JSON: a tensor as `{"$tensor": its name in the file}`, other keys as text."""
    match value:
        case Ref():
            return {StateMark.TENSOR: path}
        case dict():
            return {
                str(key): _plain(item, f"{path}/{key}" if path else str(key)) for key, item in value.items()
            }
        case list() | tuple():
            return [_plain(item, f"{path}/{i}" if path else str(i)) for i, item in enumerate(value)]
        case float() if value != value or value in (float("inf"), float("-inf")):  # noqa: PLR0124
            return str(value)
        case _:
            return value


def _reserve(descriptor: int, size: int) -> None:
    """Take the room on the disk now: a full one is noticed before anything is read."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _write_at(descriptor: int, base: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], base + offset + done)
