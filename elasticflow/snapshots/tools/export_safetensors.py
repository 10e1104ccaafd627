"""A part of a snapshot as one safetensors file; needs no torch.

Names are those of the model's `state_dict()`, all of them: tied tensors, which safetensors cannot share, are written
under each of their names, so that `model.load_state_dict(load_file(path))` is complete. The header's metadata names
the snapshot, the ties (`tied`), and, of an optimizer or of all state, everything that is no tensor (`state`, JSON).
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticflow.errors import ExportError
from elasticflow.snapshots.format.shard_file import header
from elasticflow.snapshots.format.state_json import Ref, StateMark, refs
from elasticflow.snapshots.tools.exported import copy, slice_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.snapshots.tools.exported import Export


def write(export: Export, path: Path) -> int:
    """Write the file and return the number of its tensors; it survives a power cut.

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
