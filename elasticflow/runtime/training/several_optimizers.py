"""One optimizer or several, one schedule or several: what a factory returned, by the names that snapshots have for it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elasticflow.errors import StateError
from elasticflow.runtime.training.metric_schedule import MetricSchedule, step_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OPTIMIZER, _SCHEDULE = "optimizer", "scheduler"

_REMEDY = (
    'return an optimizer; or several in a dict, {"g": ..., "d": ...}, or a list, for a model.step that is called with '
    "(model, batch, optimizers) and moves them itself"
)
_OF_SCHEDULE = "return the optimizer alone; a function that takes it, and returns the schedule, is named by entry in [lr_scheduler]"
_OF_LIGHTNING = (
    'for the configure_optimizers of a LightningModule: optimizer.entry = "elasticflow.lightning:optimizer", and '
    '"elasticflow.lightning:lr_scheduler" in [lr_scheduler]'
)


def optimizers(made: Any) -> dict[str, Optimizer]:
    """Return the optimizers that a factory made: `optimizer`, or `optimizer.g` and so on where there are several.

    Raises:
        StateError: something of it is no optimizer, or has no name that can be part of a key.
    """
    named = _named(made, _OPTIMIZER)
    for name, optimizer in named.items():
        if not isinstance(optimizer, Optimizer):
            what = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            remedy = _OF_SCHEDULE if hasattr(optimizer, "optimizer") else _REMEDY
            if isinstance(made, Mapping) and "lr_scheduler" in made:
                remedy = _OF_LIGHTNING
            raise StateError(f"{name} is a {what}, which is no torch.optim.Optimizer", remedy)
    if not named:
        raise StateError(f"optimizer.entry returned an empty {type(made).__name__}", _REMEDY)
    if len({id(optimizer) for optimizer in named.values()}) < len(named):
        raise StateError("optimizer.entry returned the same optimizer under two names", _REMEDY)
    return named


def schedules(made: Any) -> dict[str, Any]:
    """Return the schedules that a factory made: `scheduler`, or `scheduler.g` and so on where there are several."""
    return _named(made.made if isinstance(made, Schedules) else made, _SCHEDULE)


def is_of_optimizer(key: str) -> bool:
    """True if *key* of a snapshot is of an optimizer's state."""
    return key.startswith((f"{_OPTIMIZER}/", f"{_OPTIMIZER}."))


def is_optimizer(part: str) -> bool:
    """True if *part* of a job's state is an optimizer."""
    return part == _OPTIMIZER or part.startswith(f"{_OPTIMIZER}.")


def is_schedule(part: str) -> bool:
    """True if *part* of a job's state is a learning-rate schedule."""
    return part == _SCHEDULE or part.startswith(f"{_SCHEDULE}.")


def require_one(made: Any) -> None:
    """Make sure that *made* is one optimizer, as a step that takes (model, batch) needs it.

    Raises:
        StateError: it is several, or none; says how several are used.
    """
    if not isinstance(made, Optimizer):
        several = optimizers(made)
        raise StateError(
            f"optimizer.entry returned a {type(made).__name__} of {len(several)}, and nothing says in which order they step",
            "let model.step take (model, batch, optimizers): it is called with what optimizer.entry returned, calls "
            "backward() and step() of each itself, and returns the loss to report",
        )


def require_callable(schedule: Any, name: str = _SCHEDULE) -> None:
    """Make sure that *schedule* has a `step()` that is called without arguments, as train.py calls it.

    Raises:
        StateError: it has none; says how such a schedule is written.
    """
    if isinstance(schedule, MetricSchedule):  # which has looked itself
        return
    kind, parameters = step_of(schedule, name, "return a schedule, or several in a dict")
    if isinstance(schedule, ReduceLROnPlateau):
        raise StateError(
            f"step() of the {kind} needs a metric, and lr_scheduler names none",
            'add to [lr_scheduler]: interval = "evaluation" and metric, the name of what an evaluation measures, such as "loss"',
        )
    needed = [
        p.name
        for p in parameters or ()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise StateError(
            f"step() of the {kind} needs `{needed[0]}`, and train.py calls it without arguments",
            "name a schedule of torch.optim.lr_scheduler, of elasticflow.schedules, of transformers (get_cosine_schedule_with_warmup) "
            "or of timm (timm.scheduler:CosineLRScheduler) itself, or a function that returns LambdaLR(optimizer, factor) with factor(step)",
        )


class CountedSchedule:
    """A schedule of timm's, which is told the time: the steps or epochs since training began, as `lr_scheduler.interval` says.

    timm has `step(epoch)` for one that counts epochs (`t_in_epochs`) and `step_update(num_updates)` for one that counts
    steps; the other one of the two does nothing. Here both are told the same number.

    Raises:
        StateError: it has no such methods.
    """

    def __init__(self, schedule: Any) -> None:
        if not callable(getattr(schedule, "step_update", None)):
            kind = f"{type(schedule).__module__}.{type(schedule).__qualname__}"
            raise StateError(
                f"lr_scheduler.entry returned a {kind}, which has no step_update()",
                "name a class of timm.scheduler, such as timm.scheduler:CosineLRScheduler",
            )
        self._schedule, self._count = schedule, 0
        self.optimizer: Optimizer = schedule.optimizer

    def step(self, metric: float | None = None) -> None:
        """Set the rates of the next step; timm's PlateauLRScheduler goes by *metric*."""
        self._count += 1
        self._schedule.step(self._count, metric)
        self._schedule.step_update(self._count, metric)

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's count of steps or epochs, and timm's own state."""
        return {"count": self._count, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._count = state["count"]
        self._schedule.load_state_dict(state["schedule"])


class Schedules:
    """Learning-rate schedules that advance together: one, or those of several optimizers.

    Args:
        made: Result of the schedule's factory: a schedule, or a dict or list of schedules.

    Raises:
        StateError: one of them has no `step()` that takes nothing.
    """

    def __init__(self, made: Any) -> None:
        self.made = made
        for name, schedule in schedules(made).items():
            require_callable(schedule, name)

    def step(self) -> None:
        """Advance all of them."""
        for schedule in schedules(self.made).values():
            schedule.step()


def fix_groups(named: Mapping[str, Optimizer]) -> None:
    """Have `add_param_group` of these optimizers refused from here on: a restart makes them without the new group."""
    for name, optimizer in named.items():
        # On the object: an optimizer is copied and pickled without it.
        optimizer.add_param_group = partial(_refuse_group, name)  # type: ignore[method-assign]


def groups_refusal(name: str, what: str) -> StateError:
    """Return the error for groups that were added to an optimizer after a snapshot's state was fixed."""
    return StateError(
        f"{name}{what}: a restart makes it without that group, and could not load its snapshots",
        "give it all groups where it is made, before run.keep: a parameter whose requires_grad is False is not moved until it "
        "is True; set it from the position at each start, since no snapshot holds it",
    )


def _refuse_group(name: str, *_: object, **__: object) -> NoReturn:
    raise groups_refusal(name, ".add_param_group was called while it trains")


def parameters_of(several: Iterable[Optimizer]) -> Iterator[nn.Parameter]:
    """Yield the parameters of all groups of these optimizers."""
    for optimizer in several:
        for group in optimizer.param_groups:
            yield from group["params"]


def _named(made: Any, part: str) -> dict[str, Any]:
    if isinstance(made, Mapping):
        for name in made:
            if not isinstance(name, str) or _NAME.fullmatch(name) is None:
                raise StateError(
                    f"{part}.entry returned a dict with the key {name!r}, which cannot name a part of a snapshot",
                    "use names of letters, digits, - and _",
                )
        return {f"{part}.{name}": value for name, value in made.items()}
    if isinstance(made, list | tuple):
        return {f"{part}.{number}": value for number, value in enumerate(made)}
    return {part: made}
