"""Exports a snapshot's weights and state in other libraries' formats; every byte is verified on its way.

A target is whole or absent: it is written under a hidden name beside, and renamed. Nothing is overwritten unless that
was asked for; then old and new change places in one act.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticflow.errors import ExportError
from elasticflow.snapshots.tools import durable
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
        from elasticflow.snapshots.tools.export_safetensors import write

        return write(export, temporary)
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
    from elasticflow.snapshots.tools.export_safetensors import write

    weights = temporary.with_name(f"{temporary.name}.weights")
    try:
        count = write(export, weights)
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
