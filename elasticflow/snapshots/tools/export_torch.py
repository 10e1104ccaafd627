"""A part of a snapshot as a torch file or a DCP folder; torch is imported when it is needed.

Torch writes tensors that are in memory: the whole part is, once. `export.write_safetensors` needs no more than some blocks.
"""

from __future__ import annotations

import os
import warnings
from importlib import util
from typing import TYPE_CHECKING, Any

from elasticflow.errors import TorchMissingError
from elasticflow.snapshots.format.pieces import DTYPES
from elasticflow.snapshots.format.state_json import refs, replace_refs
from elasticflow.snapshots.tools import durable
from elasticflow.snapshots.tools.exported import copy, slice_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from elasticflow.snapshots.tools.exported import Export, TensorSlice


def write(export: Export, path: Path) -> int:
    """Write what `torch.load(path, weights_only=True)` returns as the part's `state_dict()`; tied tensors stay tied.

    Returns the number of tensors. The file survives a power cut.

    Raises:
        TorchMissingError: there is no torch.
        OSError: the file cannot be written.
    """
    _require_torch("torch")
    import torch

    value = export.value()
    with path.open("xb") as file:
        torch.save(_with_tensors(export, value), file)
        file.flush()
        os.fsync(file.fileno())
    return sum(1 for _ in refs(value))


def write_dcp(export: Export, path: Path) -> int:
    """Write a folder that `torch.distributed.checkpoint.load` reads, without a process group.

    A model lies in it under its own names; all state under `model`, `optimizer` and so on. An optimizer's state is
    named by the model's parameters, as `torch.distributed.checkpoint.state_dict.get_state_dict` has it.

    Returns the number of tensors. The folder survives a power cut.

    Raises:
        TorchMissingError: there is no torch.
        OSError: the folder cannot be written.
    """
    _require_torch("dcp")
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    value = _with_names(export, export.value())
    path.mkdir()
    with warnings.catch_warnings():
        # torch warns that one process saves alone, which is what we want.
        warnings.filterwarnings("ignore", category=UserWarning)
        try:
            writer = FileSystemWriter(path, overwrite=False)
            save(_with_tensors(export, value), storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            # CheckpointException is a BaseException.
            causes = [str(cause) for cause, _ in error.failures.values()]
            raise OSError(f"torch.distributed.checkpoint: {'; '.join(causes)}") from None
    durable.sync_tree(path)
    return sum(1 for _ in refs(value))


def _require_torch(form: str) -> None:
    if util.find_spec("torch") is None:
        raise TorchMissingError(
            f"--format {form} needs torch, which is not installed",
            "pip install 'elasticflow[torch]', or take --format safetensors, which needs none",
        )


def _with_tensors(export: Export, value: Any) -> Any:
    """Return *value* with the tensors in it, read and verified; a tensor that occurs several times stays one tensor."""
    pieces = {ref: slice_of(export, ref) for _, ref in refs(value)}
    memory = {ref: bytearray(piece.nbytes) for ref, piece in pieces.items()}
    copy(export, [(piece, _into(memory[ref])) for ref, piece in pieces.items()])
    tensors = {ref: _tensor(piece, memory[ref]) for ref, piece in pieces.items()}
    return replace_refs(value, lambda ref: tensors[ref])


def _into(memory: bytearray) -> Callable[[int, memoryview], None]:
    view = memoryview(memory)

    def take(offset: int, data: memoryview) -> None:
        view[offset : offset + len(data)] = data

    return take


def _tensor(piece: TensorSlice, memory: bytearray) -> Tensor:
    import torch

    dtype = getattr(torch, DTYPES[piece.dtype].torch_name)
    return (
        torch.frombuffer(memory, dtype=dtype).view(piece.shape)
        if memory
        else torch.empty(piece.shape, dtype=dtype)
    )


def _with_names(export: Export, value: Any) -> Any:
    """Return *value* with the optimizer's parameters called by the model's names, if the snapshot tells them."""
    if export.part not in {"optimizer", "all"}:
        return value
    for part, names in export.parameter_names().items():
        if any(name is None for group in names for name in group):
            continue
        key = part if export.part == "all" else part.removeprefix("optimizer").removeprefix(".")
        if not key:
            return _named(value, names)
        if key in value:
            value = {**value, key: _named(value[key], names)}
    return value


def _named(optimizer: dict[str, Any], names: list[list[str | None]]) -> dict[str, Any]:
    if not {"state", "param_groups"} <= optimizer.keys():
        return optimizer
    groups = [{**group, "params": own} for group, own in zip(optimizer["param_groups"], names, strict=True)]
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, (name for group in names for name in group), strict=True))
    return {
        **optimizer,
        "state": {of.get(number, number): state for number, state in optimizer["state"].items()},
        "param_groups": groups,
    }
