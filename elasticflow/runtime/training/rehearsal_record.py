"""What a standby needs to trace a compiled model before it is needed: how the first step of a generation called it.

Shapes, types and flags alone: no value of the data is written down.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elasticflow.protocol import worker_environment
from elasticflow.protocol.worker_environment import RANK_VARIABLES
from elasticflow.runtime import torch_private
from elasticflow.runtime.process import compiler
from elasticflow.system import atomic_files
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.runtime.process.context import Worker

# Shapes of a first step: micro-batches and virtual shards differ by a sample or two.
_MOST_BATCHES = 4
_EMPTY: Mapping[type, Any] = {bool: False, int: 0, float: 0.0, str: "", type(None): None}


class _UnknownError(Exception):
    """A batch holds something that cannot be made again without its values."""


@dataclass(frozen=True)
class RehearsalRecord:
    """How one worker's first step called the training step.

    Attributes:
        rank: The worker's.
        world_size: Of its group.
        batches: Shapes of its micro-batches, each once, in the order of the step; none if they cannot be made again.
        precision: Of the forward: fp32, bf16 or fp16.
        ddp: Options of DistributedDataParallel around the model; None: there was none.
        has_group: Whether there was a process group.
        variables: Environment variables by which the job's code may know its rank.
        flags: Settings of torch under which it was traced.
        values: Attributes of the training data that arguments of the job stand for.
        memory: Most bytes that the worker ever held.
    """

    rank: int
    world_size: int
    batches: list[Any]
    precision: str
    ddp: dict[str, Any] | None
    has_group: bool
    variables: dict[str, str]
    flags: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    memory: int = 0


def recorded(
    worker: Worker,
    training_step: Callable[[nn.Module, Any], Any],
    *,
    precision: str,
    ddp: Mapping[str, Any] | None,
) -> Callable[[nn.Module, Any], Any]:
    """Return *training_step*; where standbys rehearse, its calls in the first step of this generation are recorded.

    Args:
        worker: This worker.
        training_step: Called with the model and a micro-batch.
        precision: Of its forward.
        ddp: Options of DistributedDataParallel around the model; None: there is none.
    """
    # On a GPU a second model might take memory that training needs.
    if worker_environment.COMPILER_CACHE not in os.environ or worker.device.type != "cpu":
        return training_step
    if worker.identity.started_by != "launcher":
        return training_step
    path = worker.run_folder.rehearsal(worker.node, worker.local_rank)
    path.unlink(missing_ok=True)  # what was written by a generation before is of other ranks and shapes
    recorder = _Recorder(worker, training_step, precision, ddp)
    worker.at_first_step.append(lambda: recorder.write(path))
    return recorder


class _Recorder:
    """Calls the training step, and notes with what, until it is written down."""

    def __init__(
        self,
        worker: Worker,
        step: Callable[[nn.Module, Any], Any],
        precision: str,
        ddp: Mapping[str, Any] | None,
    ) -> None:
        self._worker, self._step, self._precision = worker, step, precision
        self._ddp = None if ddp is None else dict(ddp)
        self._batches: list[Any] | None = []
        self._flags: dict[str, Any] = {}

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        if self._batches is not None and len(self._batches) < _MOST_BATCHES:
            self._note(batch)
        return self._step(model, batch)

    def _note(self, batch: Any) -> None:
        assert self._batches is not None
        try:
            described = describe(batch)
        except _UnknownError:
            self._batches = None
            return
        self._flags = self._flags or torch_private.tracing_flags()
        if described not in self._batches:
            self._batches.append(described)

    def write(self, path: Path) -> None:
        """Write the record, whole; on a full disk nothing is written, and standbys do not rehearse."""
        worker = self._worker
        record = RehearsalRecord(
            rank=worker.rank,
            world_size=worker.world_size,
            # What was traced beforehand and did not fit is not traced again: it counts in torch's limit of traces.
            batches=[] if compiler.has_rehearsed_in_vain() else self._batches or [],
            precision=self._precision,
            ddp=self._ddp,
            has_group=worker.store is not None,
            variables={name: os.environ[name] for name in RANK_VARIABLES if name in os.environ},
            flags=self._flags,
            values=dict(worker.dataset_values),
            memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        self._batches = None
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(dataclasses.asdict(record)).encode()
            atomic_files.replace(path, (text,), sync=False)


def read(path: Path) -> RehearsalRecord | None:
    """Return a record; None if it is absent, damaged, or of another version."""
    with suppress(OSError, BadJsonError, TypeError):
        return RehearsalRecord(**parse(path.read_bytes()))
    return None


def describe(value: Any) -> Any:
    """Return what is needed to make a batch of the same form, as JSON.

    Raises:
        _UnknownError: it holds an object whose form is not known.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or type(value) is not Tensor:
            raise _UnknownError
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": {"shape": list(value.shape), "stride": list(value.stride()), "dtype": dtype}}
    if type(value) in _EMPTY:
        return {"plain": type(value).__name__}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _UnknownError
        return {
            "mapping": _name_of(type(value)),
            "items": {key: describe(each) for key, each in value.items()},
        }
    if isinstance(value, list | tuple):
        items = [describe(each) for each in value]
        return {"sequence": _name_of(type(value)), "items": items}
    raise _UnknownError


def make(described: Any) -> Any:
    """Return a batch of zeros of the form that `describe` returned."""
    match described:
        case {"tensor": {"shape": shape, "stride": stride, "dtype": dtype}}:
            return torch.empty_strided(shape, stride, dtype=getattr(torch, dtype)).zero_()
        case {"plain": name}:
            return next(value for kind, value in _EMPTY.items() if kind.__name__ == name)
        case {"mapping": name, "items": items}:
            return _class_of(name)({key: make(each) for key, each in items.items()})
        case {"sequence": name, "items": items}:
            kind, values = _class_of(name), [make(each) for each in items]
            return kind(*values) if hasattr(kind, "_fields") else kind(values)
        case _:
            raise ValueError(described)


def _name_of(kind: type) -> str:
    if "<locals>" in kind.__qualname__:
        raise _UnknownError
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found
