"""The history of a run: the only fold of its events, which takes each event once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from elasticflow import events
from elasticflow.launcher.restarts.failure_classes import OUTCOMES
from elasticflow.observe.compilation import Compilation
from elasticflow.observe.records import read, tail
from elasticflow.observe.run_state import RunState
from elasticflow.observe.standbys import NodeStandbys
from elasticflow.observe.terminal.activities import OF_PHASES
from elasticflow.observe.terminal.event_lines import said_on_stderr
from elasticflow.observe.terminal.formats import parts_of
from elasticflow.system import records
from elasticflow.system.records import Record, float_of, int_of, printable_in, text_of, texts_of, unix_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from elasticflow.observe.run_state import Status
    from elasticflow.run_folder import RunFolder

SUPERVISOR_LOST = "supervisor_lost"
"""Class of a stop that the supervisor could not record itself."""
STATUS_OF_END: dict[str, Status] = {
    events.RUN_FINISHED: "finished",
    events.RUN_FAILED: "failed",
    events.RUN_INTERRUPTED: "interrupted",
}
_COMMON = frozenset(events.COMMON_FIELDS)
# Classes of ends after which usually no other group is formed.
_LAST_ENDS = frozenset({"finished", "drained"})


@dataclass
class Stop:
    """The end of a generation, or of a launch that could not continue, and its consequences.

    Attributes:
        generation: Number of the generation; 0 before the first.
        at: Unix time.
        kind: Class of the end, as the restart budget counts it; SUPERVISOR_LOST.
        step: Last finished step.
        rank: Rank of the worker that failed first; None if a node failed, or no worker did.
        node: The node of that worker, or the node that was lost.
        phase: Phase in which a rank hung.
        others: The other ranks' failures, as one line.
        stderr: The last lines of its standard error, if it died without an exception of its own.
        stacks: The file with the stacks of a rank that hung.
        dumps: The files that NCCL's flight recorders dumped then.
        likely: Probable cause if the cause is uncertain.
        left: Restarts left after the budget was charged for this end; None: it was not charged.
        back_s: Seconds from the failure to the next finished step.
        script_again_s: Seconds from the failure until the job's own script ran again, whatever its progress.
        verdict: The reason why the run ended here; None: it continued.
    """

    generation: int
    at: float | None
    kind: str
    reason: str
    step: int
    rank: int | None = None
    error: str = ""
    node: str | None = None
    pid: int | None = None
    phase: str | None = None
    traceback: str | None = None
    others: str | None = None
    stderr: tuple[str, ...] = ()
    stacks: str | None = None
    dumps: tuple[str, ...] = ()
    likely: str | None = None
    left: int | None = None
    back_s: float | None = None
    script_again_s: float | None = None
    redone: int | None = None
    verdict: str | None = None

    @classmethod
    def of(cls, event: Record, at: float | None, reason: str, failure: Record, hang: Record) -> Stop:
        """Return the stop in a `generation.ended` or `run.failed` record.

        Args:
            at: Unix time.
            failure: The `worker.failed` or `node.lost` record of the first failure; empty if nothing failed.
            hang: The `hang.detected` record; empty if no rank hung.
        """
        return cls(
            generation=int_of(event, "generation"),
            at=at,
            kind=str(event.get("class")),
            reason=reason,
            step=int_of(event, "step"),
            rank=(failure or event).get("rank"),
            error=text_of(failure, "error") or reason,
            node=failure.get("node"),
            pid=failure.get("pid"),
            phase=hang.get("phase"),
            traceback=text_of(failure, "traceback"),
            others=text_of(failure, "others"),
            stderr=said_on_stderr(failure),
            stacks=hang.get("stacks"),
            dumps=texts_of(hang, "dumps"),
        )

    @classmethod
    def of_supervisor(cls, known: Record, at: float | None) -> Stop:
        """Return the end of a launch whose supervisor could not record it."""
        step, likely = int_of(known, "step"), text_of(known, "likely")
        # An earlier version recorded only when the next launch found it out.
        number = int_of(known, "in_generation") or int_of(known, "generation")
        last_seen = float_of(known, "last_seen")
        at = at if last_seen is None else last_seen
        reason = f"the supervisor ended without a word after step {step}: {known.get('known')}"
        return cls(number, at, SUPERVISOR_LOST, reason, step, error=reason, likely=likely)

    @property
    def dumps_folder(self) -> str | None:
        """The folder of the dumps, which torchfrtrace reads; None if there are none."""
        return str(PurePath(self.dumps[0]).parent) if self.dumps else None

    @property
    def is_failure(self) -> bool:
        """True for a failure; False for the end of training and for an intended restart."""
        return self.kind not in OUTCOMES

    @property
    def explains_the_end(self) -> bool:
        """True if the run failed because of this stop: no step was trained after it."""
        is_last = self.back_s is None and self.script_again_s is None
        return self.is_failure and self.kind != SUPERVISOR_LOST and is_last

    @property
    def charged(self) -> bool:
        """True if the stop counted against the restart budget."""
        return self.left is not None

    @property
    def again(self) -> tuple[str, float] | None:
        """The part that resumed after the stop (training or the script) and the seconds until then; None: neither did."""
        if self.back_s is not None:
            return "training", self.back_s
        return None if self.script_again_s is None else ("script started", self.script_again_s)

    @property
    def headline(self) -> str:
        """Rank or node, and the root cause in one line: `rank 1: killed by SIGKILL`."""
        if self.rank is not None:
            return f"rank {self.rank}: {self.error}"
        return self.error if self.node is None else f"node {self.node}: {self.error}"


@dataclass
class Generation:
    """One worker group.

    Attributes:
        number: Number over the whole run.
        reason: The reason for it: start, crash, resume ...
        members: The generation's nodes in rank order, with their later state.
        parent: Name of the snapshot it resumed from; None: the beginning, a state in memory, or unknown.
        memory_step: Step of the state in memory that it resumed from instead; None: from no such state.
        first_step_at: Unix time at which its first step was done.
        drain_at: Unix time at which its workers were asked to exit.
        failed_rank: Rank in its last `worker.failed` event.
        stop: The generation's end; None while it runs, or if the supervisor could not record the end.
        run_end: The record of the launch's end, if the launch ended with this generation.
        durations: Seconds since the end of the generation before, by activity.
        began_s: Seconds of the run (`RunHistory.seconds`) at which it was formed; None: unknown.
        first_step_s: Seconds of the run at which its first step was done.
        script_s: Seconds of the run at which the job's own script ran in all its workers.
        ended_s: Seconds of the run at which it ended.
    """

    number: int
    reason: str | None = None
    world_size: int | None = None
    members: tuple[Node, ...] = ()
    parent: str | None = None
    memory_step: int | None = None
    first_step_at: float | None = None
    drain_at: float | None = None
    drain_reason: str | None = None
    failed_rank: int | None = None
    stop: Stop | None = None
    run_end: Record | None = None
    durations: dict[str, float] = field(default_factory=dict)
    began_s: float | None = None
    first_step_s: float | None = None
    script_s: float | None = None
    ended_s: float | None = None


@dataclass
class Launch:
    """A launch of the run.

    Attributes:
        number: Number of the launch; 0 if unknown.
        started: Unix time of its start.
        resume_command: The command that resumes the run; None: `elasticflow resume`.
    """

    number: int = 0
    started: float | None = None
    pid: int | None = None
    resume_command: object = None
    end: Record | None = None


@dataclass
class Node:
    """A node of a launch.

    Attributes:
        host: The machine's name; empty if unknown.
        first_rank: The first of its ranks in the newest group; None: the node takes no part.
        gone: `lost`, `left` or `excluded`; empty while it is there. All nodes leave with their launch.
        gone_at: Unix time at which it was gone.
    """

    name: str
    nproc: int = 0
    host: str = ""
    first_rank: int | None = None
    gone: str = ""
    gone_at: float = 0.0

    def leave(self) -> None:
        """Mark the node as gone, as at the end of its launch; a node that was lost stays lost."""
        self.gone = self.gone if self.gone == "lost" else "left"


GONE: dict[str, str] = {
    events.NODE_LOST: "lost",
    events.NODE_LEFT: "left",
    events.NODE_EXCLUDED: "excluded",
}
"""The word for a node that is gone, by the event that reports it."""


@dataclass(frozen=True, slots=True)
class SnapshotEvent:
    """A snapshot that was committed, rejected or not written.

    Attributes:
        state: `committed`; `rejected`: set aside; `failed`: it could not be written.
        at: Unix time.
        at_s: Seconds of the run.
        num_bytes: Size; None if unknown.
    """

    name: str
    generation: int
    state: Literal["committed", "rejected", "failed"]
    at: float | None
    at_s: float
    step: int
    num_bytes: float | None
    seconds: float | None
    trigger: str | None
    reason: str | None


_SNAPSHOT_STATES: dict[str, Literal["committed", "rejected", "failed"]] = {
    events.SNAPSHOT_COMMITTED: "committed",
    events.SNAPSHOT_REJECTED: "rejected",
    events.SNAPSHOT_FAILED: "failed",
}


@dataclass(frozen=True)
class WarningSeen:
    """A warning of the job's code or a library, as `Warned` describes it.

    Attributes:
        rank: The rank that gave it first.
        generation: The generation in which it was given first.
        times: How often all workers gave it in all launches, as far as it is recorded.
    """

    category: str
    place: str
    text: str
    rank: int
    generation: int
    times: int

    @classmethod
    def of(cls, event: Record, before: WarningSeen | None) -> WarningSeen:
        """Return the warning of a `worker.warned` record, counted with the records *before*."""
        times = int_of(event, "times")
        if before is not None:
            return replace(before, times=before.times + times)
        category, place, text = (text_of(event, name) or "" for name in ("category", "place", "text"))
        return cls(category, place, text, int_of(event, "rank"), int_of(event, "in_generation"), times)

    @property
    def in_words(self) -> str:
        """The warning as Python writes it, with the times it was given: `train.py:3: UserWarning: odd (rank 1, 14 times)`."""
        times = f", {self.times:,} times" if self.times > 1 else ""
        return f"{': '.join(filter(None, (self.place, self.category, self.text)))} (rank {self.rank}{times})"


@dataclass(frozen=True)
class Pause:
    """The pause between two launches: its place in seconds of the run, and its duration in seconds."""

    at: float
    seconds: float


@dataclass
class RunHistory:
    """The history of a run; its lists begin with the oldest entry.

    Attributes:
        stops: Ends of generations, and of launches that could not continue.
        node_events: Records about nodes, and failures on them, each with its seconds of the run.
        phase: The event that began the present phase (`OF_PHASES`), and its Unix time; None: the run trains.
        is_training: True if the newest group has finished a step.
        is_recovering: True if no step was finished since the last failure.
        began: Unix time of the first event.
        updated: Unix time of the last event.
        seconds: Duration of the run, without the pauses between launches.
        generation: Number of the newest generation in an event.
        step: Finished steps, as far as events of training show.
        steps: Steps of the whole training, once known.
        script: The user's script, once it was started.
        restarts: Number of failures after which training resumed.
        survived: Number of failures after which a step was finished.
        budget_left: Restarts left; None: no failure was counted yet.
        is_budget_spent: True if the newest launch ended with no restart left.
        has_stopped: True if a generation of the newest launch ended.
        last: The newest record of each event.
        datasets: The newest `dataset.opened` record of each dataset.
        data_warnings: The newest record of each kind about a dataset whose samples vary or were not checked.
        slow_ranks: The newest `rank.slow` record of each rank that has one.
        warnings: Warnings of the job's code and its libraries, by category, and place or text.
        began_anew: The newest `script.began_anew` record, unless a step was reported since.
        standbys: By node, its standby workers beside the newest generation, or the reason it makes none.
        standbys_seen: The newest standbys that were ready.
    """

    launches: list[Launch] = field(default_factory=list)
    generations: dict[int, Generation] = field(default_factory=dict)
    stops: list[Stop] = field(default_factory=list)
    snapshots: list[SnapshotEvent] = field(default_factory=list)
    node_events: list[tuple[float, Record]] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)
    nodes: dict[str, Node] = field(default_factory=dict)
    group: Generation | None = None
    phase: tuple[str, float] | None = None
    is_training: bool = False
    has_trained: bool = False
    is_recovering: bool = False
    began: float | None = None
    updated: float | None = None
    seconds: float = 0.0
    generation: int | None = None
    step: int | None = None
    steps: int | None = None
    samples: int | None = None
    parameters: int | None = None
    script: str | None = None
    snapshot: SnapshotEvent | None = None
    failed: int = 0
    restarts: int = 0
    survived: int = 0
    budget_left: int | None = None
    is_budget_spent: bool = False
    has_stopped: bool = False
    last: dict[str, Record] = field(default_factory=dict)
    datasets: dict[str, Record] = field(default_factory=dict)
    data_warnings: dict[tuple[str, str], Record] = field(default_factory=dict)
    slow_ranks: dict[int, Record] = field(default_factory=dict)
    warnings: dict[tuple[str, str], WarningSeen] = field(default_factory=dict)
    lingered: list[Record] = field(default_factory=list)
    began_anew: Record | None = None
    standbys: dict[str, NodeStandbys] = field(default_factory=dict)
    standbys_seen: NodeStandbys | None = None
    compilation: Compilation = field(default_factory=Compilation)
    # The newest time so far: a clock may have been set back.
    _newest: float = 0.0
    _paused_s: float = 0.0
    # Records of the failure or hang in the generation that has not ended yet.
    _worker: Record = field(default_factory=dict)
    _node: Record = field(default_factory=dict)
    _hang: Record = field(default_factory=dict)

    @classmethod
    def of(cls, happened: Iterable[Record]) -> RunHistory:
        """Return the history in records of events.jsonl; any of their fields may be missing or odd."""
        history = cls()
        for event in happened:
            history.take(event)
        return history

    @classmethod
    def read(cls, folder: RunFolder) -> RunHistory:
        """Return the history of all events of the run."""
        return cls.of(read(folder.events))

    @classmethod
    def newest(cls, folder: RunFolder) -> RunHistory:
        """Return the history of the last events only, which suffice for the state of a run with a file of any length."""
        return cls.of(tail(folder.events))

    def state(self) -> RunState:
        """Return the state as in state.json, as far as these events tell it."""
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
            launched=launch.started,
            pid=launch.pid,
            status=STATUS_OF_END.get(name, "running"),
            verdict={"event": name, **fields} if end else None,
        )

    @property
    def redone(self) -> int:
        """Number of steps that were done again, after all stops."""
        return sum(stop.redone or 0 for stop in self.stops)

    @property
    def not_held(self) -> str | None:
        """Reason that the newest generation holds no state in memory, if it told one."""
        return self._reason_of(events.HELD_OFF)

    @property
    def held_pauses(self) -> str | None:
        """Reason that the newest generation holds no state while a snapshot is being written, if it told one."""
        return self._reason_of(events.HELD_PAUSES)

    def _reason_of(self, event: str) -> str | None:
        told = self.last.get(event, {})
        return text_of(told, "reason") if told and told.get("generation") == self.generation else None

    def take(self, event: Record) -> None:
        """Add the next event."""
        name, at = str(event.get("event")), unix_time(event.get("timestamp"))
        if name == events.RUN_STARTED:
            self._end_group()  # at the time of the previous launch's last event
        if at is not None:
            self._advance(at, begins_launch=name == events.RUN_STARTED)
        self.last[name] = event
        number = event.get("generation")
        if isinstance(number, int):
            self.generation = number
            if number > 0:
                self.generations.setdefault(number, Generation(number))
        if name in OF_PHASES and not (self.is_training and name == events.NODE_JOINED):
            self.phase = name, at or 0.0
        if (take := self._TAKE.get(name)) is not None:
            take(self, event, at)

    def forget(self) -> None:
        """Keep only the newest of each kind: the live view of a run, which may last for weeks, needs no more."""
        kept: list[list[Any]] = [
            self.launches,
            self.stops,
            self.snapshots,
            self.node_events,
            self.pauses,
        ]
        for each in kept:
            del each[:-1]
        for number in list(self.generations)[:-1]:
            del self.generations[number]

    def _advance(self, at: float, *, begins_launch: bool) -> None:
        if self.began is None:
            self.began = self._newest = at
        if begins_launch and (pause := at - self._newest) > 0 and self.seconds > 0:
            self.pauses.append(Pause(self.seconds, pause))
            self._paused_s += pause
        self._newest, self.updated = max(self._newest, at), at
        self.seconds = self._newest - self.began - self._paused_s

    def _named(self, event: Record) -> Generation:
        """Return the generation of an event, or a throw-away generation if the event has no number."""
        number = event.get("generation")
        return self.generations.get(number, Generation(0)) if isinstance(number, int) else Generation(0)

    def _run_started(self, event: Record, at: float | None) -> None:
        pid = int_of(event, "pid") or None
        self.launches.append(Launch(int_of(event, "launch"), at, pid, event.get("resume_command")))
        self.standbys.clear()
        for node in self.nodes.values():
            node.leave()
        self.nodes = {}
        # A generation whose supervisor could not record its end may have left these.
        self._worker, self._node, self._hang = {}, {}, {}
        self.is_training = self.has_stopped = self.is_budget_spent = False

    def _run_ended(self, event: Record, at: float | None) -> None:
        if not self.launches:
            self.launches.append(Launch())
        self.launches[-1].end = self._named(event).run_end = event
        self.step = int_of(event, "step") if event.get("step") is not None else self.step
        self._end_group()
        if event["event"] != events.RUN_FAILED:
            return
        if not self.has_stopped or not self.stops[-1].explains_the_end:
            self.stops.append(Stop.of(event, at, str(event.get("error")), {}, {}))
        self.stops[-1].verdict = str(event.get("why") or "the run failed")

    def _supervisor_lost(self, event: Record, at: float | None) -> None:
        self.stops.append(Stop.of_supervisor(event, at))

    def _generation_started(self, event: Record, at: float | None) -> None:
        self._end_group()
        # The workers of this node were the standbys.
        self.standbys = {node: s for node, s in self.standbys.items() if not s.pids}
        members = event.get("members")
        present = [node for node in self.nodes.values() if not node.gone]
        group = self.group = self._named(event)
        group.reason, group.world_size = text_of(event, "reason"), int_of(event, "world_size") or None
        if isinstance(members, list | tuple):
            present = [self.nodes.get(name, Node(name)) for name in map(str, members)]
        group.members = tuple(present)
        group.began_s, group.first_step_s, group.script_s, group.ended_s = self.seconds, None, None, None
        for node in self.nodes.values():
            node.first_rank = None
        first = 0
        for node in group.members:
            node.first_rank = first
            first += node.nproc

    def _generation_ended(self, event: Record, at: float | None) -> None:
        stop = Stop.of(event, at, str(event.get("reason")), self._worker or self._node, self._hang)
        self._worker, self._node, self._hang = {}, {}, {}
        self.stops.append(stop)
        generation = self._named(event)
        generation.stop, generation.durations = stop, parts_of(event.get("durations"))
        self.has_stopped = True
        self.failed += stop.is_failure
        self._end_group()
        self._end_training(event, at)

    def _start_failed(self, event: Record, at: float | None) -> None:
        # A node that was lost belongs to this failure, not to the end of the group that comes.
        self._worker, self._node, self._hang = {}, {}, {}
        self.stops.append(Stop.of(event, at, str(event.get("error")), event, {}))
        self.has_stopped = self.is_recovering = True
        self.failed += 1

    def _end_group(self) -> None:
        if self.group is not None and self.group.ended_s is None:
            self.group.ended_s = self.seconds

    def _end_training(self, event: Record, at: float | None) -> None:
        self.is_training = False
        if str(event.get("class")) not in _LAST_ENDS:
            self.phase = events.GENERATION_ENDED, at or 0.0

    def _worker_failed(self, event: Record, at: float | None) -> None:
        self._worker = event
        self.node_events.append((self.seconds, event))
        self.is_recovering = True
        if event.get("rank") is not None:
            self._named(event).failed_rank = int_of(event, "rank")
        self._end_training(event, at)

    def _node_joined(self, event: Record, at: float | None) -> None:
        name = str(event.get("node"))
        if (before := self.nodes.get(name)) is not None:
            before.leave()
        self.nodes[name] = Node(name, int_of(event, "nproc"), str(event.get("host") or ""))
        self.node_events.append((self.seconds, event))

    def _node_gone(self, event: Record, at: float | None) -> None:
        name = str(event.get("node"))
        node = self.nodes.setdefault(name, Node(name))
        node.gone, node.gone_at = GONE[event["event"]], at or 0.0
        self.node_events.append((self.seconds, event))
        if event["event"] == events.NODE_LOST:
            self._node, self.is_recovering = event, True
            if node.first_rank is not None:
                self._end_training(event, at)

    def _agent_restarted(self, event: Record, at: float | None) -> None:
        self.is_recovering = True

    def _hang_detected(self, event: Record, at: float | None) -> None:
        self._hang = event

    def _script_started(self, event: Record, at: float | None) -> None:
        self.script = str(event.get("script"))
        if self.group is not None and self.group.ended_s is None:
            self.group.script_s = self.seconds
        if self.stops and self.stops[-1].script_again_s is None:
            self.stops[-1].script_again_s = float_of(event, "seconds_since_failure")

    def _began_anew(self, event: Record, at: float | None) -> None:
        self.began_anew = event

    def _training_started(self, event: Record, at: float | None) -> None:
        self.step, self.steps = int_of(event, "step"), int_of(event, "steps") or None
        self.parameters = int_of(event, "parameters") or self.parameters
        if event["event"] == events.STAGE_STARTED:
            return
        self.has_trained, self.restarts = True, self.failed
        if event.get("from_memory") is True:
            self._named(event).memory_step = self.step
        else:
            self._named(event).parent = text_of(event, "restored_from")
        if self.stops:
            self.stops[-1].redone = max(0, self.stops[-1].step - self.step)

    def _first_step(self, event: Record, at: float | None) -> None:
        self.is_training, self.is_recovering = True, False
        self.began_anew = self.phase = None
        generation, stop = self._named(event), self.stops[-1] if self.stops else None
        if generation.first_step_at is None:
            generation.first_step_at = at
        if self.group is not None and self.group.ended_s is None and self.group.first_step_s is None:
            self.group.first_step_s = self.seconds
        if stop is not None and stop.back_s is None:
            stop.back_s = float_of(event, "seconds_since_failure")
            self.survived += stop.back_s is not None and stop.is_failure and stop.kind != SUPERVISOR_LOST

    def _training_compiled(self, event: Record, at: float | None) -> None:
        self.compilation = self.compilation.after(event)

    def _drain_requested(self, event: Record, at: float | None) -> None:
        generation = self._named(event)
        generation.drain_at, generation.drain_reason = at, text_of(event, "reason")

    def _budget_charged(self, event: Record, at: float | None) -> None:
        self.budget_left = int_of(event, "left")
        if self.stops:
            self.stops[-1].left = self.budget_left

    def _budget_refilled(self, event: Record, at: float | None) -> None:
        self.budget_left = int_of(event, "budget")

    def _budget_spent(self, event: Record, at: float | None) -> None:
        self.is_budget_spent = True

    def _standbys(self, event: Record, at: float | None) -> None:
        standbys = NodeStandbys.of(event)
        self.standbys[standbys.node] = standbys
        self.standbys_seen = standbys if standbys.pids else self.standbys_seen

    def _snapshot(self, event: Record, at: float | None) -> None:
        snapshot = SnapshotEvent(
            name=str(event.get("name")),
            generation=int_of(event, "generation"),
            state=_SNAPSHOT_STATES[event["event"]],
            at=at,
            at_s=self.seconds,
            step=int_of(event, "step"),
            num_bytes=float_of(event, "bytes"),
            seconds=float_of(event, "seconds"),
            trigger=text_of(event, "trigger"),
            reason=text_of(event, "reason"),
        )
        self.snapshots.append(snapshot)
        self.snapshot = snapshot if snapshot.state == "committed" else self.snapshot

    def _dataset_opened(self, event: Record, at: float | None) -> None:
        self.datasets[str(event.get("name"))] = event
        if event.get("name") == "train":
            self.samples = int_of(event, "samples") or None

    def _rank_slow(self, event: Record, at: float | None) -> None:
        self.slow_ranks[int_of(event, "rank")] = event

    def _worker_lingered(self, event: Record, at: float | None) -> None:
        self.lingered.append(event)

    def _worker_warned(self, event: Record, at: float | None) -> None:
        key = warning_key(event)
        self.warnings[key] = WarningSeen.of(event, self.warnings.get(key))

    def _data_warning(self, event: Record, at: float | None) -> None:
        self.data_warnings[event["event"], str(event.get("name"))] = event

    _TAKE: ClassVar[dict[str, Callable[[RunHistory, Record, float | None], None]]] = {
        events.RUN_STARTED: _run_started,
        events.RUN_FINISHED: _run_ended,
        events.RUN_FAILED: _run_ended,
        events.RUN_INTERRUPTED: _run_ended,
        events.SUPERVISOR_LOST: _supervisor_lost,
        events.GENERATION_STARTED: _generation_started,
        events.GENERATION_ENDED: _generation_ended,
        events.START_FAILED: _start_failed,
        events.WORKER_FAILED: _worker_failed,
        events.NODE_JOINED: _node_joined,
        events.NODE_LOST: _node_gone,
        events.NODE_LEFT: _node_gone,
        events.NODE_EXCLUDED: _node_gone,
        events.AGENT_RESTARTED: _agent_restarted,
        events.HANG_DETECTED: _hang_detected,
        events.RANK_SLOW: _rank_slow,
        events.WORKER_WARNED: _worker_warned,
        events.WORKER_LINGERED: _worker_lingered,
        events.SCRIPT_STARTED: _script_started,
        events.SCRIPT_BEGAN_ANEW: _began_anew,
        events.TRAINING_STARTED: _training_started,
        events.STAGE_STARTED: _training_started,
        events.TRAINING_FIRST_STEP: _first_step,
        events.TRAINING_COMPILED: _training_compiled,
        events.COMPILER_CACHE: _training_compiled,
        events.DRAIN_REQUESTED: _drain_requested,
        events.BUDGET_CHARGED: _budget_charged,
        events.BUDGET_REFILLED: _budget_refilled,
        events.BUDGET_SPENT: _budget_spent,
        events.STANDBYS_READY: _standbys,
        events.STANDBYS_OFF: _standbys,
        events.SNAPSHOT_COMMITTED: _snapshot,
        events.SNAPSHOT_REJECTED: _snapshot,
        events.SNAPSHOT_FAILED: _snapshot,
        events.DATASET_OPENED: _dataset_opened,
        events.DATASET_VARIES: _data_warning,
        events.DATASET_UNSEEN: _data_warning,
    }


def is_taken_over(record: Record) -> bool:
    """Return whether *record* ends a launch whose run another launch has taken over and continues."""
    return record.get("event") == events.RUN_FAILED and record.get("class") == "taken_over"


def warning_key(event: Record) -> tuple[str, str]:
    """Return the key that tells warnings apart: the category, and the place or else the text."""
    return str(event.get("category")), str(event.get("place") or event.get("text"))


def state_of(folder: RunFolder) -> RunState:
    """Return the state in state.json; from the events if that is damaged; an empty state if there is no file."""
    state = records.read(folder.state)
    if isinstance(state, dict):
        return RunState.from_json(printable_in(state))
    return RunState() if state is None else RunHistory.newest(folder).state()


def began(folder: RunFolder) -> float | None:
    """Return the Unix time of the run's first event; None if it has no event."""
    return RunHistory.of(islice(read(folder.events), 1)).began
