"""Turns the records of a run, in their order, into lines for a person; remembers facts that later lines need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.observe.history import WarningSeen, is_taken_over, warning_key
from elasticflow.observe.terminal.event_lines import (
    Line,
    epoch_of,
    line_of,
    of_weights,
    said_on_stderr,
    user_frames,
    values,
)
from elasticflow.observe.terminal.formats import (
    groups_in_words,
    number,
    order_in_words,
    parts_of,
    plural,
    size,
    span,
    took,
)
from elasticflow.protocol.run_files import resume_command
from elasticflow.system.processes import is_killed_from_outside
from elasticflow.system.records import Record, float_of, int_of, text_of, unix_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.observe.history import RunHistory

# Routine snapshots may come several times a second; a line for each would bury the rest.
SNAPSHOT_LINE_EVERY_S = 10.0


class RunNarrator:
    """Turns records into lines. An event comes here before the history takes it, so that its line can show the change.

    Args:
        history: History of the events before; takes each event after its line was made.
        folder: The run folder, as the text to show.
        run: The word by which commands find the run; default: its id.
    """

    def __init__(self, history: RunHistory, folder: str | None = None, run: str | None = None) -> None:
        self._history, self._folder, self._run = history, folder, run
        self._step = 0  # the highest step so far
        self._started: float | None = None
        self._quoted: set[str] = set()
        self._evaluation: Record = {}
        self._measured = ""  # the newest evaluation in words
        self._best: float | None = None
        self._best_of = ""
        self._snapshot_line_at: float | None = None
        self._line_of: dict[str, Callable[[Record], Line | None]] = {
            events.RUN_STARTED: self._run_started,
            events.RUN_FINISHED: self._run_finished,
            events.RUN_FAILED: self._run_failed,
            events.RUN_INTERRUPTED: self._run_interrupted,
            events.GENERATION_STARTED: self._generation_started,
            events.WORKER_FAILED: self._worker_failed,
            events.SCRIPT_STARTED: self._script_started,
            events.DRAIN_REQUESTED: self._drain_requested,
            events.STATE_LEFT_OUT: self._state_left_out,
            events.TRAINING_STARTED: self._training_started,
            events.TRAINING_FIRST_STEP: self._first_step,
            events.SNAPSHOT_COMMITTED: self._snapshot_committed,
            events.DATASET_OPENED: self._dataset_opened,
            events.PARAMETERS_GROUPED: self._parameters_grouped,
            events.ORDER_DECLARED: self._order_declared,
            events.BEST_RESET: self._best_reset,
            events.NODE_JOINED: self._node_joined,
            events.AGENT_RESTARTED: self._agent_restarted,
            events.WORKER_WARNED: self._worker_warned,
        }

    def seconds(self, record: Record) -> float | None:
        """Return the seconds from the launch's first record to this one."""
        at = unix_time(record.get("timestamp", record.get("time")))
        if at is None:
            return None
        if self._started is None:
            self._started = at
        return max(0.0, at - self._started)

    def event(self, record: Record) -> Line | None:
        """Return the line for the next record of events.jsonl; None if the event has no line."""
        name = str(record.get("event"))
        if name == events.RUN_STARTED:
            self._started = None
        if name == events.GENERATION_ENDED:
            self._step = max(self._step, int_of(record, "step"))
        seconds = self.seconds(record)
        line = self._line_of[name](record) if name in self._line_of else line_of(record)
        return None if line is None else replace(line, seconds=seconds)

    def metrics(self, record: Record) -> Line | None:
        """Return the line of an evaluation. A step is remembered and gets no line."""
        self._step = max(self._step, int_of(record, "step"))
        measured = record.get("eval")
        if not isinstance(measured, Mapping):
            return None
        before = self._best
        self._evaluation, self._best = measured, float_of(record, "best")
        self._measured = of_weights(measured, record.get("weights"))
        epoch = epoch_of(record)
        at = f"step {record.get('step')}" if epoch is None else f"epoch {epoch}, step {record.get('step')}"
        is_best = self._best is not None and self._best != before and self._best in measured.values()
        self._best_of = text_of(record, "best_of") or ""
        text = f"{at}: {self._measured}{f' (best {self._best_of})'.replace(' )', ')') if is_best else ''}"
        if isinstance(raw := record.get("eval_raw"), Mapping):
            text += f"; raw: {values(raw)}"
        return Line("evaluation", text, seconds=self.seconds(record), symbol="done", tone="plain")

    def _run_started(self, record: Record) -> Line:
        parts = [f"{record.get('job')} {record.get('run_id')}"]
        if int_of(record, "launch") > 1:
            parts.append(f"launch {int_of(record, 'launch')}")
        if record.get("torch"):
            parts.append(f"torch {record['torch']}")
        uri = str(record.get("uri") or "")
        if "://" in uri:
            parts.append(f"snapshots in {uri}")
        if record.get("endpoint"):
            parts.append(f"others join at {record['endpoint']}")
        return Line(
            "resume" if record.get("resumed") else "run", ", ".join(parts), symbol="start", tone="begin"
        )

    def _run_finished(self, record: Record) -> Line:
        measured = self._measured
        if self._best is not None and self._best not in self._evaluation.values():
            measured += f" (best {self._best_of} {number(self._best)})".replace("  ", " ")
        parts = [measured.strip()] if measured else []
        if self._history.script is None or int_of(record, "step"):
            parts.append(plural(int_of(record, "step"), "step"))
        parts.append(plural(int_of(record, "restarts"), "restart"))
        return Line(
            "finished",
            ", ".join(parts),
            (*self._took(record), *self._warned(record), *self._place()),
            symbol="done",
            tone="good",
        )

    def _took(self, record: Record) -> tuple[str, ...]:
        """Return the parts of the launch's time, and of the time of all launches, if there were others."""
        parts, of_run = parts_of(record.get("durations")), parts_of(record.get("run_durations"))
        if not parts:  # an earlier version wrote the record
            return (f"took {span(float_of(record, 'seconds') or 0)}",)
        is_blind = self._history.script is not None and not self._step
        own = f"took {took(parts, is_blind=is_blind)}"
        launches = self._history.launches
        launch = max(1, launches[-1].number) if launches else 1
        if launch == 1:
            return (own,)
        return (
            f"this launch {own}",
            *([f"all {launch} launches took {took(of_run, is_blind=is_blind)}"] if of_run else []),
        )

    def _run_failed(self, record: Record) -> Line:
        error, why = str(record.get("error") or record.get("class")), record.get("why")
        is_known = error == self._history.last.get(events.WORKER_FAILED, {}).get("error")
        text = str(why or error) if is_known or not why else f"{why}: {error}"
        if int_of(record, "step"):
            text += f", after step {int_of(record, 'step')}"
        run = self._run or record.get("run_id")
        # Another launch has the run: there is nothing to repair here.
        again = "" if is_taken_over(record) else f"; once mended: {self._again(record)}"
        return Line(
            "failed",
            text,
            (f"elasticflow why {run}{again}", *self._warned(record), *self._place()),
            symbol="wrong",
            tone="bad",
        )

    def _again(self, record: Record) -> str:
        launches = self._history.launches
        run = self._run or str(record.get("run_id"))
        return resume_command(run, launches[-1].resume_command if launches else None)

    def _run_interrupted(self, record: Record) -> Line:
        step = int_of(record, "step")
        text = f"after step {step}" if step else "before the first step"
        if self._history.script is not None and not step:
            text = "the script has left"
        if record.get("goes_on_from") is not None and (begin := int_of(record, "goes_on_from")) != step:
            text += f", to resume from step {begin}" if begin else ", to resume from the beginning"
        if record.get("reason"):
            text += f" ({record['reason']})"
        more = (f"continue with: {self._again(record)}", *self._warned(record), *self._place())
        return Line("interrupted", text, more, symbol="stop")

    def _generation_started(self, record: Record) -> Line:
        nodes = record.get("nodes")
        num_nodes = len(nodes) if isinstance(nodes, list | tuple | dict) else max(1, int_of(record, "nodes"))
        text = f"{plural(int_of(record, 'world_size'), 'worker')} on {plural(num_nodes, 'node')}"
        if self._history.group is None:
            return Line("workers", text, symbol="start", tone="plain")
        text += f", generation {record.get('generation')}"
        if not self._history.is_recovering:
            return Line("new group", text, symbol="again")
        budget = self._history.budget_left
        left = "" if budget is None else f"; {plural(budget, 'restart')} left"
        return Line("restart", text + left, symbol="again")

    def _worker_failed(self, record: Record) -> Line:
        error, traceback = str(record.get("error")), record.get("traceback")
        words = (
            "killed" if error.startswith("killed") else "hung" if record.get("class") == "hang" else "failed"
        )
        pid = f" (pid {record['pid']})" if record.get("pid") else ""
        after = f", after step {self._step}" if self._step and not traceback else ""
        more = (str(record["others"]),) if record.get("others") else ()
        quote: tuple[str, ...] = ()
        if traceback and error in self._quoted:
            more = ("with the same traceback as before", *more)
        elif traceback:
            self._quoted.add(error)
            quote = user_frames(str(traceback))
        if not (record.get("exit_code") and is_killed_from_outside(int_of(record, "exit_code"))):
            quote += said_on_stderr(record)
        how = f" {error.removeprefix('killed ')}" if words == "killed" else f": {error}"
        text = f"rank {record.get('rank')}{pid}{how}{after}"
        return Line(f"worker {words}", text, more, quote=quote, symbol="wrong", tone="bad")

    def _script_started(self, record: Record) -> Line:
        script, after = str(record.get("script")), float_of(record, "seconds_since_failure")
        if after is None or not self._history.is_recovering:
            return Line("script", script, symbol="start", tone="plain")
        # Only a finished step shows that training continues.
        return Line("started again", f"{script}, {span(after)} after the failure", symbol="again")

    def _drain_requested(self, record: Record) -> Line | None:
        line = line_of(record)
        if self._history.script is None or line is None:
            return line
        within = span(float_of(record, "grace_s") or 0)
        return replace(
            line, text=f"{record.get('reason')}: the workers got SIGTERM, and have {within} to leave"
        )

    def _state_left_out(self, record: Record) -> Line | None:
        line = line_of(record)
        if self._history.script is None or line is None:
            return line
        name, kind = str(record.get("name")), str(record.get("type"))
        # A dataset; the kept model, which `validate --deep-step` would try in a job's own loop.
        if "help" not in record:
            changes = f'{name} changes with the steps, and no snapshot holds it: snapshots.ignore = ["{name}"] says that no step depends on it'
            return line if name == "dataset" else replace(line, text=changes)
        return replace(line, text=f"no snapshot holds {name}, a {kind}: {record.get('help')}")

    def _training_started(self, record: Record) -> Line:
        step = int_of(record, "step")
        again = self._step - step
        steps = int_of(record, "steps") or None
        start = f"from the snapshot of step {step}" if record.get("restored_from") else "from the beginning"
        if record.get("from_memory"):
            start = f"from memory at step {step}"
        if self._history.has_trained:
            lost = f"{plural(again, 'step')} to do again" if again > 0 else "no step is lost"
            return Line("restored", f"{start}, {lost}", symbol="again")
        self._step = max(self._step, step)
        device = f" on {record['device']}" if record.get("device") else ""
        total = plural(steps, "step") if steps else "training"
        parts = [start, f"{total}{' in all' if step and steps else ''}{device}"]
        if int_of(record, "parameters"):
            parts.append(plural(int_of(record, "parameters"), "parameter"))
        return Line("training", ", ".join(parts), symbol="start", tone="plain")

    def _first_step(self, record: Record) -> Line | None:
        after = float_of(record, "seconds_since_failure")
        if after is None or not self._history.is_recovering:
            return None
        text = f"step {record.get('step')} done {span(after)} after the failure"
        return Line("resuming", text, symbol="done", tone="good")

    def _snapshot_committed(self, record: Record) -> Line | None:
        is_routine = str(record.get("trigger")) not in {"final", "end", "drain"}
        at, last = unix_time(record.get("timestamp")) or 0.0, self._snapshot_line_at
        if is_routine and last is not None and at - last < SNAPSHOT_LINE_EVERY_S:
            return None
        self._snapshot_line_at = at
        text = f"step {int_of(record, 'step')}"
        if (num_bytes := float_of(record, "bytes")) is not None:
            text += f", {size(num_bytes)}"
        if (seconds := float_of(record, "seconds")) is not None:
            text += f" in {span(seconds)}"
        return Line("snapshot", text, symbol="done", tone="quiet" if is_routine else "plain")

    def _dataset_opened(self, record: Record) -> Line | None:
        name, fingerprint = str(record.get("name")), record.get("fingerprint")
        before = self._history.datasets.get(name)
        if before is not None and before.get("fingerprint") == fingerprint:
            return None
        shards = int_of(record, "shards")
        text = f"{name}: {plural(shards or int_of(record, 'samples'), 'data shard' if shards else 'sample')}"
        text += f" of {record['source']}" if record.get("source") else ""
        text += f", fingerprint {str(fingerprint)[:8]}" if fingerprint else ""
        values = record.get("values")
        for key, value in values.items() if isinstance(values, dict) else ():
            text += f", {key} {value}"
        return Line("data", text, symbol="note", tone="plain")

    def _order_declared(self, record: Record) -> Line | None:
        text, before = order_in_words(record), self._history.last.get(events.ORDER_DECLARED)
        if before is not None and text == order_in_words(before):
            return None
        return Line("order", text, symbol="note", tone="plain")

    def _parameters_grouped(self, record: Record) -> Line | None:
        text = groups_in_words(record.get("groups"))
        before = self._history.last.get(events.PARAMETERS_GROUPED, {})
        if text == groups_in_words(before.get("groups")):
            return None
        return Line("parameters", text, symbol="note", tone="plain")

    def _best_reset(self, record: Record) -> Line:
        self._best = None
        before = float_of(record, "best")
        was = "" if before is None else f" (it was {number(before)})"
        text = f"looked for anew{was}: another evaluation measured it"
        return Line("best", text, symbol="note")

    def _node_joined(self, record: Record) -> Line | None:
        if self._history.group is None:
            return None
        where = f" on {record['host']}" if record.get("host") else ""
        text = f"{record.get('node')}{where}, {plural(int_of(record, 'nproc'), 'worker')}"
        return Line("node joined", text, symbol="start", tone="begin")

    def _agent_restarted(self, record: Record) -> Line:
        where = f"{record['node']} " if record.get("node") else ""
        how = record.get("error") or f"ended with code {record.get('exit_code')}"
        text = f"{where}{how}; it is started again"
        return Line("agent", text, symbol="again")

    def _worker_warned(self, record: Record) -> Line | None:
        if warning_key(record) in self._history.warnings:
            return None
        return Line("warning", WarningSeen.of(record, None).in_words)

    def _warned(self, record: Record) -> tuple[str, ...]:
        """Return the number of warnings, and the command that shows them in the logs."""
        warnings = self._history.warnings.values()
        if not warnings:
            return ()
        newest = self._history.generation
        in_newest = any(warning.generation == newest for warning in warnings)
        generation = "" if in_newest else f" --generation {max(each.generation for each in warnings)}"
        command = f"elasticflow logs {record.get('run_id')} --level warning{generation}"
        return (f"{plural(len(warnings), 'warning')}: {command}",)

    def _place(self) -> tuple[str, ...]:
        return (self._folder,) if self._folder else ()
