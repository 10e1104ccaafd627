"""Options of optimizers and schedules as the job makes them, and which of them the job has changed since a snapshot.

A snapshot holds an optimizer's options as they were after its step, and the options from the job file. An option that the
job file has changed since then counts as the job file says; the others come from the snapshot, since the job's own step
may have moved them. A schedule that the job has changed, or whose optimizer it has changed, is played through from its
beginning: its rates are the same as if the job had begun like this.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elasticflow.errors import StopTraining
from elasticflow.runtime.training.several_optimizers import CountedSchedule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import CellType

# State per parameter that an option of torch's optimizers needs, and the state beside which it begins as zeros.
_ADDED = {
    "amsgrad": ("max_exp_avg_sq", "exp_avg_sq"),
    "centered": ("grad_avg", "square_avg"),
    "momentum": ("momentum_buffer", "square_avg"),
}
_DEEPEST = 8
_RATE, _FACTORS = "lr", "lr_lambdas"


@dataclass(frozen=True)
class OptionChange:
    """An option whose value in the job has changed since the snapshot was taken.

    Attributes:
        was: The earlier value, as text; None if there was no such option.
        now: The value now; None if the option is gone.
    """

    part: str
    group: int | None
    option: str
    was: str | None
    now: str | None


class JobOptions:
    """The options of a job's optimizers and schedules, which must be as the job made them when this is made."""

    def __init__(self, optimizers: Mapping[str, Optimizer], schedules: Mapping[str, Any]) -> None:
        self._optimizers, self._schedules = dict(optimizers), dict(schedules)
        self._made = {name: [_copied(g) for g in o.param_groups] for name, o in self._optimizers.items()}
        self._texts: dict[str, Any] = {
            name: [_texts(group) for group in groups] for name, groups in self._made.items()
        }
        self._texts |= {name: _schedule_texts(s) for name, s in self._schedules.items() if _is_known(s)}

    def to_json(self) -> dict[str, Any]:
        """Return them as state.json has them: by part, a value's text by option."""
        return self._texts

    def changes_since(self, before: Mapping[str, Any]) -> list[OptionChange]:
        """Return the options that the job has changed since *before*, the result of `to_json` in a snapshot."""
        changes: list[OptionChange] = []
        for part, now in self._texts.items():
            was = before.get(part)
            if isinstance(now, dict) and isinstance(was, dict):
                changes += _differences(part, None, was, now)
            elif isinstance(now, list) and isinstance(was, list) and len(was) == len(now):
                for number, (group_was, group_now) in enumerate(zip(was, now, strict=True)):
                    changes += _differences(part, number, group_was, group_now)
        return changes

    def merge(self, states: dict[str, Any], changes: Sequence[OptionChange]) -> Callable[[], None]:
        """Put what the job has changed into *states*, which are loaded next; return what is to be called after that.

        Schedules that were played through are taken out of *states*: they are where they have to be.
        """
        moved = self._play_through(states, changes)
        wanted: dict[str, list[dict[str, Any]]] = {}
        for name in self._optimizers.keys() & states.keys():
            wanted[name] = self._options_that_count(name, changes, is_moved=name in moved)
            _put_into(states[name], wanted[name])

        def finish() -> None:
            # Again: an optimizer of the job's own may have loaded in a way of its own.
            for name, groups in wanted.items():
                for group, options in zip(self._optimizers[name].param_groups, groups, strict=True):
                    group.update(options)

        return finish

    def _options_that_count(
        self, name: str, changes: Sequence[OptionChange], *, is_moved: bool
    ) -> list[dict[str, Any]]:
        """Return of each group the options that the job has changed, or that a schedule has moved since."""
        counting = []
        for number, (group, made) in enumerate(
            zip(self._optimizers[name].param_groups, self._made[name], strict=True)
        ):
            options = {c.option for c in changes if (c.part, c.group) == (name, number) and c.now is not None}
            if is_moved:
                options |= {key for key in made if key == _RATE or _text(group[key]) != _text(made[key])}
            counting.append(_copied({key: group[key] for key in options}))
        return counting

    def _play_through(self, states: dict[str, Any], changes: Sequence[OptionChange]) -> set[str]:
        """Take schedules that the job has changed to where the snapshot's are; return whose rates they have moved."""
        changed = {self._moves(name) for name in self._schedules if any(c.part == name for c in changes)}
        # Two on one optimizer move the same rates, so that one of them alone cannot be played.
        players = {
            name: self._schedules[name]
            for name in self._schedules
            if self._moves(name) in changed and name in self._texts and name in states
        }
        counts = {name: _count(states.pop(name)) for name in players}
        with warnings.catch_warnings(), suppress(StopTraining):
            # A schedule that moves before its optimizer does.
            warnings.simplefilter("ignore")
            for number in range(max(counts.values(), default=0)):
                for name, schedule in players.items():
                    if number < counts[name]:
                        schedule.step()
        return {name for name in map(self._moves, players) if name is not None}

    def _moves(self, schedule: str) -> str | None:
        """Return the optimizer whose rates a schedule moves."""
        optimizer = getattr(self._schedules[schedule], "optimizer", None)
        return next((name for name, each in self._optimizers.items() if each is optimizer), None)


def _put_into(state: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Put options into an optimizer's state, and what they need into that of its parameters."""
    if not isinstance(state, dict) or not isinstance(state.get("param_groups"), list):
        return
    for saved, options in zip(state["param_groups"], groups, strict=True):
        saved.update(_copied(options))
        for option in _ADDED.keys() & options.keys():
            key, like = _ADDED[option]
            for index in saved["params"] if options[option] else ():
                of_parameter = state["state"].get(index, {})
                if like in of_parameter and of_parameter.get(key) is None:
                    of_parameter[key] = torch.zeros_like(of_parameter[like])


def _count(state: Mapping[str, Any]) -> int:
    """Return the number of steps that a schedule had made."""
    if "count" in state:
        return int(state["count"])
    if "last_epoch" in state:
        return int(state["last_epoch"])
    return max(map(_count, state["_schedulers"]))


def _is_known(schedule: Any) -> bool:
    """True if nothing but the number of its steps moves a schedule."""
    if isinstance(schedule, ReduceLROnPlateau):
        return False
    if isinstance(schedule, LRScheduler):
        return type(schedule).load_state_dict.__module__.startswith("torch.")
    return isinstance(schedule, CountedSchedule)


def _differences(
    part: str, group: int | None, was: Mapping[str, str], now: Mapping[str, str]
) -> Iterator[OptionChange]:
    for option in sorted(was.keys() | now.keys()):
        if was.get(option) != now.get(option):
            yield OptionChange(part, group, option, was.get(option), now.get(option))


def _copied(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        for key, value in options.items()
        if key != "params"
    }


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: _text(value) for key, value in values.items()}


def _schedule_texts(schedule: Any) -> dict[str, str]:
    texts = _texts({k: v for k, v in schedule.state_dict().items() if k not in {"_schedulers", _FACTORS}})
    if hasattr(schedule, _FACTORS):
        texts[_FACTORS] = _text(getattr(schedule, _FACTORS))
    # SequentialLR and ChainedScheduler have these.
    for number, inner in enumerate(getattr(schedule, "_schedulers", ())):
        texts |= {f"{number}.{key}": text for key, text in _schedule_texts(inner).items()}
    return texts


def _text(value: Any, depth: int = 0) -> str:  # a table
    """Return a text that is equal for equal values; a function's text has its name, closure values and defaults."""
    if depth > _DEEPEST:  # an object that holds itself
        return "..."
    inner = partial(_text, depth=depth + 1)
    match value:
        case float():
            return repr(float(value))
        case Tensor():
            return f"{value.tolist()} ({value.dtype})"
        case Mapping():
            return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(inner, value)) + "]"
        case None | bool() | int() | str():
            return repr(value)
        case _:
            return _text_of_object(value, inner)


def _text_of_object(value: Any, inner: Callable[[Any], str]) -> str:
    name = getattr(value, "__qualname__", type(value).__qualname__)
    match value:
        case FunctionType():
            cells = map(_content, value.__closure__ or ())
            given = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            return f"{name}({', '.join(map(inner, given))})"
        case partial():
            return f"{inner(value.func)}{inner(value.args)}{inner(value.keywords)}"
        case MethodType():
            return f"{inner(value.__self__)}.{value.__name__}"
        case nn.Module() | Optimizer() | type():
            return str(name)
        case _ if callable(value) and hasattr(value, "__dict__"):
            return f"{name}{inner(vars(value))}"
        case _:
            return str(name)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
