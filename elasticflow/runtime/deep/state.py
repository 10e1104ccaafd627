"""`--deep` looks at what a job trains: built, stepped once without data, counted as a snapshot would be."""

from __future__ import annotations

import inspect
import operator
import re
from collections import Counter
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import JobKeyError, StateError
from elasticflow.protocol.deep_messages import Facts
from elasticflow.run_folder import path_from_root
from elasticflow.runtime.deep.report import BrokenError
from elasticflow.runtime.model.gradient_checkpointing import checkpoint_activations
from elasticflow.runtime.process.torch_private import storage_id
from elasticflow.runtime.snapshot import reachable, unsaved
from elasticflow.runtime.snapshot.rank_shard import nbytes_of
from elasticflow.runtime.state.loading import add_tied, check_module, weight_files
from elasticflow.runtime.state.state import State
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.runtime.training import several_optimizers
from elasticflow.runtime.training.param_groups import require_options, taken_by

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import ModuleType

    from torch.optim import Optimizer

    from elasticflow.protocol.deep_messages import DeepJob, ModelTable, OptimizerTable, SchedulerTable
    from elasticflow.runtime.deep.report import Report
    from elasticflow.runtime.training.param_groups import Group


class Trained(NamedTuple):
    """What a step changes.

    Attributes:
        model: The model.
        optimizer: The optimizer, or several if the job's step moves them itself.
        scheduler: The schedule, or several.
        average: The averaged weights, if the job keeps them.
        frozen: `id` of the parameters that are not trained as the model is built; a step may freeze others for a while.
    """

    model: nn.Module
    optimizer: Any
    scheduler: Any
    average: AveragedModel | None
    frozen: frozenset[int]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizer, or each of several."""
        return list(several_optimizers.optimizers(self.optimizer).values())


def moves_optimizers(code: ModuleType) -> bool:
    """True if the job's step moves the optimizers itself."""
    return "optimizers" in inspect.signature(code.training_step).parameters


def build(report: Report, code: ModuleType, job: DeepJob) -> Trained:
    """Return model, optimizer and schedule as train.py makes them, on torch's default device.

    Raises:
        BrokenError: something raised, or returned what cannot be trained; reported.
    """
    model = _build_model(report, code, job)
    optimizer_key = _key_of_factory("optimizer", job.optimizer)
    optimizer = report.call(
        "factory", optimizer_key, "building the optimizer", lambda: code.build_optimizer(model)
    )
    try:
        (several_optimizers.optimizers if moves_optimizers(code) else several_optimizers.require_one)(
            optimizer
        )
    except StateError as error:
        report.refuse("result", "optimizer.entry", error)
    if hasattr(code, "parameter_groups_of_job"):
        _look_at_groups(report, optimizer, code.parameter_groups_of_job())
    scheduler = None
    if job.lr_scheduler is not None:
        scheduler = report.call(
            "factory",
            _key_of_factory("lr_scheduler", job.lr_scheduler),
            "building the schedule",
            lambda: code.build_scheduler(optimizer),
        )
        try:
            if moves_optimizers(code):
                scheduler = several_optimizers.Schedules(scheduler)
            else:
                several_optimizers.require_callable(scheduler)
        except StateError as error:
            report.refuse("result", "lr_scheduler.entry", error)
    average = None
    if job.ema is not None:
        decay = get_ema_multi_avg_fn(job.ema)  # type: ignore[no-untyped-call]
        average = report.call(
            "factory", "train.ema", "copying the model", lambda: AveragedModel(model, multi_avg_fn=decay)
        )
    frozen = frozenset(id(p) for p in model.parameters() if not p.requires_grad)
    return Trained(model, optimizer, scheduler, average, frozen)


def _look_at_groups(report: Report, optimizer: Any, groups: Sequence[Group]) -> None:
    """Report what each group took; the optimizer has the options that they are given."""
    try:
        require_options(optimizer, groups)
    except JobKeyError as error:
        report.refuse("result", error.key, error)
    report.facts(Facts(groups=tuple(taken_by(optimizer, groups))))


def _build_model(report: Report, code: ModuleType, job: DeepJob) -> nn.Module:
    """Return the model; of its initial weights, names, shapes and dtypes are checked."""
    model_key = _key_of_factory("model", job.model)
    model = report.call("factory", model_key, "building the model", code.build_model)
    if not isinstance(model, nn.Module):
        what = f"model.entry returned a {type(model).__name__}, which is no torch.nn.Module"
        report.refuse("result", "model.entry", StateError(what, "return the model itself"))
    if not any(p.requires_grad for p in model.parameters()):
        what = f"model.entry returned a {type(model).__name__} without parameters to train"
        report.refuse("result", "model.entry", StateError(what))
    weights = job.model.weights
    if weights is not None:
        path = str(code.ROOT / (path_from_root(weights) or weights))
        report.call("result", "model.weights", f"reading {weights}", lambda: check_weights(model, path))
    globs = job.gradient_checkpointing
    if globs is not False:
        try:
            checkpoint_activations(model, None if globs is True else globs)
        except JobKeyError as error:
            report.refuse("result", error.key, error)
    return model


def _key_of_factory(table: str, content: ModelTable | OptimizerTable | SchedulerTable) -> str:
    return f"{table}.args" if content.has_args else f"{table}.entry"


def check_weights(model: nn.Module, path: str) -> None:
    """Compare what safetensors files say of their tensors with the model; no tensor is read.

    Raises:
        StateError: names, shapes or dtypes differ.
        OSError: it cannot be read.
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
        # In words of weights, which come from no snapshot.
        what = error.message.partition(": ")[2].replace("in the snapshot", "in the file")
        remedy = "name weights of this model, or change model.args"
        raise StateError(f"model.weights does not fit the model: {what}", remedy) from error


def step_without_data(report: Report, trained: Trained) -> None:
    """Have the optimizer make its state, from gradients of zero; the weights do not matter here.

    Raises:
        BrokenError: it raised; reported.
    """
    for parameter in several_optimizers.parameters_of(trained.optimizers):
        if parameter.requires_grad and not is_lazy(parameter):
            parameter.grad = torch.zeros_like(parameter)
    for optimizer in trained.optimizers:
        step: Any = optimizer.step
        report.call("step", "optimizer.entry", "a step of the optimizer without data", step)


def materialize(trained: Trained) -> None:
    """Give tensors of the meta device memory, which nobody touches: a snapshot holds no others.

    Raises:
        RuntimeError: torch cannot, since something else refers to a tensor.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    on_meta = {id(tensor): tensor for tensor in _tensors(trained) if tensor.is_meta}
    for tensor in on_meta.values():
        meta = tensor.untyped_storage()
        memory = storages.setdefault(storage_id(tensor), torch.UntypedStorage(meta.nbytes()))  # type: ignore[no-untyped-call]
        real = torch.empty(0, dtype=tensor.dtype).set_(
            memory, tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        if isinstance(tensor, nn.Parameter):
            real = nn.Parameter(real, requires_grad=tensor.requires_grad)
        tensor.grad = None
        torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


def _tensors(trained: Trained) -> Iterable[Tensor]:
    for module in (trained.model, trained.average):
        if module is not None:
            yield from module.parameters()
            yield from module.buffers()
    # An optimizer may hold others.
    held = reachable.leaves(several_optimizers.optimizers(trained.optimizer), {})
    yield from (leaf.value for leaf in held if isinstance(leaf.value, Tensor))


def count(report: Report, job: DeepJob, trained: Trained) -> State:
    """Report how large a snapshot is, counted as it would be staged, and return the state that it is of.

    Raises:
        BrokenError: it cannot hold the state; reported.
    """
    parameters = [p for p in trained.model.parameters() if not isinstance(p, UninitializedParameter)]
    report.facts(
        Facts(
            parameters=sum(p.numel() for p in parameters),
            trainable=sum(p.numel() for p in parameters if id(p) not in trained.frozen),
        )
    )
    include = included(report, job)
    report.doing("reading the state", "model.entry")
    try:
        state = State(
            model=trained.model,
            optimizers=trained.optimizer,
            scheduler=trained.scheduler,
            scaler=GradScaler("cpu") if job.precision == "fp16" else None,
            ema=trained.average,
            include=include,
        )
        tensors = state.capture().tensors
    except Exception as error:
        report.problem("state", key_of(str(error)), error)
        raise BrokenError from error
    sizes = {key: nbytes_of(tensor) for key, tensor in tensors.items()}
    report.facts(
        Facts(
            snapshot_bytes=sum(sizes.values()),
            model_bytes=sum(size for key, size in sizes.items() if key.startswith("model/")),
            optimizer_bytes=sum(
                size for key, size in sizes.items() if several_optimizers.is_of_optimizer(key)
            ),
        )
    )
    return state


def require_held(report: Report, job: DeepJob, state: State) -> None:
    """Report what an optimizer keeps for each parameter and no snapshot would hold, after a step without data.

    An optimizer that holds others without a `state_dict` for them loses theirs. Whatever else moves is found by a
    training step alone.
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
    # A `state_dict` may clone what it gives.
    copies = Counter((t.shape, t.dtype) for t in captured.values() if storage_id(t) not in reached)
    lost = []
    for path, tensor in by_parameter.items():
        if storage_id(tensor) in held or unsaved.is_scratch(path):
            continue
        if copies[tensor.shape, tensor.dtype]:
            copies[tensor.shape, tensor.dtype] -= 1
        elif not unsaved.is_ignored(path, job.ignore):
            lost.append(path)
    if lost:
        report.problem("restart", key_of(lost[0]), unsaved.refusal(lost))


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0


def included(report: Report, job: DeepJob) -> dict[str, Any]:
    """Return the job's own objects that snapshots include, by name.

    Raises:
        BrokenError: one is not there; reported.
    """
    return {
        name: report.call("import", f"snapshots.include.{name}", f"importing {entry}", _at(entry))
        for name, entry in job.include.items()
    }


def _at(entry: str) -> Any:
    module, _, attribute = entry.partition(":")
    return lambda: operator.attrgetter(attribute)(import_module(module))


def key_of(message: str) -> str:
    """Return the key of the job file whose state cannot be stored: messages begin with the part's name."""
    part = re.split(r"[/\s\[]", message)[0]
    if part.startswith("include."):
        return ".".join(["snapshots", *part.split(".")[:2]])
    part = part.partition(".")[0]
    return {"optimizer": "optimizer.entry", "scheduler": "lr_scheduler.entry"}.get(part, "model.entry")
