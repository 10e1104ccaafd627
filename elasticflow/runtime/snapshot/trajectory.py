"""A record of the state after every step, if requested: rank 0's, and where the model is sharded, that of rank 0's whole shard group.

Digests are CRC-32 of a tensor's bytes in the order of its elements, whatever its device and layout. They are fast to
compute, and a missed difference (one in four billion) shows in the next step, which builds on the tensor.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from torch import Tensor

from elasticflow.protocol import trajectory_record
from elasticflow.runtime.process.checksums import crc_of
from elasticflow.runtime.process.sharded_tensors import box_of, is_sharded, local_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.state.state import State

_POLL_S = 0.005


class TrajectoryRecorder:
    """Writes a line for the initial state of a generation, and a line after each step.

    Of the ranks that hold the same shard of the model the first one records it.
    """

    def __init__(
        self, folder: Path, worker: Worker, state: State, position: Position, *, is_exact: bool
    ) -> None:
        self._folder, self._worker, self._state = folder, worker, state
        # The shard of the model that this rank records: 0 where nothing is sharded; None: another rank records it.
        self._shard = _recorded_shard(state.model, worker.rank)
        if self._shard is None:
            return
        if is_exact and self._shard == 0:
            trajectory_record.exact_file(self._folder).touch()
        path = trajectory_record.records_file(self._folder, self._worker.generation, self._shard)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        names = (path.name for path in self._folder.iterdir())
        # Steps after which the run must wait.
        self._holds = {
            int(name.removeprefix(trajectory_record.HOLD))
            for name in names
            if name.startswith(trajectory_record.HOLD) and self._shard == 0
        }
        self._write(position, None)
        self._worker.progress.after_step = self.step

    def step(self, position: Position, loss: float) -> None:
        """Record the finished step, and wait if the run must be held after it."""
        self._write(position, loss)
        if position.step in self._holds:
            self._wait(position.step)

    def _write(self, position: Position, loss: float | None) -> None:
        self._state.reshard()
        worker = self._worker
        record = trajectory_record.Record(
            position.step,
            position.samples,
            loss,
            worker.generation,
            worker.world_size,
            {name: text for name, text in digests(self._state) if not self._shard or ":" in text},
        )
        line = record.line()
        while line:
            line = line[os.write(self._file, line) :]

    def _wait(self, step: int) -> None:
        held = trajectory_record.held_file(self._folder, step)
        trajectory_record.hold_file(self._folder, step).replace(held)
        while held.exists() and not self._worker.vote.leave_wanted:
            self._worker.heartbeat.beat()
            time.sleep(_POLL_S)


def digests(state: State) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of every tensor and number of model, optimizers and averaged model.

    A model's names come from its `state_dict`. Buffers that are not persistent are left out: snapshots do not hold them,
    and a restart may compute other values. A sharded tensor has the digest of this rank's rows (`trajectory_record.piece`).
    """
    yield from _walk("model", state.model.state_dict())
    for name, optimizer in state.optimizers.items():
        yield from _walk(name, _by_name(optimizer, state.model))
    if state.ema is not None:
        yield from _walk("ema", state.ema.state_dict())


def digest(tensor: Tensor) -> str:
    """Return the CRC-32 of the bytes of *tensor*, in hexadecimal; of a sharded one that of this rank's rows, with their length."""
    local = local_of(tensor.detach())
    if is_sharded(tensor):
        return trajectory_record.piece(crc_of(local), local.nbytes)
    return f"{crc_of(local):08x}"


def _recorded_shard(model: nn.Module, rank: int) -> int | None:
    """Return the number of the shard that *rank* holds and records; None if a lower rank holds and records it, too."""
    boxes = (box_of(parameter, name) for name, parameter in model.named_parameters())
    box = next((box for box in boxes if box is not None), None)
    number, first = (0, 0) if box is None else (box.shards.shard, box.shards.holders[0])
    return number if rank == first else None


def _by_name(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return the optimizer's state by the names of the parameters, and the options of its groups."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    by_name: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        by_name[f"group {number}"] = {key: value for key, value in group.items() if key != "params"}
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group {number}, parameter {place}")
            by_name[name] = optimizer.state.get(parameter, {})
    return by_name


def _walk(path: str, value: Any) -> Iterator[tuple[str, str]]:
    match value:
        case Tensor():
            yield path, digest(value)
        case dict():
            for key, item in value.items():
                yield from _walk(f"{path}/{key}", item)
        case list() | tuple():
            for place, item in enumerate(value):
                yield from _walk(f"{path}/{place}", item)
        case int() | float():
            yield path, repr(value)
        case _:
            pass  # None, names and similar values, which training does not compute
