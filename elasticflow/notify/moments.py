"""The moments of a run at which somebody is told, out of its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from elasticflow import errors, events
from elasticflow.observe.history import SUPERVISOR_LOST, History
from elasticflow.observe.incidents import headline, incident_of
from elasticflow.observe.records import last_of, read, tail
from elasticflow.observe.terminal.durations import parts_of, took
from elasticflow.observe.terminal.formats import plural, span
from elasticflow.system.records import float_of, int_of, text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from elasticflow.events import EventRecord
    from elasticflow.jobfile.tables.notify import MomentName
    from elasticflow.observe.history import Stop
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

BUDGET = "restarts.budget"
_NEXT: dict[MomentName, str] = {
    "finished": "report",
    "failed": "why",
    "interrupted": "resume",
    "first_restart": "why",
    "budget_low": "why",
}
_SECOND_SIGNAL = "a second signal"


@dataclass(frozen=True)
class Moment:
    """Something that somebody is told.

    Attributes:
        name: What kind of moment it is; None: none, a message is tried out.
        at: When it was, RFC 3339.
        sentence: What happened, in words that go on after the run's name: `failed after step 7: ...`.
        next: The command to type next; None if there is nothing to do.
        step: Finished steps.
        steps: Steps of the whole training, where they are known.
        measured: The newest measures by then: `loss`, and the metrics of the evaluation.
        restarts_left: Restarts left; None where no failure was counted yet.
        restart_budget: Of how many.
        error: The root cause of the failure that it is about.
        exit_code: Of the command, where the launch ended.
    """

    name: MomentName | None
    at: str
    sentence: str
    next: str | None = None
    step: int = 0
    steps: int | None = None
    measured: dict[str, Any] | None = None
    restarts_left: int | None = None
    restart_budget: int | None = None
    error: str | None = None
    exit_code: int | None = None


_KINDS: dict[str, MomentName] = {
    events.RUN_FINISHED: "finished",
    events.RUN_FAILED: "failed",
    events.RUN_INTERRUPTED: "interrupted",
    events.TRAINING_FIRST_STEP: "first_restart",
    events.GENERATION_STARTED: "budget_low",  # the run goes on: a failure that ends it is told as such
}


def name_of(record: EventRecord) -> MomentName | None:
    """Return which kind of moment an event may be; None for most."""
    return _KINDS.get(str(record.get("event")))


def moment_of(folder: RunFolder, record: EventRecord, budget: int) -> Moment | None:
    """Return the moment that an event of the run is, told from what had happened by then; None if it is none."""
    name = name_of(record)
    if name is None:
        return None
    happened = _until(folder, record)
    last = happened[-1]  # the same, its texts printable
    history = History.of(happened)
    of_launch = _of_launch(happened)
    has_stopped = any(each.get("event") == events.GENERATION_ENDED for each in of_launch)
    stop = history.stops[-1] if has_stopped else None
    cause = headline(incident_of(stop, folder)) if stop is not None and stop.is_failure else None
    if name == "first_restart" and not _is_first(happened, history):
        return None
    if name == "budget_low" and not _is_low(happened, budget):
        return None
    left = next((each.left for each in reversed(history.stops) if each.left is not None), None)
    step = int_of(last, "step") or (stop.step if stop is not None else history.step or 0)
    return Moment(
        name,
        at=str(last.get("timestamp")),
        sentence=_SENTENCES[name](last, cause, _Budget(left, budget)),
        next=f"elasticflow {_NEXT[name]} {folder.run_id}",
        step=step,
        steps=history.steps,
        measured=_measured(folder, step),
        restarts_left=left,
        restart_budget=budget,
        error=cause if name in {"failed", "first_restart", "budget_low"} else None,
        exit_code=_exit_code(name, of_launch),
    )


def _exit_code(name: MomentName, of_launch: Sequence[Record]) -> int | None:
    """Return the exit code of a launch that ends with the last of these events; None if it does not."""
    match name:
        case "finished":
            return errors.FINISHED
        case "failed":
            is_spent = any(each.get("event") == events.BUDGET_SPENT for each in of_launch)
            return errors.BUDGET_SPENT if is_spent else errors.ANSWER_IS_NO
        case "interrupted":
            is_cut_short = of_launch[-1].get("reason") == _SECOND_SIGNAL
            return errors.KILLED_BY_USER if is_cut_short else errors.INTERRUPTED
        case "first_restart" | "budget_low":
            return None


def _until(folder: RunFolder, record: EventRecord) -> list[Record]:
    """Return the run's events up to *record*, with it."""
    happened: list[Record] = []
    for each in read(folder.events):
        happened.append(each)
        if (each.get("timestamp"), each.get("event")) == (record.get("timestamp"), record.get("event")):
            return happened
    return [*happened, record]


def _of_launch(happened: Sequence[Record]) -> Sequence[Record]:
    """Return those of the newest launch."""
    starts = [n for n, each in enumerate(happened) if each.get("event") == events.RUN_STARTED]
    return happened[starts[-1] :] if starts else happened


def _is_first(happened: Sequence[Record], history: History) -> bool:
    """Return whether training goes on after a failure with the last of these events, for the first time."""
    return len(_survived(history)) == 1 and not _survived(History.of(happened[:-1]))


def _survived(history: History) -> list[Stop]:
    return [
        stop
        for stop in history.stops
        if stop.is_failure and stop.kind != SUPERVISOR_LOST and stop.back_s is not None
    ]


def _is_low(happened: Sequence[Record], budget: int) -> bool:
    """Return whether, for the failure that the last of these events goes on from, the restarts left fell so far.

    Both marks are passed once on the way down; what goes up and down again is told again.
    """
    left, before, is_charged = budget, budget, False
    for each in happened[:-1]:
        match each.get("event"):
            case events.GENERATION_STARTED:
                before, is_charged = left, False
            case events.BUDGET_REFILLED:
                left = before = budget
            case events.BUDGET_CHARGED:
                left, is_charged = int_of(each, "left"), True
            case _:
                pass
    return is_charged and any(left <= mark < before for mark in (0, max(1, budget // 4)))


class _Budget(NamedTuple):
    left: int | None
    whole: int


def _restarted(record: Record, cause: str | None, _: _Budget) -> str:
    back = span(float_of(record, "seconds_since_failure") or 0)
    return f"goes on after its first failure ({cause}): step {record.get('step')} was done {back} later"


def _low(_: Record, cause: str | None, budget: _Budget) -> str:
    last = "" if cause is None else f". The last failure: {cause}"
    if not budget.left:
        return f"has no restart left of {budget.whole}: the next failure ends it{last}"
    return f"has {plural(budget.left, 'restart')} left of {budget.whole}{last}"


def _failed(record: Record, cause: str | None, _: _Budget) -> str:
    step, why = int_of(record, "step"), text_of(record, "why")
    after = f"after step {step}" if step else "before its first step"
    words = f"failed {after}: {cause or record.get('error') or record.get('class')}"
    return f"{words} ({why})" if why else words


def _interrupted(record: Record, _: str | None, __: _Budget) -> str:
    step = int_of(record, "step")
    words = f"was interrupted {f'after step {step}' if step else 'before its first step'}"
    if record.get("reason"):
        words += f" ({record['reason']})"
    if record.get("goes_on_from") is None:
        return words
    return f"{words}; it can go on from step {int_of(record, 'goes_on_from')}"


def _finished(record: Record, _: str | None, __: _Budget) -> str:
    words = f"finished with {plural(int_of(record, 'step'), 'step')}"
    if restarts := int_of(record, "restarts"):
        words += f" and {plural(restarts, 'restart')}"
    if record.get("stopped"):
        words += f" ({record['stopped']})"
    parts = parts_of(record.get("run_durations")) or parts_of(record.get("durations"))
    return f"{words}, in {took(parts).partition(':')[0]}" if parts else words


_SENTENCES: dict[MomentName, Callable[[Record, str | None, _Budget], str]] = {
    "finished": _finished,
    "failed": _failed,
    "interrupted": _interrupted,
    "first_restart": _restarted,
    "budget_low": _low,
}


def _measured(folder: RunFolder, step: int) -> dict[str, Any]:
    """Return the newest loss and metrics of the evaluation at *step* or before."""
    lines = [line for line in tail(folder.metrics) if int_of(line, "step") <= step]
    losses, evaluated = last_of(lines, "loss"), last_of(lines, "eval")
    measured = {"loss": losses[0]["loss"]} if losses else {}
    metrics = evaluated[0]["eval"] if evaluated else None
    if isinstance(metrics, dict):
        measured |= {f"eval/{name}": value for name, value in metrics.items()}
    return measured
