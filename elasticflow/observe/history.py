"""What happened to a run, its events read once: launches, generations, stops, failures and snapshots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Literal

from elasticflow import events
from elasticflow.launcher.restarts.failure_classes import OUTCOMES
from elasticflow.observe.compilation import Compilation
from elasticflow.observe.records import read, tail
from elasticflow.observe.run_state import RunState
from elasticflow.observe.standbys import NodeStandbys
from elasticflow.system import records
from elasticflow.system.records import float_of, int_of, printable_in, text_of, unix_time

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.observe.run_state import Status
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

SUPERVISOR_LOST = "supervisor_lost"
"""Class of a stop that the supervisor could not write down itself."""
_STATUS_OF_END: dict[str, Status] = {
    events.RUN_FINISHED: "finished",
    events.RUN_FAILED: "failed",
    events.RUN_INTERRUPTED: "interrupted",
}
_COMMON = frozenset(events.COMMON_FIELDS)


@dataclass(frozen=True)
class Failure:
    """The first worker of a generation that failed, or a node that was lost.

    Attributes:
        event: The whole record.
        rank: The worker; None if it was a node.
        node: Where.
        pid: The worker's process.
        error: The worker's root cause in one line.
        traceback: The worker's own.
        others: The other ranks' failures in one line.
    """

    event: Record
    rank: int | None
    node: str | None
    pid: int | None
    error: str | None
    traceback: str | None
    others: str | None

    @classmethod
    def of(cls, event: Record) -> Failure:
        """Return what a `worker.failed` or `node.lost` record says."""
        rank, node, pid = event.get("rank"), event.get("node"), event.get("pid")
        texts = (text_of(event, name) for name in ("error", "traceback", "others"))
        return cls(event, rank, node, pid, *texts)


@dataclass
class Stop:
    """The end of a generation, or of a launch that could not go on, and what followed from it.

    Attributes:
        generation: Number of the generation; 0 before the first.
        at: Unix time.
        kind: Class of the end, as the restart budget counts it; SUPERVISOR_LOST.
        reason: Why, in words.
        step: Last finished step.
        rank: The worker that the record of the end names.
        failure: What failed first.
        hang: The `hang.detected` record.
        likely: What probably happened, where nothing is certain.
        left: Restarts left after the budget was charged for this end; None: it was free.
        back_s: Seconds from the failure to the next finished step.
        script_again_s: Seconds from the failure until the job's own script ran again, whatever it did then.
        redone: Steps that were done again.
        verdict: Why the run ended here, if it did.
    """

    generation: int
    at: float | None
    kind: str
    reason: str
    step: int
    rank: int | None = None
    failure: Failure | None = None
    hang: Record | None = None
    likely: str | None = None
    left: int | None = None
    back_s: float | None = None
    script_again_s: float | None = None
    redone: int | None = None
    verdict: str | None = None

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong: neither the end of training nor a wanted restart."""
        return self.kind not in OUTCOMES


@dataclass
class Generation:
    """One worker group.

    Attributes:
        number: Its number over the whole run.
        reason: Why it was formed: start, crash, resume ...
        world_size: Workers.
        parent: Name of the snapshot it went on from; None: the beginning, or nothing tells.
        first_step_at: Unix time at which its first step was done.
        drain_at: Unix time at which its workers were asked to leave.
        drain_reason: Why they were.
        failed_rank: The worker of its last `worker.failed` event.
        stop: How it ended; None while it runs, or if its supervisor could not say so.
        run_end: The record that ended the run's launch with it.
    """

    number: int
    reason: str | None = None
    world_size: int | None = None
    parent: str | None = None
    first_step_at: float | None = None
    drain_at: float | None = None
    drain_reason: str | None = None
    failed_rank: int | None = None
    stop: Stop | None = None
    run_end: Record | None = None


@dataclass
class Launch:
    """One launch.

    Attributes:
        number: Its number; 0 if nothing tells.
        started: Unix time.
        pid: The supervisor's process.
        end: The record that says how it ended.
    """

    number: int = 0
    started: float | None = None
    pid: int | None = None
    end: Record | None = None


@dataclass(frozen=True)
class SnapshotEvent:
    """What became of a snapshot.

    Attributes:
        name: The snapshot.
        generation: The generation that reported it.
        state: `committed`; `rejected`: set aside; `failed`: it could not be written.
        at: Unix time.
        num_bytes: Its size; 0 where it is not known.
    """

    name: str
    generation: int
    state: Literal["committed", "rejected", "failed"]
    at: float | None
    num_bytes: int


_SNAPSHOT_STATES: dict[str, Literal["committed", "rejected", "failed"]] = {
    events.SNAPSHOT_COMMITTED: "committed",
    events.SNAPSHOT_REJECTED: "rejected",
    events.SNAPSHOT_FAILED: "failed",
}


@dataclass
class History:
    """What happened to a run, the oldest first.

    Attributes:
        launches: Launches.
        generations: Generations by number.
        stops: Ends of generations, and of launches that could not go on.
        failures: Workers that failed, each the first of its generation.
        snapshots: What became of snapshots.
        began: Unix time of the first event.
        updated: Unix time of the last event.
        generation: Number of the newest generation that an event names.
        step: Finished steps, as far as events of training tell.
        steps: Steps of the whole training, once known.
        samples: Of the training data, once known.
        parameters: Of the model, once known.
        workers: Of the newest generation.
        overlap: The newest `overlap.found` record.
        data_warnings: The newest record of each kind about each dataset whose samples vary, or were not looked into.
        began_anew: The newest `script.began_anew` record, unless a step was told since.
        standbys: By node, its standby workers beside the newest generation, or why it has none any more.
        standbys_seen: The newest of them that were ready.
        compilation: What torch.compile takes.
    """

    launches: list[Launch] = field(default_factory=list)
    generations: dict[int, Generation] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    snapshots: list[SnapshotEvent] = field(default_factory=list)
    began: float | None = None
    updated: float | None = None
    generation: int | None = None
    step: int | None = None
    steps: int | None = None
    samples: int | None = None
    parameters: int | None = None
    workers: int | None = None
    overlap: Record | None = None
    data_warnings: dict[tuple[str, str], Record] = field(default_factory=dict)
    began_anew: Record | None = None
    standbys: dict[str, NodeStandbys] = field(default_factory=dict)
    standbys_seen: NodeStandbys | None = None
    compilation: Compilation = field(default_factory=Compilation)

    @classmethod
    def of(cls, happened: Iterable[Record]) -> History:
        """Return what these records of events.jsonl say; any of their fields may be missing or odd."""
        reader = _Reader()
        for event in happened:
            reader.take(event)
        return reader.history

    @classmethod
    def read(cls, folder: RunFolder) -> History:
        """Return the history of all events of the run."""
        return cls.of(read(folder.events))

    @classmethod
    def newest(cls, folder: RunFolder) -> History:
        """Return the history of the last events only: enough for the state of a run, however long its file is."""
        return cls.of(tail(folder.events))

    def state(self) -> RunState:
        """Return what state.json would say, as far as these events say it."""
        state = RunState(
            generation=self.generation or 0, step=self.step or 0, steps=self.steps, updated=self.updated
        )
        if not self.launches:
            return state
        launch = self.launches[-1]
        end, name = launch.end or {}, str((launch.end or {}).get("event"))
        fields = {key: value for key, value in end.items() if key not in _COMMON}
        return replace(
            state,
            launch=launch.number,
            started=launch.started,
            pid=launch.pid,
            status=_STATUS_OF_END.get(name, "running"),
            verdict={"event": name, **fields} if end else None,
        )


class _Reader:
    """Builds a history from events, taken one after the other."""

    def __init__(self) -> None:
        self.history = History()
        # What failed or hung in the generation that has not ended yet.
        self._worker: Failure | None = None
        self._node: Failure | None = None
        self._hang: Record | None = None

    def take(self, event: Record) -> None:
        """Take one event in."""
        history, at = self.history, unix_time(event.get("timestamp"))
        history.began = at if history.began is None else history.began
        history.updated = at if at is not None else history.updated
        number = event.get("generation")
        history.generation = number if isinstance(number, int) else history.generation
        name = str(event.get("event"))
        self._of_launch(name, event, at)
        if name in {events.SCRIPT_BEGAN_ANEW, events.TRAINING_FIRST_STEP}:
            history.began_anew = event if name == events.SCRIPT_BEGAN_ANEW else None
        self._of_failure(name, event)
        self._of_stop(name, event, at)
        if isinstance(number, int) and number > 0:
            self._of_generation(history.generations.setdefault(number, Generation(number)), name, event, at)
        if (state := _SNAPSHOT_STATES.get(name)) is not None:
            size = int_of(event, "bytes")
            snapshot = SnapshotEvent(str(event.get("name")), int_of(event, "generation"), state, at, size)
            history.snapshots.append(snapshot)

    def _of_launch(self, name: str, event: Record, at: float | None) -> None:
        history = self.history
        match name:
            case events.RUN_STARTED:
                history.launches.append(Launch(int_of(event, "launch"), at, int_of(event, "pid") or None))
                history.standbys.clear()
            case events.RUN_FINISHED | events.RUN_FAILED | events.RUN_INTERRUPTED:
                if not history.launches:
                    history.launches.append(Launch())
                history.launches[-1].end = event
                history.step = int_of(event, "step") if event.get("step") is not None else history.step
            case events.TRAINING_STARTED | events.STAGE_STARTED:
                history.step, history.steps = int_of(event, "step"), int_of(event, "steps") or None
                history.parameters = int_of(event, "parameters") or history.parameters
            case events.GENERATION_STARTED:
                history.workers = int_of(event, "world_size") or None
                # Its workers were the standbys.
                history.standbys = {node: s for node, s in history.standbys.items() if not s.pids}
            case events.STANDBYS_READY | events.STANDBYS_OFF:
                standbys = NodeStandbys.of(event)
                history.standbys[standbys.node] = standbys
                history.standbys_seen = standbys if standbys.pids else history.standbys_seen
            case events.TRAINING_COMPILED | events.COMPILER_CACHE:
                history.compilation = history.compilation.after(event)
            case _:
                self._of_data(name, event)

    def _of_data(self, name: str, event: Record) -> None:
        history = self.history
        match name:
            case events.DATASET_OPENED if event.get("name") == "train":
                history.samples = int_of(event, "samples") or None
            case events.OVERLAP_FOUND:
                history.overlap = event
            case events.DATASET_VARIES | events.DATASET_UNSEEN:
                history.data_warnings[name, str(event.get("name"))] = event
            case _:
                pass

    def _of_failure(self, name: str, event: Record) -> None:
        match name:
            case events.WORKER_FAILED:
                self._worker = Failure.of(event)
                self.history.failures.append(self._worker)
            case events.NODE_LOST:
                self._node = Failure.of(event)
            case events.HANG_DETECTED:
                self._hang = event
            case _:
                pass

    def _of_stop(self, name: str, event: Record, at: float | None) -> None:
        stops = self.history.stops
        match name:
            case events.GENERATION_ENDED:
                stop = _stop(event, at, str(event.get("reason")))
                stop.failure, stop.hang = self._worker or self._node, self._hang
                self._worker = self._node = self._hang = None
                stops.append(stop)
            case events.SUPERVISOR_LOST:
                stops.append(lost_supervisor(event, at))
            case events.RUN_FAILED:
                if not stops or not _explains_the_end(stops[-1]):
                    stops.append(_stop(event, at, str(event.get("error"))))
                stops[-1].verdict = str(event.get("why") or "the run failed")
            case events.BUDGET_CHARGED if stops:
                stops[-1].left = int_of(event, "left")
            case events.TRAINING_STARTED if stops:
                stops[-1].redone = max(0, stops[-1].step - int_of(event, "step"))
            case events.TRAINING_FIRST_STEP if stops and stops[-1].back_s is None:
                stops[-1].back_s = float_of(event, "seconds_since_failure")
            case events.SCRIPT_STARTED if stops and stops[-1].script_again_s is None:
                stops[-1].script_again_s = float_of(event, "seconds_since_failure")
            case _:
                pass

    def _of_generation(self, generation: Generation, name: str, event: Record, at: float | None) -> None:
        match name:
            case events.GENERATION_STARTED:
                generation.reason = text_of(event, "reason")
                generation.world_size = int_of(event, "world_size") or None
            case events.TRAINING_STARTED:
                generation.parent = text_of(event, "restored_from")
            case events.TRAINING_FIRST_STEP if generation.first_step_at is None:
                generation.first_step_at = at
            case events.WORKER_FAILED if event.get("rank") is not None:
                generation.failed_rank = int_of(event, "rank")
            case events.DRAIN_REQUESTED:
                generation.drain_at, generation.drain_reason = at, text_of(event, "reason")
            case events.GENERATION_ENDED:
                generation.stop = self.history.stops[-1]
            case events.RUN_FINISHED | events.RUN_FAILED | events.RUN_INTERRUPTED:
                generation.run_end = event
            case _:
                pass


def lost_supervisor(event: Record, at: float | None) -> Stop:
    """Return the end of a launch whose supervisor could not say how it ended; *event* holds what is known of it."""
    step = int_of(event, "step")
    reason = f"the supervisor ended without a word after step {step}: {event.get('known')}"
    likely = text_of(event, "likely")
    return Stop(int_of(event, "generation"), at, SUPERVISOR_LOST, reason, step, likely=likely)


def state_of(folder: RunFolder) -> RunState:
    """Return what state.json says; if it is damaged, what the events say; an empty state if there is no file."""
    state = records.read(folder.state)
    if isinstance(state, dict):
        return RunState.from_json(printable_in(state))
    return RunState() if state is None else History.newest(folder).state()


def began(folder: RunFolder) -> float | None:
    """Return the Unix time of the run's first event; None if there is none."""
    return History.of(islice(read(folder.events), 1)).began


def _stop(event: Record, at: float | None, reason: str) -> Stop:
    rank = event.get("rank")
    return Stop(int_of(event, "generation"), at, str(event.get("class")), reason, int_of(event, "step"), rank)


def _explains_the_end(stop: Stop) -> bool:
    """Return whether this stop is why the run failed in the end: nothing was trained after it."""
    is_last = stop.back_s is None and stop.script_again_s is None
    return stop.is_failure and stop.kind != SUPERVISOR_LOST and is_last
