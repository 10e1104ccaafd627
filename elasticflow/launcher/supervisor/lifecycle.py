"""What follows from what happens to a launch: which generation is formed of whom, who is drained, and the verdict.

`Lifecycle.on` takes an event and the time, and returns what is to be done. It knows no process, no store, no file and
no clock, so that it can be tested as a table; `command_runner.py` does what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from elasticflow import errors, events
from elasticflow.launcher.restarts.restart_policy import RestartPolicy, unready_end, would_end_again
from elasticflow.launcher.supervisor import hangs, outcomes
from elasticflow.launcher.supervisor.commands import (
    AgentEnded,
    Answer,
    AskWorkers,
    ClaimFailed,
    Command,
    ForgetAgent,
    GenerationClaimed,
    Instant,
    Interrupted,
    LeaveAsked,
    LifecycleEvent,
    ListSnapshots,
    NodeEvent,
    NodeLost,
    RecordEvent,
    ReleaseNode,
    RunTakenOver,
    SnapshotFenced,
    SnapshotSetAside,
    SnapshotsListed,
    StartAgent,
    TimePassed,
    UpdateState,
    WorkersEvent,
)
from elasticflow.launcher.supervisor.generations import Cause, Formation
from elasticflow.launcher.supervisor.nodes import Node
from elasticflow.launcher.supervisor.recovery import Recovery, attempt_of
from elasticflow.protocol.messages import (
    AgentDied,
    LogLines,
    NodeLeaving,
    NodeReady,
    Stacks,
    Standstill,
    WorkersEnded,
    WorkersStarted,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.compiler.plan.launch_plan import RestartPlan
    from elasticflow.events import Event
    from elasticflow.launcher.restarts.failures import Failure
    from elasticflow.launcher.restarts.restart_ledger import LedgerEntry
    from elasticflow.launcher.restarts.restart_policy import FailedAttempt
    from elasticflow.launcher.supervisor.generations import Generation
    from elasticflow.launcher.supervisor.nodes import Nodes
    from elasticflow.launcher.supervisor.outcomes import Verdict
    from elasticflow.protocol.messages import GenerationRequest

UNTRAINED_S = 5.0
"""Grace of a drain before the run's first step: there is nothing to save, and the workers may compile for minutes."""
_TOO_LATE = "the grace ended before the workers left"


@dataclass(frozen=True)
class Drain:
    """Why workers were asked to leave.

    Attributes:
        ends: The launch ends then; else the next generation follows.
        outcome: `failure_classes.Outcome` of the generation.
        reason: In words.
        asked: When, on the monotonic clock.
    """

    ends: bool
    outcome: str
    reason: str
    asked: float


@dataclass(frozen=True)
class RunSoFar:
    """What is known of the run when the launch begins.

    Attributes:
        step: Step that it has reached.
        restarts: How often it was restarted.
        ledger: Its failures, oldest first.
        is_resumed: It existed before this launch.
    """

    step: int = 0
    restarts: int = 0
    ledger: tuple[LedgerEntry, ...] = ()
    is_resumed: bool = False


class _Undecided(NamedTuple):
    """A failure whose consequence waits for the list of snapshots."""

    attempt: FailedAttempt
    failure: Failure | None
    failed_at: float


class Lifecycle:
    """Decides what comes next, until there is a verdict.

    Args:
        plan: What failures cost.
        nodes: The nodes that are known to come.
        run: The run before this launch.
        untrained_s: Seconds that a drain has before the run's first step, at most those of any drain.

    Attributes:
        generation: The generation that runs, or None between two.
        verdict: How the launch ended, or None while it goes on.
    """

    def __init__(
        self, plan: RestartPlan, nodes: Nodes, run: RunSoFar, untrained_s: float = UNTRAINED_S
    ) -> None:
        self._nodes = nodes
        self._grace_s, self._untrained_s = plan.grace_s, min(plan.grace_s, untrained_s)
        self._step = run.step
        self._recovery = Recovery(RestartPolicy(plan), run.ledger, run.restarts)
        self._formation = Formation("resume" if run.is_resumed else "start")
        self._drain: Drain | None = None
        self._undecided: _Undecided | None = None
        self._unready_ends: dict[str, tuple[str, ...]] = {}
        self._now = Instant(0.0, 0.0)
        self._commands: list[Command] = []
        self.generation: Generation | None = None
        self.verdict: Verdict | None = None

    @property
    def is_idle(self) -> bool:
        """Whether agents are ready and run no generation."""
        return self.generation is None and len(self._nodes) > 0

    @property
    def is_leaving(self) -> bool:
        """Whether a drain was asked for with which the launch ends."""
        return self._drain is not None and self._drain.ends

    def has_node(self, node: str) -> bool:
        """Return whether the agent of *node* is ready."""
        return node in self._nodes

    def on(self, event: LifecycleEvent, now: Instant) -> list[Command]:
        """Take in what happened at *now*; return what is to be done, in this order.

        The answer to a command is to be given before anything else that happens.
        """
        self._now, self._commands = now, []
        match event:
            case TimePassed():
                self._time_passed()
            case LeaveAsked():
                self._leave_asked(event.reason)
            case Interrupted():
                self._interrupt(event.reason, event.exit_code)
            case SnapshotFenced():
                # Else this launch itself has gone on to a later generation.
                if self.generation is not None and self.generation.number == event.generation:
                    self._settle(outcomes.taken_over(self._step, self._formation.last_number))
            case NodeReady() | NodeLeaving() | NodeLost() | AgentDied() | AgentEnded():
                self._on_node(event)
            case WorkersStarted() | LogLines() | Standstill() | Stacks() | WorkersEnded():
                self._on_workers(event)
            case _:
                self._on_answer(event)
        return self._commands

    # --- nodes ------------------------------------------------------------------------------------------

    def _on_node(self, event: NodeEvent) -> None:
        match event:
            case NodeReady():
                self._node_ready(event)
            case NodeLeaving():
                self._node_leaving(event.node)
            case NodeLost():
                self._node_lost(event.node, event.failure_class, event.reason)
            case AgentDied():
                self._node_lost(event.node, "agent_lost", event.error)
            case AgentEnded():
                self._agent_ended(event)
            case _:
                assert_never(event)

    def _node_ready(self, ready: NodeReady) -> None:
        generation = self.generation
        if generation is not None and ready.node in generation.running:
            # The agent that was to run its workers died before anybody noticed; this one knows nothing of them.
            generation.lost[ready.node] = ("agent_lost", f"the agent of {ready.node} was started again")
            self._stop(generation, also_alone=True)
            self._conclude(generation)
        self._unready_ends.pop(ready.node, None)
        node = Node(ready.node, ready.host, ready.nproc, ready.node_rank)
        self._nodes.join(node, self._now.monotonic)
        self._record(events.NODE_JOINED, node=node.name, host=node.host, nproc=node.nproc)
        for module in ready.refused:
            self._record(events.PRELOAD_REFUSED, module=module.module, reason=module.reason)

    def _node_leaving(self, node: str) -> None:
        """Have the workers of a node that is about to be taken away, and with them all others, leave after a step."""
        if node not in self._nodes:
            return
        self._nodes.leave(node)
        if self.generation is None or node not in self.generation.nodes:
            self._release_leaving()
        elif self._drain is None:
            self._ask_to_drain("preempted", f"node {node} is leaving", ends=False)

    def _node_lost(self, node: str, failure_class: str, reason: str) -> None:
        if self._nodes.lose(node):
            self._record(events.NODE_LOST, node=node, reason=reason)
            self._do(ReleaseNode(node))  # should it live after all, it must not go on
        generation = self.generation
        if generation is None or node not in generation.nodes or node in generation.ended:
            return
        generation.lost[node] = (failure_class, reason)
        self._stop(generation)
        self._conclude(generation)

    def _agent_ended(self, ended: AgentEnded) -> None:
        """Have the agent started again, if that may help; its workers have died with it."""
        if self.verdict is not None:
            return
        node, end = ended.node, ended.end
        was_ready = node in self._nodes
        was_needed = self.generation is not None and node in self.generation.nodes
        error = f"the agent of {node} {end.cause}"
        self._node_lost(node, "agent_lost", error)
        if not was_ready:
            described = unready_end(end.cause, is_its_own_doing=end.is_its_own_doing)
            self._unready_ends[node] = (*self._unready_ends.get(node, ()), described)
        if not was_needed and self._nodes.are_enough:  # a spare that keeps dying is let go
            self._nodes.note_loss(node)
            if not self._nodes.may_come_back(node):
                self._do(ForgetAgent(node))
                return
        elif not was_needed:
            self._needed_agent_ended(ended, error)
        self._start_again(ended)

    def _start_again(self, ended: AgentEnded) -> None:
        if self.verdict is None:
            fields = {"node": ended.node, "exit_code": ended.end.exit_code, "error": ended.end.cause}
            self._record(events.AGENT_RESTARTED, **fields)
            self._do(StartAgent(ended.node))

    def _needed_agent_ended(self, ended: AgentEnded, error: str) -> None:
        """Charge the end of an agent without which no generation can be formed."""
        unready_ends = self._unready_ends.get(ended.node, ())
        if would_end_again(unready_ends):
            words = (
                f"the agent of {ended.node} does not get ready, it {ended.end.cause}\n{ended.end.last_words}"
            )
            error = words.rstrip()
        self._failed("agent_lost", error, unready_ends=unready_ends)
        self._nodes.expect(ended.node)

    def _release_leaving(self) -> None:
        """Let the nodes go that asked to, once they run nothing."""
        for node in self._nodes.leaving():
            if self.generation is None or node not in self.generation.nodes:
                self._nodes.lose(node)
                self._record(events.NODE_LEFT, node=node)
                self._do(ReleaseNode(node))

    # --- workers ----------------------------------------------------------------------------------------

    def _on_workers(self, event: WorkersEvent) -> None:
        if isinstance(event, LogLines):
            self._hear(event)
            return
        generation = self.generation
        if generation is None or generation.number != event.generation:
            return  # said of one that is gone
        match event:
            case WorkersStarted():
                generation.workers[event.node] = event.workers
                self._update(workers=[vars(worker) for worker in generation.started])
            case Standstill(is_so=True):
                generation.stalled_nodes.add(event.node)
            case Standstill():
                generation.stalled_nodes.discard(event.node)
            case Stacks():
                generation.stacks[event.node] = event.workers
            case WorkersEnded():
                generation.ended[event.node] = event
                if event.failed:
                    self._stop(generation)
                self._conclude(generation)
            case _:
                assert_never(event)

    def _hear(self, log: LogLines) -> None:
        for line in log.lines:
            if line["event"] in {events.STEP, events.TRAINING_STARTED, events.TRAINING_FINISHED}:
                self._step = line["step"]
            if self.generation is not None:
                self.generation.hear(line)

    def _stop(self, generation: Generation, *, also_alone: bool = False) -> None:
        """Have the workers of all nodes killed: they would wait for the one that failed."""
        if not generation.is_stopping:
            generation.is_stopping = True
            if also_alone or len(generation.nodes) > 1:
                self._ask(generation, "stop")

    def _ask_to_drain(self, outcome: str, reason: str, *, ends: bool) -> None:
        was_asked = self._drain is not None
        self._drain = Drain(ends, outcome, reason, self._now.monotonic)
        self._record(events.DRAIN_REQUESTED, reason=reason, grace_s=self._drain_limit_s())
        if self.generation is not None and not was_asked:
            self._ask(self.generation, "drain")

    def _drain_limit_s(self) -> float:
        return self._grace_s if self._step > 0 else self._untrained_s

    # --- time and signals -------------------------------------------------------------------------------

    def _time_passed(self) -> None:
        """Form the next generation if it is time, take in nodes that came, end a hang and a drain that is late."""
        if self.verdict is not None:
            return
        generation, now = self.generation, self._now.monotonic
        if generation is None:
            self._commands += self._formation.form(self._nodes, now)
        elif not generation.is_stopping:
            self._look_for_hang(generation)
            self._look_for_nodes(generation)
        if self._drain is not None and now >= self._drain.asked + self._drain_limit_s():
            if self._drain.ends or self.generation is None:
                self._interrupt(_TOO_LATE)
            else:
                self._stop(self.generation, also_alone=True)

    def _look_for_hang(self, generation: Generation) -> None:
        if generation.stacks_asked is None:
            if hangs.stands_still(generation):
                generation.stacks_asked = self._now.monotonic
                self._ask(generation, "stacks")
        elif hangs.has_answered(generation, self._now.monotonic):
            hang = hangs.find_hang(generation)
            if hang.fields is not None:
                self._record(events.HANG_DETECTED, **hang.fields)
            generation.hung[hang.rank] = hang.raised
            self._stop(generation, also_alone=True)

    def _look_for_nodes(self, generation: Generation) -> None:
        if self._drain is not None or generation.is_stopping:
            return
        if generation.step is not None:
            self._nodes.forget_failures()
        if self._nodes.has_room_for_more(generation.nodes, self._now.monotonic):
            self._ask_to_drain("resized", f"{len(self._nodes)} nodes are ready", ends=False)

    def _leave_asked(self, reason: str) -> None:
        self._ask_to_drain("drained", reason, ends=True)
        if self.generation is None:
            self._interrupt(reason)

    def _interrupt(self, reason: str, code: int = errors.INTERRUPTED) -> None:
        """End the launch now; a run that has finished or failed stays so."""
        if self.verdict is None or (code == errors.KILLED_BY_USER and self.verdict.status == "interrupted"):
            self.verdict = outcomes.interrupted(self._step, reason, code)

    # --- answers ----------------------------------------------------------------------------------------

    def _on_answer(self, event: Answer) -> None:
        match event:
            case GenerationClaimed():
                self._claimed(event.number)
            case RunTakenOver():
                self._settle(outcomes.taken_over(self._step, self._formation.last_number))
            case ClaimFailed():  # it may answer at the next try
                self._failed("storage", f"no generation can be claimed: {event.error}")
            case SnapshotsListed():
                self._decide(event.names)
            case SnapshotSetAside():
                self._recovery.set_aside(event.name)
            case _:
                assert_never(event)

    def _claimed(self, number: int) -> None:
        self.generation, commands = self._formation.claimed(number)
        self._commands += commands

    # --- the end of a generation ------------------------------------------------------------------------

    def _conclude(self, generation: Generation) -> None:
        """Once no worker is left anywhere: what ended the generation, and what comes next."""
        if not generation.is_over:
            return
        self.generation = None
        drain, self._drain = self._drain, None
        if generation.is_stopping:
            self._generation_failed(generation, drain)
        else:
            self._workers_left(generation, drain)
        self._release_leaving()

    def _generation_failed(self, generation: Generation, drain: Drain | None) -> None:
        cause = generation.cause()
        if cause is None:  # killed by us, and nothing else was wrong
            assert drain is not None, "a failed group has a cause"
            cause = Cause("", drain.outcome, _TOO_LATE)
        if cause.failure is not None:
            self._record(events.WORKER_FAILED, **cause.failure.fields())
        self._record_end(cause.failure_class, cause.error)
        if drain is not None and drain.ends:
            who = "the agent died" if cause.failure is None else "a worker failed"
            self._settle(outcomes.interrupted(self._step, f"{who} while draining: {cause.error}"))
            return
        if cause.failure is not None:
            self._nodes.note_failure(cause.node)
            if self._nodes.fails_too_often(cause.node):
                self._nodes.exclude(cause.node)
                self._record(events.NODE_EXCLUDED, node=cause.node, reason=cause.error)
        self._failed(cause.failure_class, cause.error, generation, cause.failure, generation.failed_at)

    def _workers_left(self, generation: Generation, drain: Drain | None) -> None:
        """All workers left with code 0: the end of training, or a drain."""
        if generation.is_finished:
            stopped = generation.stopped
            reason = "training reached its end" if stopped is None else f"training was stopped by {stopped}"
            self._record_end("finished", reason)
            self._settle(outcomes.finished(self._step, self._recovery.restarts, stopped))
            return
        outcome = "drained" if drain is None else drain.outcome
        self._record_end(outcome, "all workers left after the same step")
        if drain is None:  # somebody asked the workers, not us: the job goes on
            # Leaving without a single step, again and again, would go on for ever if it were free.
            failure_class = "crash" if generation.step is None else "drained"
            self._failed(failure_class, "the workers left before training reached its end", generation)
            return
        seconds = round(self._now.monotonic - drain.asked, 3)
        self._record(events.DRAIN_COMPLETED, step=self._step, seconds=seconds)
        if drain.ends:
            self._settle(outcomes.interrupted(self._step, drain.reason))
        else:
            self._formation.plan(outcome, self._now.monotonic)

    def _failed(
        self,
        failure_class: str,
        error: str,
        generation: Generation | None = None,
        failure: Failure | None = None,
        failed_at: float | None = None,
        unready_ends: tuple[str, ...] = (),
    ) -> None:
        """Charge a failure; plan another generation, or settle the verdict.

        Args:
            failure_class: A class of `failure_classes.CLASSES`.
            error: In one line.
            generation: What failed; None if none could be formed.
            failure: The worker that failed first, if it was one.
            failed_at: When, in unix time; None: now.
            unready_ends: How the agents of a node ended before they were ready.
        """
        attempt = attempt_of(failure_class, error, generation, failure, unready_ends)
        self._undecided = _Undecided(attempt, failure, failed_at or self._now.unix)
        if self._recovery.needs_snapshots(attempt):
            self._do(ListSnapshots())
        else:
            self._decide()

    def _decide(self, snapshots: Sequence[str] = ()) -> None:
        """Go on after the failure that was not decided yet, or give up."""
        assert self._undecided is not None, "a failure is to be decided"
        (attempt, failure, failed_at), self._undecided = self._undecided, None
        decision, commands = self._recovery.decide(attempt, snapshots, self._now.unix)
        self._commands += commands
        if decision.restart:
            at = self._now.monotonic + decision.delay_s
            self._formation.plan(attempt.failure_class, at, failed_at)
            return
        code = errors.BUDGET_SPENT if decision.spent else errors.ANSWER_IS_NO
        verdict = outcomes.failed(
            self._step, attempt.failure_class, attempt.error, code, failure, decision.reason
        )
        self._settle(verdict)

    # --- what is to be done -----------------------------------------------------------------------------

    def _settle(self, verdict: Verdict) -> None:
        """End the launch with *verdict*, if it is the first."""
        self.verdict = self.verdict or verdict

    def _record_end(self, outcome: str, reason: str) -> None:
        self._record(events.GENERATION_ENDED, **{"class": outcome}, reason=reason, step=self._step)
        self._update(workers=[])

    def _ask(self, generation: Generation, request: GenerationRequest) -> None:
        self._do(AskWorkers(request, generation.number))

    def _record(self, event: Event, /, **fields: Any) -> None:
        self._do(RecordEvent(event, fields))

    def _update(self, **fields: Any) -> None:
        self._do(UpdateState(fields))

    def _do(self, command: Command) -> None:
        self._commands.append(command)
