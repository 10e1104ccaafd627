"""Trains a LightningModule as a job, without its Trainer: `training_step`, `validation_step`, `configure_optimizers` and `self.log`.

A module that counts on more of the Trainer is refused by name before the first step. This module imports neither lightning
nor torch; the trained model does.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary

from elasticflow.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

_BASES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
# The Trainer calls these; `prepare_data` and the loaders are about data, which the job file declares.
_CALLED = (
    "setup", "teardown", "configure_callbacks", "configure_model", "configure_sharded_model", "backward",
    "configure_gradient_clipping", "lr_scheduler_step", "optimizer_step", "optimizer_zero_grad",
    "transfer_batch_to_device",
)  # fmt: skip
_NOT_OF_TRAINING = ("on_test_", "on_predict_")
_GUIDE = "elasticflow guide training (LightningModules) says what a job takes of a LightningModule"
_SCHEDULE_OF = "lr_scheduler.entry = elasticflow.lightning:lr_scheduler"


@dataclass
class _Configured:
    """Result of a module's `configure_optimizers`.

    Attributes:
        schedule: The schedule with Lightning's options for it; None: no schedule.
        is_taken: The job has taken the schedule.
    """

    schedule: dict[str, Any] | None
    is_taken: bool = False


@dataclass
class _Calls:
    """Values that *hook*, a method of the module, has logged in one call."""

    hook: str
    logged: dict[str, Any] = field(default_factory=dict)

    def log(self, name: str, value: Any, *_: object, **options: Any) -> None:
        """Take the place of the module's `log`."""
        if options.get("reduce_fx", "mean") != "mean":
            raise _refusal(f"{self.hook} logs {name} with reduce_fx", "a job logs means over the batch")
        if callable(getattr(value, "compute", None)):
            kind = type(value).__name__
            raise _refusal(
                f"{self.hook} logs {name}, a {kind}",
                f"name the class in [evaluation.metrics]: {name} = {{ entry = ... }}; or log its value over the batch",
            )
        self.logged[name] = value


class _NoTrainer:
    """Stands where a module looks for its Trainer, and refuses to be asked."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(f"{self._hook} asks its Trainer for {name}", "a job has no Trainer")


class _NoNumber:
    """Stands for the number of a batch: it may be passed on, and refuses to be used."""

    def __init__(self, hook: str, name: str) -> None:
        self._hook, self._name = hook, name

    def _refuse(self, *_: object) -> NoReturn:
        raise _refusal(f"{self._hook} uses {self._name}", "a job does not number batches as a Trainer does")

    __bool__ = __int__ = __index__ = __float__ = __str__ = __format__ = __hash__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = (
        _refuse
    )


_BY_MODEL: WeakKeyDictionary[nn.Module, _Configured] = WeakKeyDictionary()
_BY_OPTIMIZER: WeakKeyDictionary[Optimizer, _Configured] = WeakKeyDictionary()


def optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer of the module's `configure_optimizers`, for `optimizer.entry`.

    Raises:
        StateError: *model* is no LightningModule, or counts on more of the Trainer than a job has.
    """
    _require_plain(model)
    with _without_trainer(model, "configure_optimizers"):
        made = model.configure_optimizers()  # type: ignore[operator]  # of a LightningModule
    optimizers, schedules = _parts(made)
    if len(optimizers) != 1 or len(schedules) > 1:
        raise _refusal(
            f"configure_optimizers returns {len(optimizers)} optimizers and {len(schedules)} schedules",
            "a job takes one of each; several optimizers are moved by a step of (model, batch, optimizers)",
        )
    schedule = schedules[0] if schedules else None
    if schedule is not None and not isinstance(schedule, dict):
        schedule = {"scheduler": schedule}
    _BY_MODEL[model] = _BY_OPTIMIZER[optimizers[0]] = _Configured(schedule)
    found: Optimizer = optimizers[0]
    return found


def lr_scheduler(optimizer: Optimizer, interval: str = "step") -> Any:
    """Return the schedule of the module's `configure_optimizers`, for `lr_scheduler.entry`.

    Args:
        optimizer: Result of `optimizer`.
        interval: The job's `lr_scheduler.interval`, which must be that of the module.

    Raises:
        StateError: the module has no schedule, or steps it at other times.
    """
    configured = _BY_OPTIMIZER.get(optimizer)
    if configured is None or configured.schedule is None:
        raise _refusal("configure_optimizers returns no schedule", "leave [lr_scheduler] out")
    options = configured.schedule
    if options.get("frequency", 1) != 1:
        raise _refusal("configure_optimizers steps its schedule with a frequency", "a job steps it each time")
    made = options["scheduler"]
    # As a Trainer decides it: other schedules may have a `monitor`, which it does not look at.
    goes_by_metric = options.get("reduce_on_plateau", type(made).__name__ == "ReduceLROnPlateau")
    wanted = "evaluation" if goes_by_metric else options.get("interval", "epoch")
    if interval != wanted:
        more = (
            f" and metric = {options.get('monitor')!r}, as evaluation lines name it" if goes_by_metric else ""
        )
        raise _refusal(
            f"configure_optimizers steps its schedule by {wanted}, and the job by {interval}",
            f'write in [lr_scheduler]: interval = "{wanted}", args = {{ interval = "{wanted}" }}{more}',
        )
    configured.is_taken = True
    return made


def training_step(model: nn.Module, batch: Any) -> dict[str, Any]:
    """Return the loss of the module's own `training_step`, and what it logs, for `model.step`.

    Raises:
        StateError: the step returns no loss, or asks for more of the Trainer than a job has.
    """
    configured = _BY_MODEL.get(model)
    if configured is not None and configured.schedule is not None and not configured.is_taken:
        raise _refusal(
            "configure_optimizers returns a schedule, and the job has no [lr_scheduler]", _SCHEDULE_OF
        )
    result, logged = _called(model, "training_step", batch)
    loss = result.get("loss") if isinstance(result, dict) else result
    if loss is None:
        raise _refusal("training_step returns no loss", "a job skips no batch")
    if "count" in logged:
        raise _refusal("training_step logs count", "a job would weigh the loss by it: log it by another name")
    return {**logged, "loss": loss}


def validation_step(model: nn.Module, batch: Any) -> tuple[dict[str, Any], Any]:
    """Return what the module's `validation_step` logs, and the batch, for `evaluation.step`; `logged` makes metrics of it.

    Raises:
        StateError: the step asks for more of the Trainer than a job has.
    """
    _, logged = _called(model, "validation_step", batch)
    return logged, batch


def logged(outputs: Any, _: Any) -> Any:
    """Return a value that `validation_step` logs: `{ entry = "elasticflow.lightning:logged", outputs = "val_loss" }`."""
    return outputs


def _called(model: nn.Module, hook: str, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Return the result of a step of the module, and what it logged."""
    step, calls = getattr(model, hook), _Calls(hook)
    places = [p for p in inspect.signature(step).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    numbers = [_NoNumber(hook, p.name) for p in places[1:] if p.default is p.empty]
    with _without_trainer(model, hook):
        vars(model)["log"] = calls.log
        try:
            result = step(batch, *numbers)
        finally:
            del vars(model)["log"]
    return result, calls.logged


@contextmanager
def _without_trainer(model: Any, hook: str) -> Iterator[None]:
    model.trainer = _NoTrainer(hook)
    try:
        yield
    finally:
        model.trainer = None


def _require_plain(model: Any) -> None:
    """Make sure that *model* is a LightningModule that counts on no more of the Trainer than a job has."""
    base = next((each for each in type(model).__mro__ if each.__module__ in _BASES), None)
    if base is None:
        raise StateError(f"the model is a {type(model).__name__}, which is no LightningModule", _GUIDE)
    if not model.automatic_optimization:
        raise _refusal(
            "automatic_optimization is False", "optimization by hand is a step of (model, batch, optimizers)"
        )
    names = [name for name in dir(base) if name in _CALLED or name.startswith("on_")]
    for name in names:
        if name.startswith(_NOT_OF_TRAINING) or not callable(getattr(base, name)):
            continue
        if getattr(type(model), name) is not getattr(base, name):
            raise _refusal(f"{type(model).__name__} overrides {name}", "a job has hooks of its own ([hooks])")


def _parts(made: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and the schedules of what `configure_optimizers` returned."""
    if isinstance(made, dict):
        schedule = made.get("lr_scheduler")
        if schedule is not None and not isinstance(schedule, dict):
            schedule = {"scheduler": schedule, "monitor": made.get("monitor")}
        return [made["optimizer"]], [] if schedule is None else [schedule]
    if isinstance(made, list | tuple):
        if len(made) == 2 and all(isinstance(each, list | tuple) for each in made):
            return list(made[0]), list(made[1])
        parts = [_parts(each) for each in made]
        return [each for found, _ in parts for each in found], [each for _, found in parts for each in found]
    if made is None:
        return [], []
    return [made], []


def _refusal(found: str, instead: str) -> StateError:
    return StateError(f"the LightningModule cannot be trained as a job: {found}", f"{instead}; {_GUIDE}")
