"""The supervisor of a launch: one thread, one loop over messages, signals, the agent's life and the clock.

What follows from what happens is decided in `launcher/supervisor/lifecycle.py`; the files of the run are written by this process alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, assert_never

from elasticflow import errors, events
from elasticflow.errors import RendezvousError, RunFolderError
from elasticflow.launcher.journal.display_thread import Shown
from elasticflow.launcher.journal.environment_record import EnvironmentRecord
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.journal.metrics import Metrics
from elasticflow.launcher.restarts.restart_ledger import RestartLedger
from elasticflow.launcher.restarts.restart_policy import RestartPolicy
from elasticflow.launcher.restarts.restarts import Restarts
from elasticflow.launcher.restarts.snapshot_rollback import SnapshotRollback
from elasticflow.launcher.supervisor.agent_channel import AgentChannel
from elasticflow.launcher.supervisor.drains import UNTRAINED_S
from elasticflow.launcher.supervisor.formation import Formation
from elasticflow.launcher.supervisor.ingest import Ingest
from elasticflow.launcher.supervisor.leave_requests import LeaveRequests
from elasticflow.launcher.supervisor.lifecycle import Lifecycle
from elasticflow.launcher.supervisor.local_agents import LocalAgents
from elasticflow.launcher.supervisor.nodes import Node, Nodes
from elasticflow.protocol.messages import (
    AgentDied,
    LogLines,
    NodeLeaving,
    NodeReady,
    ProcessLeftBehind,
    Stacks,
    Standstill,
    WorkersEnded,
    WorkersStarted,
    WriterReports,
)
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.run_folder import step_of
from elasticflow.snapshots.writer.committer import FENCED

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.supervisor.launch_record import Launch
    from elasticflow.launcher.supervisor.outcomes import Verdict
    from elasticflow.protocol.messages import Message

_POLL_S = 0.01
_NOTICE_S = 2.0  # of machines that joined, to read the exit code
_LEAVE_S = 5.0  # of agents that have nothing to wait for


class Supervisor:
    """Runs one launch to its verdict."""

    def __init__(self, launch: Launch, show: Callable[[dict[str, Any]], None]) -> None:
        self._launch = launch
        self._shown = Shown(show)
        self._journal = Journal(launch.folder, launch.number, self._shown)
        self._metrics = Metrics(launch.folder)
        self._environment = EnvironmentRecord(launch.folder.launch(launch.number))
        self._ingest = Ingest(self._journal, self._metrics, self._environment)
        self._agents = LocalAgents(launch.agent, launch.scale, self._journal, launch.folder)
        self._nodes = Nodes(launch.plan.nodes_min, launch.plan.nodes_max)
        self._asked = LeaveRequests()

    def run(self) -> int:
        """Return the exit code once the launch has ended; nothing of its process tree lives afterwards.

        Raises:
            RunFolderError: what happens cannot be written down any more, so the launch was ended.
            RendezvousError: who serves the launch's keys did not answer when it began.
        """
        try:
            code = self._lead()
        except OSError as error:
            self._shown.close()
            while isinstance(error.__context__, OSError):  # what came first; the files fail to be closed, too
                error = error.__context__
            place = error.filename or self._launch.folder.path
            raise RunFolderError(
                f"the launch ended, since it cannot use {place}: {os.strerror(error.errno or 0)}",
                "once there is room again and the run folder is there, the same command goes on from the newest snapshot",
            ) from error
        if not self._shown.close():
            os._exit(code)  # nobody reads our standard output, and its last flush would wait for ever, too
        return code

    def _lead(self) -> int:
        with contextlib.ExitStack() as at_end:  # last first, and each even if another one fails
            for number, handler in self._asked.listen().items():
                at_end.callback(signal.signal, number, handler)
            for end in (self._journal.close, self._environment.close, self._metrics.close, self._agents.end):
                at_end.callback(end)
            self._announce()
            for node in self._agents.begin():
                self._nodes.expect(node)
            channel = self._open()
            lifecycle = self._lifecycle(channel)
            try:
                while lifecycle.verdict is None:
                    self._turn(channel, lifecycle)
                    time.sleep(_POLL_S)
            except StoreLostError as error:
                return self._end_without_store(lifecycle, str(error))
            return self._close(channel, lifecycle, lifecycle.verdict)

    def _open(self) -> AgentChannel:
        try:
            channel = AgentChannel(self._launch.store.connect())
            channel.invite(self._launch.invitation())
        except StoreLostError as error:
            raise RendezvousError(str(error), "once it answers again, the same command goes on") from error
        return channel

    def _announce(self) -> None:
        launch = self._launch
        self._journal.event(
            events.RUN_STARTED,
            launch=launch.number,
            resumed=launch.is_resumed,
            pid=os.getpid(),
            torch=version("torch"),
            uri=launch.catalog.storage.uri,
            endpoint=launch.store.endpoint,
        )
        if launch.lost is not None:
            self._journal.event(
                events.SUPERVISOR_LOST,
                launch=launch.number - 1,
                step=max(self._journal.state["step"], self._metrics.last_step()),
                **asdict(launch.lost),
            )
        for damage in (self._journal.damage, self._metrics.damage):
            if damage is not None:
                self._journal.event(events.RECORD_DAMAGED, path=damage.place, reason=damage.why)
        if launch.is_edited:
            self._journal.event(
                events.ENTRY_POINT_EDITED, path=str(launch.folder.launch(launch.number) / "train.py")
            )
        if launch.drift:
            differences = [each.to_json() for each in launch.drift]
            self._journal.event(events.DRIFT_FOUND, launch=launch.number, differences=differences)
        self._journal.write_state()

    def _lifecycle(self, channel: AgentChannel) -> Lifecycle:
        launch, plan = self._launch, self._launch.plan.restarts
        ledger = RestartLedger(launch.folder.ledger)
        rollback = SnapshotRollback(launch.catalog, self._journal)
        restarts = Restarts(self._journal, RestartPolicy(plan), ledger, rollback)
        first = "resume" if launch.is_resumed else "start"
        claim = partial(launch.claim, ledger=ledger)
        formation = Formation(self._journal, self._nodes, channel, claim, first)
        # What is held in memory may be ahead of the store, also before anything is trained.
        untrained_s = UNTRAINED_S if launch.plan.snapshots.memory is None else plan.grace_s
        return Lifecycle(self._journal, restarts, channel, self._nodes, formation, plan.grace_s, untrained_s)

    def _turn(self, channel: AgentChannel, lifecycle: Lifecycle) -> None:
        for message in channel.take():
            self._hear(message, lifecycle)
        self._look_at_signals(lifecycle)
        self._agents.turn(lifecycle)
        for node in channel.silent_nodes():
            if not self._agents.kill(node):  # one of ours hangs or was stopped: seen to at the next turn
                lifecycle.node_lost(node, "node_lost", "it has given no sign of life")
        lifecycle.time_passed()

    def _hear(self, message: Message, lifecycle: Lifecycle) -> None:
        match message:
            case NodeReady():
                node = Node(message.node, message.host, message.nproc, message.node_rank)
                lifecycle.node_joined(node, message.refused)
            case AgentDied():
                lifecycle.node_lost(message.node, "agent_lost", message.error)
            case NodeLeaving():
                lifecycle.node_leaving(message.node)
            case WorkersStarted():
                workers = [asdict(worker) for worker in lifecycle.workers_started(message)]
                self._journal.update(at_once=True, workers=workers)
            case LogLines() | WriterReports() | ProcessLeftBehind():
                self._take_in(message, lifecycle)
            case Standstill():
                lifecycle.hangs.standstill(message, lifecycle.generation)
            case Stacks():
                lifecycle.hangs.stacks(message, lifecycle.generation)
            case WorkersEnded():
                lifecycle.group_ended(message)
            case _:
                assert_never(message)

    def _take_in(self, message: LogLines | WriterReports | ProcessLeftBehind, lifecycle: Lifecycle) -> None:
        """Take in a message that tells, as against those that ask for a decision."""
        match message:
            case LogLines():
                self._journal.update(held=message.held)
                self._ingest.lines(message.lines, lifecycle.generation)
            case WriterReports():
                fenced = [r["generation"] for r in message.reports if r.get("reason") == FENCED]
                self._ingest.reports(message.reports)
                for generation in fenced:
                    lifecycle.fenced(generation)
            case ProcessLeftBehind():
                self._journal.event(events.PROCESS_LEFT_BEHIND, **asdict(message))
            case _:
                assert_never(message)

    def _look_at_signals(self, lifecycle: Lifecycle) -> None:
        if len(self._asked.numbers) > 1:
            lifecycle.interrupt("a second signal", errors.KILLED_BY_USER)
        elif self._asked.numbers and not lifecycle.is_leaving and lifecycle.verdict is None:
            lifecycle.asked_to_leave(signal.Signals(self._asked.numbers[0]).name)

    def _see_off(self, lifecycle: Lifecycle, verdict: Verdict) -> Verdict:
        """Return once the agents have left, whose writers may still be writing a snapshot; a signal cuts that short."""
        asked = 1 if verdict.status == "interrupted" else 0  # signals that led to the verdict
        grace_s = self._launch.plan.restarts.grace_s
        began = time.monotonic()
        deadline = max(began + _LEAVE_S, (self._asked.first_at or began) + grace_s)
        while not self._agents.are_gone and time.monotonic() < deadline:
            if len(self._asked.numbers) > asked:
                if verdict.exit_code == errors.INTERRUPTED:
                    lifecycle.interrupt("a second signal", errors.KILLED_BY_USER)
                return lifecycle.verdict or verdict
            time.sleep(_POLL_S)
        return verdict

    def _close(self, channel: AgentChannel, lifecycle: Lifecycle, verdict: Verdict) -> int:
        """End the agents, take in what they still have to say, and write the verdict."""
        self._launch.store.outlive_store()
        # What others are told and say is lost with the store; how the launch ended is not.
        with contextlib.suppress(StoreLostError):
            channel.stop(verdict.exit_code)
        if lifecycle.is_idle:
            verdict = self._see_off(lifecycle, verdict)
        self._agents.end()
        with contextlib.suppress(StoreLostError):
            channel.await_notice(self._agents.nodes, _NOTICE_S)
            for message in channel.take():
                if isinstance(message, LogLines | WriterReports | ProcessLeftBehind):
                    self._take_in(message, lifecycle)
        return self._conclude(verdict)

    def _end_without_store(self, lifecycle: Lifecycle, error: str) -> int:
        """End the agents, whose store has gone, and write the verdict."""
        self._agents.end()
        lifecycle.interrupt(f"the store at {self._launch.store.endpoint} is lost: {error}")
        assert lifecycle.verdict is not None
        return self._conclude(lifecycle.verdict)

    def _conclude(self, verdict: Verdict) -> int:
        fields = {**verdict.fields, **self._journal.durations.figures()}
        if verdict.status == "finished" and (left := self._agents.not_reached):
            changes = [str(change) for change in left]
            self._journal.event(events.SCALE_NOT_REACHED, changes=changes, seconds=fields["seconds"])
        if verdict.status == "interrupted":  # the writer has told of its last snapshot by now
            fields["goes_on_from"] = step_of(self._journal.state["snapshot"])
        figures = {"exit_code": verdict.exit_code, "event": verdict.event, **fields}
        self._journal.update(status=verdict.status, workers=[], verdict=figures)
        self._journal.event(verdict.event, **fields)
        return verdict.exit_code
