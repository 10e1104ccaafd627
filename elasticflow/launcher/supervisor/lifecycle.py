"""The state machine of a launch: events in, commands out.

`Lifecycle.on` takes an event and the time, and returns commands. It knows no process, no store, no file and
no clock, so that it can be tested as a table; `command_runner.py` carries out the commands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, assert_never

from elasticflow import errors, events
from elasticflow.launcher.restarts.restart_policy import RestartPolicy, would_end_again
from elasticflow.launcher.supervisor.commands import (
    AgentEnded,
    CheckDevices,
    ClaimFailed,
    Command,
    ForgetAgent,
    GenerationClaimed,
    Instant,
    Interrupted,
    LeaveAsked,
    LifecycleEvent,
    ListSnapshots,
    NodeLost,
    RecordEvent,
    RunTakenOver,
    SnapshotFenced,
    SnapshotSetAside,
    SnapshotsListed,
    StartAgent,
    TimePassed,
    UpdateState,
    Verdict,
    WorkersEvent,
)
from elasticflow.launcher.supervisor.generations import TOO_LATE, Cause, Drain, Formation
from elasticflow.launcher.supervisor.hangs import end_hang
from elasticflow.launcher.supervisor.recovery import Recovery, attempt_of
from elasticflow.protocol.child_processes import longest_check_s
from elasticflow.protocol.messages import (
    AgentDied,
    DevicesChecked,
    LogLines,
    NodeLeaving,
    NodeReady,
    Stacks,
    Standstill,
    WorkersEnded,
    WorkersStarted,
)
from elasticflow.protocol.shard_groups import next_degree
from elasticflow.system.device_errors import class_of_device_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.compiler.plan.launch_plan import RestartPlan
    from elasticflow.events import Event, EventRecord
    from elasticflow.launcher.agent.agent_process import AgentEnd
    from elasticflow.launcher.restarts.restart_ledger import LedgerEntry
    from elasticflow.launcher.restarts.restart_policy import FailedAttempt
    from elasticflow.launcher.supervisor.generations import Generation
    from elasticflow.launcher.supervisor.nodes import Nodes

_LEFT_ITS_LOOP = (
    "the script ended in the middle of its loop, without run.finish(): no snapshot holds its last steps; "
    "run.stop(reason), or break and run.finish(), end training early"
)
UNTRAINED_S = 5.0
"""Grace of a drain before the run's first step: there is nothing to save, and the workers may compile for minutes."""


@dataclass(frozen=True)
class RunSoFar:
    """State of the run when the launch begins."""

    step: int = 0
    restarts: int = 0
    ledger: tuple[LedgerEntry, ...] = ()
    is_resumed: bool = False


class _Undecided(NamedTuple):
    """A failure that is decided once the snapshots are listed; *suspects*: nodes whose devices may have caused it."""

    cause: Cause
    attempt: FailedAttempt
    failed_at: float
    suspects: tuple[str, ...]


class Lifecycle:
    """Decides how the launch continues, until there is a verdict.

    Args:
        nodes: The nodes that are expected.
        untrained_s: Seconds that a drain has before the run's first step, at most those of any drain.
        script: Name of the user's script that workers run: it need not report steps, and has finished once all workers have
            exited. None: they run a train.py.
        may_offload: The job shards its model, and does not offload it yet.

    Attributes:
        generation: The generation that runs, or None between two.
        verdict: The launch's outcome, or None while it continues.
    """

    def __init__(
        self,
        plan: RestartPlan,
        nodes: Nodes,
        run: RunSoFar,
        untrained_s: float = UNTRAINED_S,
        *,
        script: str | None = None,
        may_offload: bool = False,
    ) -> None:
        self._nodes, self._may_offload = nodes, may_offload
        self._script = script
        self._grace_s = plan.grace_s
        self._untrained_s = plan.grace_s if script is not None else min(plan.grace_s, untrained_s)
        self._step = run.step
        self._recovery = Recovery(RestartPolicy(plan), run.ledger, run.restarts)
        self._formation = Formation("resume" if run.is_resumed else "start")
        self._undecided: _Undecided | None = None
        self._unchecked: dict[str, float] = {}  # by node whose devices are being checked: the deadline
        self._now = Instant(0.0, 0.0)
        self._heard_at: float | None = None
        # A script that reports no step begins anew at each start: an event says so at the second one.
        self._has_script_run = run.is_resumed
        self._tells_steps = run.step > 0
        self._has_told_anew = False
        self._has_trained = False  # in this launch
        # Monotonic time of the failure that the generation answers, if any.
        self._failed_at: float | None = None
        self._commands: list[Command] = []
        self.generation: Generation | None = None
        self.verdict: Verdict | None = None

    @property
    def is_idle(self) -> bool:
        """True if agents are ready and no generation runs."""
        return self.generation is None and len(self._nodes) > 0

    @property
    def is_leaving(self) -> bool:
        """True if the workers were asked to exit for good: the launch ends then."""
        drain = None if self.generation is None else self.generation.drain
        return drain is not None and drain.ends

    def has_node(self, node: str) -> bool:
        """Return whether the agent of *node* is ready."""
        return node in self._nodes

    def on(self, event: LifecycleEvent, now: Instant) -> list[Command]:  # noqa: C901, PLR0912  # one line for each event
        """Take in an event that happened at *now*; return the commands that follow, in order.

        The answer to a command must be passed in before any other event.
        """
        self._now, self._commands = now, []
        match event:
            case TimePassed():
                self._time_passed()
            case LeaveAsked():
                self._drain("drained", event.reason, ends=True)
                if self.generation is None:
                    self._interrupt(event.reason)
            case Interrupted():
                self._interrupt(event.reason, event.exit_code)
            case NodeReady():
                self._node_ready(event)
            case NodeLeaving():
                self._node_leaving(event.node)
            case NodeLost():
                self._node_lost(event.node, event.failure_class, event.reason)
            case AgentDied():
                self._node_lost(event.node, event.failure_class, event.error)
            case AgentEnded():
                self._agent_ended(event.node, event.end)
            case LogLines():
                self._log_lines(event.lines)
            case WorkersStarted() | Standstill() | Stacks() | WorkersEnded():
                self._workers_event(event)
            case DevicesChecked():
                self._devices_checked(event)
            case GenerationClaimed():
                self.generation, commands = self._formation.claimed(event.number)
                self._commands += commands
            case ClaimFailed():  # the store may answer at the next try
                self._failed(Cause("storage", f"no generation can be claimed: {event.error}"))
            case RunTakenOver():
                self.verdict = None  # how the run ends is for the other launch to say
                self._taken_over()
            case SnapshotFenced():
                # A snapshot of an earlier generation was fenced by this launch itself.
                if self.generation is not None and self.generation.number == event.generation:
                    self._taken_over()
            case SnapshotsListed():
                self._decide(event.names)
            case SnapshotSetAside():
                self._recovery.set_aside(event.name)
            case _:
                assert_never(event)
        return self._commands

    # --- time and signals -------------------------------------------------------------------------------

    def _time_passed(self) -> None:
        """Form the next generation if it is time, take in new nodes, end a hang and a drain that is late."""
        if self.verdict is not None:
            return
        generation, now = self.generation, self._now.monotonic
        if generation is None:
            self._look_for_late_checks(now)
            if not self._unchecked:
                self._commands += self._formation.form(self._nodes, now)
            return
        if not generation.is_stopping:
            self._commands += end_hang(generation, now)
        if not generation.is_stopping and generation.drain is None:
            self._look_for_nodes(generation)
        drain = generation.drain
        if drain is not None and now >= drain.asked + self._drain_limit_s():
            if drain.ends:
                self._interrupt(TOO_LATE)
            else:
                self._commands += generation.stop(also_alone=True)

    def _look_for_late_checks(self, now: float) -> None:
        """Stop waiting for checks by nodes that are gone, and by agents that have not answered in time."""
        for node, deadline in list(self._unchecked.items()):
            if node not in self._nodes:
                del self._unchecked[node]
            elif now >= deadline:
                note = f"not checked: its agent gave no answer within {self._longest_check_s(node):g} s"
                number = self._formation.last_number
                self._devices_checked(
                    DevicesChecked(number, node, 0, (), (note,), self._longest_check_s(node))
                )

    def _longest_check_s(self, node: str) -> float:
        return longest_check_s(self._nodes.workers_of(node))

    def _look_for_nodes(self, generation: Generation) -> None:
        """Have the workers exit if new nodes make the next generation larger."""
        if generation.step is not None:
            self._nodes.forget_failures()
        if self._nodes.has_room_for_more(generation.nodes, self._now.monotonic):
            self._drain("resized", f"{len(self._nodes)} nodes are ready", ends=False)

    def _drain(self, outcome: str, reason: str, *, ends: bool) -> None:
        """Have the workers exit after a step, if there are any."""
        self._record(events.DRAIN_REQUESTED, reason=reason, grace_s=self._drain_limit_s())
        if self.generation is not None:
            drain = Drain(ends, outcome, reason, self._now.monotonic)
            self._commands += self.generation.ask_to_leave(drain)

    def _drain_limit_s(self) -> float:
        return self._grace_s if self._step > 0 else self._untrained_s

    def _interrupt(self, reason: str, code: int = errors.INTERRUPTED) -> None:
        """End the launch now, unless there is a verdict; `KILLED_BY_USER` still replaces the exit code of an interruption."""
        if self.verdict is None or (code == errors.KILLED_BY_USER and self.verdict.status == "interrupted"):
            self.verdict = self._interrupted(reason, code)

    # --- nodes ------------------------------------------------------------------------------------------

    def _node_ready(self, ready: NodeReady) -> None:
        if self.generation is not None and ready.node in self.generation.running:
            # The agent that ran its workers died unnoticed, and the new agent does not know them.
            self._lose_workers(
                ready.node, "agent_lost", f"the agent of {ready.node} was started again", also_alone=True
            )
        self._unchecked.pop(ready.node, None)  # this agent was not asked
        self._commands += self._nodes.join(ready, self._now.monotonic)

    def _node_leaving(self, node: str) -> None:
        """Have all workers exit after a step, since the node of some of them is about to be taken away."""
        if node not in self._nodes:
            return
        self._nodes.leave(node)
        if self.generation is None or node not in self.generation.nodes:
            self._let_go()
        elif self.generation.drain is None:
            self._drain("preempted", f"node {node} is leaving", ends=False)

    def _node_lost(self, node: str, failure_class: str, reason: str) -> None:
        self._commands += self._nodes.lose(node, reason)
        self._lose_workers(node, failure_class, reason)

    def _lose_workers(self, node: str, failure_class: str, reason: str, *, also_alone: bool = False) -> None:
        if self.generation is not None:
            self._commands += self.generation.lose(node, failure_class, reason, also_alone=also_alone)
            self._conclude(self.generation)

    def _agent_ended(self, node: str, end: AgentEnd) -> None:
        """Have the agent started again, if that may help; its workers have died with it."""
        if self.verdict is not None:
            return
        is_busy = self.generation is not None and node in self.generation.nodes
        error = f"the agent of {node} {end.cause}"
        self._nodes.note_agent_end(node, end)
        self._node_lost(node, end.failure_class, error)
        if not is_busy and self._nodes.are_enough:
            if would_end_again(self._nodes.unready_ends(node)):  # and there are enough other nodes
                self._do(ForgetAgent(node))
                return
        elif not is_busy:
            self._needed_agent_ended(node, end, error)
        if self.verdict is None:
            self._record(events.AGENT_RESTARTED, node=node, exit_code=end.exit_code, error=end.cause)
            self._do(StartAgent(node))

    def _needed_agent_ended(self, node: str, end: AgentEnd, error: str) -> None:
        """Charge the end of an agent that the next generation needs."""
        unready_ends = self._nodes.unready_ends(node)
        if would_end_again(unready_ends):
            error = f"the agent of {node} does not get ready, it {end.cause}\n{end.last_words}".rstrip()
        self._failed(Cause(end.failure_class, error, node), unready_ends=unready_ends)
        self._nodes.expect(node)

    def _let_go(self) -> None:
        """Release the nodes that asked to leave, once they run nothing."""
        self._commands += self._nodes.let_go(() if self.generation is None else self.generation.nodes)

    # --- generations ------------------------------------------------------------------------------------

    def _log_lines(self, lines: Sequence[EventRecord]) -> None:
        self._heard_at = self._now.monotonic
        number = 0 if self.generation is None else self.generation.number
        for line in lines:
            if line.get("generation", number) < number:
                continue  # from a node that was cut off: other nodes have done these steps again
            if line["event"] in {events.STEP, events.TRAINING_STARTED, events.TRAINING_FINISHED}:
                self._step, self._tells_steps = line["step"], True
            if line["event"] in {events.STEP, events.TRAINING_FIRST_STEP}:
                self._has_trained = True
            if self.generation is not None:
                self.generation.hear(line)

    def _workers_event(self, event: WorkersEvent) -> None:
        generation = self.generation
        # An event of an earlier generation says nothing about this one.
        if generation is not None and generation.number == event.generation:
            self._commands += generation.take(event, self._now.unix)
            if isinstance(event, WorkersStarted) and self._script is not None:
                self._script_started(generation, self._script)
            if isinstance(event, WorkersEnded):
                self._record_stuck(event)
            self._conclude(generation)

    def _record_stuck(self, ended: WorkersEnded) -> None:
        for worker in ended.workers:
            if worker.remains:
                self._record(
                    events.WORKER_STUCK,
                    rank=worker.rank,
                    node=ended.node,
                    pid=worker.pid,
                    state=worker.remains,
                )

    def _script_started(self, generation: Generation, script: str) -> None:
        """Record that the script runs, once it runs on all nodes."""
        if generation.workers.keys() != set(generation.nodes):
            return
        failed_at = self._failed_at
        since = None if failed_at is None else round(self._now.monotonic - failed_at, 3)
        self._record(events.SCRIPT_STARTED, script=script, seconds_since_failure=since)
        self._do(UpdateState({"script": script}))
        if self._has_script_run and not self._tells_steps and not self._has_told_anew:
            self._has_told_anew = True
            self._record(events.SCRIPT_BEGAN_ANEW, script=script)
        self._has_script_run = True

    def _conclude(self, generation: Generation) -> None:
        """Once no worker is left anywhere, decide why the generation ended and how the launch continues."""
        if not generation.is_over:
            return
        self.generation = None
        if generation.is_stopping and not generation.has_left_well:
            self._workers_killed(generation)
        else:
            self._workers_left(generation)
        self._let_go()

    def _workers_killed(self, generation: Generation) -> None:
        """Decide after all workers were killed: a worker or a node failed, or a drain was late."""
        cause = self._with_hint(generation.cause(), generation)
        if cause.failure is not None:
            self._record(events.WORKER_FAILED, **cause.failure.fields())
        age_s = cause.age_s(self._now, self._heard_at)
        self._record_end(cause.failure_class, cause.error, age_s)
        if generation.drain is not None and generation.drain.ends:
            who = "the agent died" if cause.failure is None else "a worker failed"
            self._settle(self._interrupted(f"{who} while draining: {cause.error}"))
            return
        if cause.failure is not None:
            if cause.failure.is_unfit_node and generation.step is None and self._continues_without(cause):
                return
            self._commands += self._nodes.note_failure(cause.node, cause.error)
        self._failed(cause, generation)

    def _with_hint(self, cause: Cause, generation: Generation) -> Cause:
        """Return *cause*; if a job's memory was full before its first step, with advice on how to shard the model."""
        if cause.failure_class != "oom" or self._has_trained or self._script is not None:
            return cause
        workers = [self._nodes.workers_of(node) for node in generation.nodes if node in self._nodes]
        what, hints = "the parameters, gradients and optimizer's state", []
        if (degree := next_degree(self._nodes.shard, workers)) is not None:
            hints.append(f"parallel.shard = {degree} leaves each worker 1/{degree} of {what}")
        # The CPU's memory may be the one that is full.
        if self._may_offload and class_of_device_error(cause.error) == "oom":
            hints.append(f'parallel.offload = "cpu" keeps {"them" if hints else what} in the CPU\'s memory')
        return replace(cause, error=f"{cause.error}\n  help: {'; '.join(hints)}") if hints else cause

    def _continues_without(self, cause: Cause) -> bool:
        """Leave out a node that lacks the devices on which the launch has trained, if enough others are there; charge nothing."""
        if not self._has_trained or not self._nodes.can_spare(cause.node):
            return False
        self._commands += self._nodes.exclude(cause.node, cause.error, until_it_joins=True)
        self._failed_at = self._failure_of(cause)
        self._formation.plan(cause.failure_class, self._now.monotonic, self._failed_at)
        return True

    def _workers_left(self, generation: Generation) -> None:
        """Decide after all workers exited with code 0: training has ended, or they were drained."""
        drain, stopped = generation.drain, generation.stopped
        has_ended = self._script is not None and drain is None and not generation.has_left
        # A script that never joined reports only its exit code.
        if generation.is_finished or (has_ended and generation.step is None):
            end = (
                "training reached its end" if generation.is_finished else "the script ended, with exit code 0"
            )
            reason = end if stopped is None else f"training was stopped by {stopped}"
            self._record_end("finished", reason)
            facts = {"step": self._step, "restarts": self._recovery.restarts, "stopped": stopped}
            self._settle(Verdict("finished", errors.FINISHED, events.RUN_FINISHED, facts))
            return
        if has_ended:
            cause = Cause("user_error", _LEFT_ITS_LOOP)
            self._record_end(cause.failure_class, cause.error)
            # It would end there again.
            self._settle_failed(cause)
            return
        outcome = "drained" if drain is None else drain.outcome
        how = "all workers left" if self._script is not None else "all workers left after the same step"
        self._record_end(outcome, how)
        if drain is None:  # someone else asked the workers to exit: the job continues
            # If this cost nothing, workers that exit without a single step could do so for ever.
            failure_class = "crash" if generation.step is None else "drained"
            self._failed(Cause(failure_class, "the workers left before training reached its end"), generation)
            return
        seconds = round(self._now.monotonic - drain.asked, 3)
        self._record(events.DRAIN_COMPLETED, step=self._step, seconds=seconds)
        if drain.ends:
            self._settle(self._interrupted(drain.reason))
        else:
            self._failed_at = None
            self._formation.plan(outcome, self._now.monotonic)

    # --- failures ---------------------------------------------------------------------------------------

    def _failed(
        self, cause: Cause, generation: Generation | None = None, unready_ends: tuple[str, ...] = ()
    ) -> None:
        """Charge a failure, after listing the snapshots if the decision needs them; arguments are those of `attempt_of`."""
        attempt = attempt_of(cause, generation, unready_ends, is_script=self._script is not None)
        if generation is None:  # else the end of the group is recorded
            node = cause.node or None
            facts = {"class": cause.failure_class, "error": cause.error, "node": node, "step": self._step}
            self._record(events.START_FAILED, **facts)
        suspects = () if generation is None else generation.suspects(cause)
        self._undecided = _Undecided(cause, attempt, self._failure_of(cause), suspects)
        if self._recovery.needs_snapshots(attempt):
            self._do(ListSnapshots())
        else:
            self._decide()

    def _failure_of(self, cause: Cause) -> float:
        """Return the monotonic time of a failure of which is heard now: the clock may be set before its successor trains."""
        return self._now.monotonic - max(0.0, self._now.unix - (cause.at or self._now.unix))

    def _decide(self, snapshots: Sequence[str] = ()) -> None:
        """Continue after the undecided failure, or give up."""
        assert self._undecided is not None, "a failure is to be decided"
        (cause, attempt, failed_at, suspects), self._undecided = self._undecided, None
        decision, commands = self._recovery.decide(attempt, snapshots, self._now.unix)
        self._commands += commands
        if decision.restart:
            self._failed_at = failed_at
            self._formation.plan(cause.failure_class, self._now.monotonic + decision.delay_s, failed_at)
            self._check_devices(suspects, attempt.generation)
        else:
            code = errors.BUDGET_SPENT if decision.spent else errors.ANSWER_IS_NO
            self._settle_failed(cause, code, decision.reason)

    def _check_devices(self, nodes: Sequence[str], generation: int) -> None:
        """Have the devices of *nodes* checked; the next generation waits until each result is there or late, or its node is gone."""
        present = tuple(node for node in nodes if node in self._nodes)
        if present:
            now = self._now.monotonic
            self._unchecked |= {node: now + self._longest_check_s(node) for node in present}
            self._do(CheckDevices(present, generation))

    def _devices_checked(self, found: DevicesChecked) -> None:
        """Leave out a node with a faulty device; end the launch if too few nodes are left."""
        self._unchecked.pop(found.node, None)
        self._record(
            events.DEVICES_CHECKED,
            node=found.node,
            devices=found.devices,
            faults=list(found.faults),
            notes=list(found.notes),
            reason=_in_words(found),
            seconds=found.seconds,
        )
        if not found.faults or found.node not in self._nodes:
            return
        faults = "; ".join(found.faults)
        self._commands += self._nodes.exclude(found.node, faults)
        if not self._nodes.are_enough:
            error = f"node {found.node} has a device that is not to be used: {faults}"
            why = f"without it {len(self._nodes)} nodes are left, of at least {self._nodes.least}"
            self._settle_failed(Cause("device", error, found.node), why=why)

    def _taken_over(self) -> None:
        """End this launch: another one has the run now, and continuing would take it away."""
        generation = self._formation.last_number + 1
        error = f"another launch of this run resumes from its snapshots: generation {generation}"
        self._settle_failed(Cause("taken_over", error))

    # --- commands -----------------------------------------------------------------------------

    def _settle(self, verdict: Verdict) -> None:
        """End the launch with *verdict*, if it is the first."""
        self.verdict = self.verdict or verdict

    def _interrupted(self, reason: str, code: int = errors.INTERRUPTED) -> Verdict:
        """Return the verdict that training did not reach its end; the same command continues."""
        return Verdict("interrupted", code, events.RUN_INTERRUPTED, {"reason": reason, "step": self._step})

    def _settle_failed(self, cause: Cause, code: int = errors.ANSWER_IS_NO, why: str | None = None) -> None:
        """End the launch, which failed because of *cause*; *why* is the reason for not trying again."""
        worker = cause.failure
        fields = {
            "class": cause.failure_class,
            "error": cause.error,
            "why": why,
            "rank": None if worker is None else worker.rank,
            "exit_code": None if worker is None else worker.exit_code,
            "step": self._step,
        }
        self._settle(Verdict("failed", code, events.RUN_FAILED, fields))

    def _record_end(self, outcome: str, reason: str, age_s: float | None = None) -> None:
        facts = {"class": outcome, "reason": reason, "step": self._step, "seconds_since_failure": age_s}
        self._record(events.GENERATION_ENDED, **facts)
        self._do(UpdateState({"workers": []}))

    def _record(self, event: Event, /, **fields: Any) -> None:
        self._do(RecordEvent(event, fields))

    def _do(self, command: Command) -> None:
        self._commands.append(command)


def _in_words(found: DevicesChecked) -> str:
    """Return the result of a check of devices in one line."""
    errors = (*found.faults, *found.notes)
    if not found.devices:
        return "; ".join(errors) or "torch sees no device"
    count = "1 device" if found.devices == 1 else f"{found.devices} devices"
    return "; ".join((f"{count} computed right in {found.seconds:.1f} s", *errors))
