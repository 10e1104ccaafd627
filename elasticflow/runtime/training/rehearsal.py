"""A standby traces the job's compiled model before it is needed, on one that it throws away.

torch.compile finds compiled kernels in its cache, and yet traces a model anew in every process: a third of a second for a
small one. What it has traced it keeps with the functions, not with the model: a second model of the same class takes 3 ms
(measured, torch 2.13). Whether that fits a later call is checked by the compiler's own guards, as ever.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import random
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elasticflow.runtime import torch_private
from elasticflow.runtime.process import compiler
from elasticflow.runtime.training import rehearsal_record
from elasticflow.runtime.training.loss import parse_loss
from elasticflow.runtime.training.precision import autocast
from elasticflow.system import free_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import ModuleType

    from elasticflow.runtime.training.rehearsal_record import RehearsalRecord

_CPU = torch.device("cpu")
_MOST_ITEMS, _MOST_BYTES = 1000, 1 << 20


class Outcome(NamedTuple):
    """What came of a rehearsal.

    Attributes:
        changed: What of the job's own modules it has changed, by name: with anything here, this process must not train.
        error: What ended it before its end.
    """

    changed: list[str]
    error: BaseException | None


def rehearse(
    factories: Path,
    record: RehearsalRecord,
    path: Sequence[str],
    interrupted: AbstractContextManager[None] | None = None,
) -> Outcome:
    """Build the job's model, trace it as in the first step of *record*, and throw it away; what was traced stays.

    Random streams, environment, settings of torch and the process group are as before, however it ends. Where something
    was raised, or a graph was not in the compiler's cache, nothing that was traced stays: workers use the kernels of the
    cache, and no others.

    Args:
        factories: The file of the launch folder that calls the job's own functions.
        record: How a worker called them.
        path: Folders of the job's own code.
        interrupted: Entered while the model is traced; whatever it raises there ends the rehearsal.
    """
    # What is imported meanwhile comes fresh into a worker, too; much of it is what the compiler has written.
    own = _own_modules(path)
    before = _marks(own)
    error: BaseException | None = None
    compiler.use_cache()
    try:
        with _as_it_was(record), torch_private.tracing_under(record.flags), interrupted or nullcontext():
            _trace(_load(factories, record), record)
    except BaseException as raised:  # noqa: BLE001  whatever the job's own code raises where it is given zeros
        error = raised
    gc.collect()
    free_memory.return_freed()
    if error is not None or torch_private.compiled_graphs()[1]:
        compiler.forget()
    else:
        compiler.note_rehearsal(record.rank, record.world_size)
    after = _marks(own)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    return Outcome(sorted(changed), error)


def _load(factories: Path, record: RehearsalRecord) -> ModuleType:
    spec = importlib.util.spec_from_file_location("elasticflow_factories", factories)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    if hasattr(code, "dataset"):
        code.dataset = SimpleNamespace(values=record.values)  # type: ignore[attr-defined]
    return code


def _trace(code: ModuleType, record: RehearsalRecord) -> None:
    model: nn.Module = code.build_model()
    if hasattr(code, "checkpoint"):
        code.checkpoint(model)
    model.compile()
    model.train()
    step = _Step(model, code.training_step)
    forward: nn.Module = step
    quiet: Callable[[], AbstractContextManager[Any]] = nullcontext
    if record.ddp is not None:
        options = {key: value for key, value in record.ddp.items() if key != "sync_batchnorm"}
        forward = ddp = DistributedDataParallel(step, forward_sync_buffers=False, **options)
        quiet = ddp.no_sync
    for described in record.batches:
        batch = rehearsal_record.make(described)
        with quiet():
            with autocast(record.precision, _CPU):
                loss = forward(batch)
            if loss is not None and loss.requires_grad:
                torch.autograd.backward(loss)


class _Step(nn.Module):
    """Calls the job's step inside of DistributedDataParallel, as training does."""

    def __init__(self, model: nn.Module, step: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.model, self._call = model, step

    def forward(self, batch: Any) -> Tensor | None:
        return parse_loss(self._call(self.model, batch)).value


@contextmanager
def _as_it_was(record: RehearsalRecord) -> Iterator[None]:
    """Be that worker, as far as its code can see, while this is entered; have the process as it was afterwards."""
    path, variables = list(sys.path), dict(os.environ)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    os.environ.update(record.variables)
    if record.has_group:
        torch_private.form_group_of(record.rank, record.world_size)
    try:
        yield
    finally:
        if record.has_group:
            dist.destroy_process_group()
        sys.path[:] = path
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _own_modules(path: Sequence[str]) -> dict[str, ModuleType]:
    """Return the job's own modules that are imported, by name."""
    folders = tuple(path)
    own = {}
    for name, module in tuple(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file.startswith(folders) and "site-packages" not in file and not name.startswith("elasticflow."):
            own[name] = module
    return own


def _marks(modules: Mapping[str, ModuleType]) -> dict[str, Any]:
    """Return marks of what modules and their classes hold: a number in them may name the next layer."""
    marks: dict[str, Any] = {}
    for name, module in modules.items():
        for key, value in tuple(vars(module).items()):
            marks |= _marks_of(f"{name}.{key}", key, value)
            if isinstance(value, type) and value.__module__ == name:
                for attribute, held in tuple(vars(value).items()):
                    marks |= _marks_of(f"{name}.{key}.{attribute}", attribute, held)
    return marks


def _marks_of(path: str, key: str, value: Any) -> dict[str, Any]:
    # The compiler puts what it has made beside the functions, under such names; a module is imported once.
    if key.startswith("__") or isinstance(value, type(sys)):
        return {}
    return {path: _mark(value, 3)}


def _mark(value: Any, depth: int) -> Any:
    """Return something that is equal as long as *value* is."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return repr(value)
        case Tensor():
            return id(value), torch_private.version_of(value)
        case random.Random():
            return hash(value.getstate())
        case np.random.Generator():
            return repr(value.bit_generator.state)
        case torch.Generator():
            return hash(bytes(value.get_state().numpy()))
        case itertools.count():
            return repr(value)
        case np.ndarray() if value.nbytes <= _MOST_BYTES:
            return value.shape, hash(value.tobytes())
        case list() | tuple() | set() | frozenset() if depth:
            return len(value), [_mark(each, depth - 1) for each in itertools.islice(value, _MOST_ITEMS)]
        case dict() if depth:
            held = itertools.islice(value.items(), _MOST_ITEMS)
            return len(value), [(_mark(k, depth - 1), _mark(v, depth - 1)) for k, v in held]
        case _:
            own = (
                getattr(value, "__dict__", None)
                if not isinstance(value, type) and not callable(value)
                else None
            )
            return id(value), _mark(own, depth - 1) if isinstance(own, dict) and depth else None
