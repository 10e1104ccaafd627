"""Finds the moments of a run that are worth a message, in its events."""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import TYPE_CHECKING

from elasticflow import errors, events
from elasticflow.observe.history import RunHistory, is_taken_over
from elasticflow.observe.records import newest_evaluation, newest_with
from elasticflow.observe.terminal.formats import parts_of, plural, span, took
from elasticflow.protocol.run_files import resume_command
from elasticflow.sinks.reader import Position, Reader
from elasticflow.system.records import float_of, int_of, printable_in, text_of

if TYPE_CHECKING:
    from typing import Any

    from elasticflow.events import EventRecord
    from elasticflow.jobfile.tables.notify import MomentName
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

_SECOND_SIGNAL = "a second signal"
_AT_ONCE = 500


@dataclass(frozen=True)
class Moment:
    """A moment of a run that is worth a message.

    Attributes:
        name: Kind of the moment; None: the message is a test.
        at: Time of the moment, RFC 3339.
        sentence: Words that follow the run's name: `failed after step 7: ...`.
        next: The command to type next; None if there is nothing to do.
        steps: Steps of the whole training, where they are known.
        measured: The newest values by then: `loss`, and the metrics of the evaluation.
        restarts_left: None where no failure was counted yet.
        exit_code: Exit code of the command, where the launch ended.
        launch: Number of the launch; 0 if unknown.
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
    launch: int = 0


_KINDS: dict[str, MomentName] = {
    events.RUN_FINISHED: "finished",
    events.RUN_FAILED: "failed",
    events.RUN_INTERRUPTED: "interrupted",
    events.TRAINING_FIRST_STEP: "first_restart",
    events.GENERATION_STARTED: "budget_low",  # the run continues; a failure that ends it is its own moment
}


def name_of(record: Record) -> MomentName | None:
    """Return the kind of moment that an event may be; None for most events."""
    return None if is_taken_over(record) else _KINDS.get(str(record.get("event")))


class Moments:
    """Finds the moments of a run. Its history takes each event once, whichever events are asked about."""

    def __init__(self, folder: RunFolder, budget: int) -> None:
        self._folder, self._budget = folder, budget
        self._reader, self._position = Reader(folder), Position()
        self._history = RunHistory()
        self._left_before = budget  # restarts left when the newest generation was formed
        self._moments: dict[tuple[object, object], Moment] = {}
        self._lock = Lock()

    def of(self, record: EventRecord) -> Moment | None:
        """Return the moment of an event, as the events up to then tell; None if the event is not a moment.

        Raises:
            OSError: events.jsonl is there and cannot be read.
        """
        if name_of(record) is None:
            return None
        with self._lock:
            if _key(record) not in self._moments:
                self._read_on()
            moment = self._moments.get(_key(record))
        return None if moment is None else replace(moment, measured=_measured(self._folder, moment.step))

    def _read_on(self) -> None:
        while (batch := self._reader.events_after(self._position, _AT_ONCE)).end != self._position:
            self._position = batch.end
            for record in batch.events:
                moment = self._take(printable_in(record))
                if moment is not None:
                    self._moments.setdefault(_key(record), moment)

    def _take(self, record: Record) -> Moment | None:
        name, history = name_of(record), self._history
        survived_before = history.survived
        history.take(record)
        history.forget()
        is_low = self._is_low(record)
        if (
            name is None
            or (name == "budget_low" and not is_low)
            or (name == "first_restart" and (survived_before, history.survived) != (0, 1))
        ):
            return None
        stop = history.stops[-1] if history.has_stopped else None
        cause = stop.headline if stop is not None and stop.is_failure else None
        return Moment(
            name,
            at=str(record.get("timestamp")),
            sentence=_sentence(name, record, cause, history.budget_left, self._budget),
            next=self._next(name),
            step=int_of(record, "step") or (stop.step if stop is not None else history.step or 0),
            steps=history.steps,
            restarts_left=history.budget_left,
            restart_budget=self._budget,
            error=cause if name in {"failed", "first_restart", "budget_low"} else None,
            exit_code=_exit_code(name, record, history),
            launch=history.launches[-1].number if history.launches else 0,
        )

    def _next(self, name: MomentName) -> str:
        run_id, launches = self._folder.run_id, self._history.launches
        if name == "interrupted":
            return resume_command(run_id, launches[-1].resume_command if launches else None)
        return f"elasticflow {'report' if name == 'finished' else 'why'} {run_id}"

    def _is_low(self, record: Record) -> bool:
        """Return True if the failure before a new generation brought the restarts left down to a mark.

        Each of the two marks counts once on the way down, and again after the restarts left have risen above it.
        """
        left = self._budget if self._history.budget_left is None else self._history.budget_left
        before = self._left_before
        if record.get("event") in {events.GENERATION_STARTED, events.BUDGET_REFILLED}:
            self._left_before = left
        return any(left <= mark < before for mark in (0, max(1, self._budget // 4)))


def _key(record: Record) -> tuple[object, object]:
    return record.get("timestamp"), record.get("event")


def _exit_code(name: MomentName, record: Record, history: RunHistory) -> int | None:
    """Return the exit code of a launch that ends with *record*; None if the launch does not end."""
    match name:
        case "finished":
            return errors.FINISHED
        case "failed":
            return errors.BUDGET_SPENT if history.is_budget_spent else errors.ANSWER_IS_NO
        case "interrupted":
            is_cut_short = record.get("reason") == _SECOND_SIGNAL
            return errors.KILLED_BY_USER if is_cut_short else errors.INTERRUPTED
        case "first_restart" | "budget_low":
            return None


def _sentence(name: MomentName, record: Record, cause: str | None, left: int | None, budget: int) -> str:
    match name:
        case "finished":
            return _finished(record)
        case "failed":
            return _failed(record, cause)
        case "interrupted":
            return _interrupted(record)
        case "first_restart":
            back = span(float_of(record, "seconds_since_failure") or 0)
            return f"continues after its first failure ({cause}): step {record.get('step')} was done {back} later"
        case "budget_low":
            last = "" if cause is None else f". The last failure: {cause}"
            if not left:
                return f"has no restart left of {budget}: the next failure ends it{last}"
            return f"has {plural(left, 'restart')} left of {budget}{last}"


def _failed(record: Record, cause: str | None) -> str:
    step, why = int_of(record, "step"), text_of(record, "why")
    after = f"after step {step}" if step else "before its first step"
    words = f"failed {after}: {cause or record.get('error') or record.get('class')}"
    return f"{words} ({why})" if why else words


def _interrupted(record: Record) -> str:
    step = int_of(record, "step")
    words = f"was interrupted {f'after step {step}' if step else 'before its first step'}"
    if record.get("reason"):
        words += f" ({record['reason']})"
    if record.get("goes_on_from") is None:
        return words
    return f"{words}; it can resume from step {int_of(record, 'goes_on_from')}"


def _finished(record: Record) -> str:
    words = f"finished with {plural(int_of(record, 'step'), 'step')}"
    if restarts := int_of(record, "restarts"):
        words += f" and {plural(restarts, 'restart')}"
    if record.get("stopped"):
        words += f" ({record['stopped']})"
    parts = parts_of(record.get("run_durations")) or parts_of(record.get("durations"))
    return f"{words}, in {took(parts).partition(':')[0]}" if parts else words


def _measured(folder: RunFolder, step: int) -> dict[str, Any]:
    trained = next((line for line in newest_with(folder.metrics, "loss") if int_of(line, "step") <= step), {})
    measured = {"loss": trained["loss"]} if trained else {}
    metrics = newest_evaluation(folder.metrics, step).get("eval", {})
    return {**measured, **{f"eval/{name}": value for name, value in metrics.items()}}
