"""Looks at a job's trained state for `--deep`: builds it, steps it once without data, and counts a snapshot's bytes."""

from __future__ import annotations

import mmap
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import UninitializedParameter, is_lazy

from elasticflow.deep.child.report import BrokenError
from elasticflow.deep.messages import Facts
from elasticflow.errors import JobKeyError, StateError
from elasticflow.runtime.process import reachable
from elasticflow.runtime.process.torch_private import storage_id
from elasticflow.runtime.snapshot import unsaved
from elasticflow.runtime.state.loading import add_tied, check_module, weight_files
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.runtime.training import several_optimizers
from elasticflow.runtime.training.param_groups import require_options, taken_by

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer
    from torch.optim.swa_utils import AveragedModel

    from elasticflow.deep.child.entry_point import EntryPoint
    from elasticflow.deep.child.report import Report
    from elasticflow.runtime.training.deferred_build import DeferredBuild
    from elasticflow.runtime.training.param_groups import Group


# Linux has this flag; Python names it from 3.13 on.
_MAP_NORESERVE = 0x4000


class Trained(NamedTuple):
    """The state that a step changes.

    Attributes:
        optimizer: The optimizer, or several if the job's step moves them itself.
        optimizers: The optimizer again, under the name that train.py uses for several.
        scheduler: The schedule, or several.
        frozen: `id` of each parameter that is frozen when the model is built; a step may freeze others for a
            while.
    """

    model: nn.Module
    optimizer: Any
    optimizers: Any
    scheduler: Any
    average: AveragedModel | None
    scaler: GradScaler | None
    frozen: frozenset[int]

    def each_optimizer(self) -> list[Optimizer]:
        """Return the optimizer, or each of several."""
        return list(several_optimizers.optimizers(self.optimizer).values())


def build(report: Report, code: EntryPoint, shard: Callable[[nn.Module], None] | None = None) -> Trained:
    """Return model, optimizer and schedule as train.py makes them, on torch's default device.

    Args:
        shard: Shards the model and its average before the optimizer is made.

    Raises:
        BrokenError: the job's code raised, or returned objects that cannot be trained; the problem was
            reported.
    """

    def made(function: str, what: str, **known: Any) -> Any:
        if function not in code:
            return None
        key = code.key_of(function)

        def build() -> Any:
            try:
                return code.call(function, **known)
            except JobKeyError:
                raise
            except StateError as error:  # the result does not suit
                report.refuse("result", f"{key.rpartition('.')[0]}.entry", error)

        return report.call("factory", key, f"building {what}", build)

    model = _build_model(report, code)
    average = made("build_average", "the average of the weights", model=model)
    if shard is not None:
        for module in (model, *([] if average is None else [average.module])):
            shard(module)
    optimizer = made("build_optimizer", "the optimizer", model=model)
    require = several_optimizers.optimizers if code.moves_optimizers else several_optimizers.require_one
    _require(report, "optimizer.entry", lambda: require(optimizer))
    if "build_parameter_groups" in code:
        _look_at_groups(report, optimizer, code.call("build_parameter_groups"))
    scheduler = made("build_scheduler", "the schedule", optimizer=optimizer, optimizers=optimizer)
    if scheduler is not None and not code.moves_optimizers:
        _require(report, "lr_scheduler.entry", lambda: several_optimizers.require_callable(scheduler))
    # A scale of 1: a first step that overflows would leave the optimizer without a state.
    scaler = GradScaler("cpu", init_scale=1.0) if code.precision == "fp16" else None
    frozen = frozenset(id(p) for p in model.parameters() if not p.requires_grad)
    return Trained(model, optimizer, optimizer, scheduler, average, scaler, frozen)


def _require(report: Report, key: str, require: Callable[[], object]) -> None:
    try:
        require()
    except StateError as error:
        report.refuse("result", key, error)


def _look_at_groups(report: Report, optimizer: Any, groups: Sequence[Group]) -> None:
    """Report the parameters of each group; the optimizer must accept the options given to the groups."""
    try:
        require_options(optimizer, groups)
    except JobKeyError as error:
        report.refuse("result", error.key, error)
    report.facts(Facts(groups=tuple(taken_by(optimizer, groups))))


def _build_model(report: Report, code: EntryPoint) -> nn.Module:
    """Return the model; names, shapes and dtypes of its initial weights are checked."""

    def build() -> Any:
        try:
            deferred = code.get("DeferredBuild")
            if deferred is None or torch.get_default_device().type == "meta":
                return code.call("build_model")
            return _filled(deferred(), code)
        except JobKeyError as error:  # raised for train.gradient_checkpointing
            report.refuse("result", error.key, error)

    model = report.call("factory", code.key_of("build_model"), "building the model", build)
    if not isinstance(model, nn.Module):
        what = f"model.entry returned a {type(model).__name__}, which is no torch.nn.Module"
        report.refuse("result", "model.entry", StateError(what, "return the model itself"))
    if not any(p.requires_grad for p in model.parameters()):
        what = f"model.entry returned a {type(model).__name__} without parameters to train"
        report.refuse("result", "model.entry", StateError(what))
    path = code.get("WEIGHTS")
    if path is not None:
        name = path.removeprefix(f"{code['ROOT']}/")
        report.call("result", "model.weights", f"reading {name}", lambda: check_weights(model, path))
    return model


def _filled(build: DeferredBuild, code: EntryPoint) -> Any:
    """Return the model, built as workers build it, but all of its blocks at once."""
    model = build.call(code.call, "build_model")
    if isinstance(model, nn.Module):
        build.fill(model)
    return model


def check_weights(model: nn.Module, path: str) -> None:
    """Compare names, shapes and dtypes in safetensors files with the model; no tensor is read.

    Raises:
        StateError: names, shapes or dtypes differ.
        OSError: a file cannot be read.
    """
    weights: dict[str, Tensor] = {}
    for name in weight_files(path):
        with safe_open(name, "pt") as file:
            slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
            weights |= {
                key: torch.empty(part.get_shape(), dtype=BY_NAME[part.get_dtype()], device="meta")
                for key, part in slices.items()
            }
    add_tied(model, weights)
    try:
        check_module(model, weights, "model")
    except StateError as error:
        # The message speaks of weights, since they come from no snapshot.
        what = error.message.partition(": ")[2].replace("in the snapshot", "in the file")
        remedy = "name weights of this model, or change model.args"
        raise StateError(f"model.weights does not fit the model: {what}", remedy) from error


def step_without_data(report: Report, trained: Trained) -> None:
    """Have the optimizer make its state from gradients of zero; the weights do not matter here.

    Raises:
        BrokenError: the optimizer raised; the problem was reported.
    """
    for parameter in several_optimizers.parameters_of(trained.each_optimizer()):
        if parameter.requires_grad and not is_lazy(parameter):
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in trained.each_optimizer():
        step: Any = optimizer.step
        report.call("step", "optimizer.entry", "a step of the optimizer without data", step)


def materialize(trained: Trained) -> None:
    """Give tensors of the meta device memory that is never touched: a snapshot holds no meta tensors.

    Raises:
        RuntimeError: torch cannot swap a tensor, since another object refers to it.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    on_meta = {id(tensor): tensor for tensor in _tensors(trained) if tensor.is_meta}
    for tensor in on_meta.values():
        meta = tensor.untyped_storage()
        memory = storages.get(storage_id(tensor))
        if memory is None:
            memory = storages[storage_id(tensor)] = _untouched(meta.nbytes())
        real = torch.empty(0, dtype=tensor.dtype).set_(
            memory, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        tensor.grad = None
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


def _untouched(size_bytes: int) -> torch.UntypedStorage:
    """Return memory that takes none until it is written, however large: the kernel does not count it either."""
    if not size_bytes or sys.platform != "linux":
        return torch.UntypedStorage(size_bytes)  # type: ignore[no-untyped-call]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), dtype=torch.uint8).untyped_storage()


def _tensors(trained: Trained) -> Iterable[Tensor]:
    for module in (trained.model, trained.average):
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()
    # An optimizer may hold other optimizers.
    held = reachable.leaves(several_optimizers.optimizers(trained.optimizer), {})
    yield from (leaf.value for leaf in held if isinstance(leaf.value, Tensor))


def count(report: Report, code: EntryPoint, trained: Trained) -> State:
    """Report the size of a snapshot, counted as in staging, and return the state it would hold.

    Raises:
        BrokenError: a snapshot cannot hold the state; the problem was reported.
    """
    parameters = [p for p in trained.model.parameters() if not isinstance(p, UninitializedParameter)]
    report.facts(
        Facts(
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if id(p) not in trained.frozen),
        )
    )
    report.doing("reading the state", "model.entry")
    try:
        state = state_of(trained, included(code))
        tensors = state.capture().tensors
    except Exception as error:
        report.problem("state", key_of(str(error)), error)
        raise BrokenError from error
    report.facts(Facts(snapshot_bytes=sum(tensor.nbytes for tensor in tensors.values())))
    return state


def require_held(report: Report, code: EntryPoint, state: State) -> None:
    """Report per-parameter state of an optimizer that no snapshot would hold, after a step without data.

    An optimizer that holds other optimizers without a `state_dict` for them loses their state. Only a
    training step finds other state that changes.
    """
    walk = reachable.leaves(
        unsaved.roots_of(state), unsaved.names_of(state.model), unsaved.outside_of(state.model)
    )
    by_parameter = {
        leaf.path: leaf.value for leaf in walk if ".state[" in leaf.path and _has_shape(leaf.value)
    }
    captured = {k: t for k, t in state.capture().tensors.items() if not k.startswith("model/")}
    held = {storage_id(tensor) for tensor in captured.values()}
    reached = {storage_id(tensor) for tensor in by_parameter.values()}
    # A `state_dict` may return clones.
    copies = Counter((t.shape, t.dtype) for t in captured.values() if storage_id(t) not in reached)
    lost = []
    for path, tensor in by_parameter.items():
        if storage_id(tensor) in held or unsaved.is_scratch(path):
            continue
        if copies[tensor.shape, tensor.dtype]:
            copies[tensor.shape, tensor.dtype] -= 1
        elif not unsaved.is_ignored(path, code.ignored):
            lost.append(path)
    if lost:
        report.problem("restart", key_of(lost[0]), unsaved.refusal(lost))


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0


def state_of(trained: Trained, include: dict[str, Any]) -> State:
    """Return the state that a snapshot would hold."""
    return State(
        model=trained.model,
        optimizers=trained.optimizer,
        scheduler=trained.scheduler,
        scaler=trained.scaler,
        ema=trained.average,
        include=include,
    )


def included(code: EntryPoint) -> dict[str, Any]:
    """Return the job's own objects that snapshots include, by name."""
    return dict(code.call("build_included")) if "build_included" in code else {}


def key_of(message: str) -> str:
    """Return the key of the job file whose state cannot be stored: *message* begins with the part's name."""
    part = re.split(r"[/\s\[]", message)[0]
    if part.startswith("include."):
        return ".".join(["snapshots", *part.split(".")[:2]])
    part = part.partition(".")[0]
    return {"optimizer": "optimizer.entry", "scheduler": "lr_scheduler.entry"}.get(part, "model.entry")
