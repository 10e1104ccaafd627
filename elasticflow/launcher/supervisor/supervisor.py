"""The supervisor of a launch: one thread, one loop over messages, signals, agents' lives and the clock.

It passes events to the lifecycle, which answers with commands (`lifecycle.py`), and runs these (`command_runner.py`).
The files of the run are written by this process alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

from elasticflow import errors, events
from elasticflow.errors import RendezvousError, RunFolderError, RunTakenError
from elasticflow.events import SCHEMA_VERSION
from elasticflow.launcher.journal.display_thread import DisplayThread
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.journal.metrics import Metrics
from elasticflow.launcher.journal.post_mortem import ending_of
from elasticflow.launcher.restarts.restart_policy import RestartPolicy
from elasticflow.launcher.supervisor.agent_channel import AgentChannel
from elasticflow.launcher.supervisor.command_runner import CommandRunner
from elasticflow.launcher.supervisor.commands import (
    Instant,
    Interrupted,
    LeaveAsked,
    NodeLost,
    RunTakenOver,
    SnapshotFenced,
    TimePassed,
)
from elasticflow.launcher.supervisor.follower import Follower
from elasticflow.launcher.supervisor.ingest import EnvironmentRecord, Ingest
from elasticflow.launcher.supervisor.leave_requests import NOW, CancelMark, Hurry, LeaveRequests
from elasticflow.launcher.supervisor.lifecycle import UNTRAINED_S, Lifecycle, RunSoFar
from elasticflow.launcher.supervisor.local_agents import LocalAgents
from elasticflow.launcher.supervisor.nodes import Nodes
from elasticflow.launcher.supervisor.profiles import Profiles
from elasticflow.launcher.supervisor.remote_files import RemoteFiles
from elasticflow.protocol.handshake import TOKEN
from elasticflow.protocol.messages import (
    Activity,
    FilePiece,
    FilesSent,
    LogLines,
    NodeFigures,
    NodeReady,
    NodeReports,
    Printed,
    Warned,
)
from elasticflow.protocol.run_files import told_command
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.run_folder import step_of
from elasticflow.snapshots.client.messages import FENCED
from elasticflow.storage.storage import FULL
from elasticflow.system.masking import mask_of
from elasticflow.system.units import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.events import EventRecord
    from elasticflow.launcher.supervisor.commands import LifecycleEvent, Verdict
    from elasticflow.launcher.supervisor.launch_record import Launch
    from elasticflow.protocol.messages import Message

_POLL_S = 0.01
# Seconds that joined machines have to read the exit code.
_NOTICE_S = 2.0
# Seconds that agents with nothing to wait for have to exit.
_LEAVE_S = 5.0
_CANCELLED = "elasticflow cancel"
_SECOND_SIGNAL = Interrupted("a second signal", errors.KILLED_BY_USER)


class Supervisor:
    """Runs one launch to its verdict."""

    def __init__(
        self, launch: Launch, show: Callable[[EventRecord], None], tick: Callable[[], None] | None = None
    ) -> None:
        self._launch = launch
        self._display = DisplayThread(show, tick)
        plan = launch.plan
        token = {TOKEN: launch.store.address.token}
        addresses = (
            frozenset() if launch.request.job.notify is None else launch.request.job.notify.variables()
        )
        self._mask = mask_of({**os.environ, **plan.env, **token}, {*plan.env_secrets, *addresses})
        require_held = launch.lock.require_held
        self._journal = Journal(launch.request.folder, launch.number, self._display, self._mask, require_held)
        self._metrics = Metrics(launch.request.folder, require_held)
        self._environment = EnvironmentRecord(launch.launch_folder)
        self._ingest = Ingest(self._journal, self._metrics, self._environment)
        self._agents = LocalAgents(launch, self._journal)
        self._remote_files = RemoteFiles(launch.request.folder)
        self._follower = Follower(launch.request.follower, launch.request.folder, self._journal)
        self._profiles = Profiles(launch.request.folder, self._journal)
        self._nodes = Nodes(launch.plan.nodes_min, launch.plan.nodes_max, launch.plan.shard)
        self._lifecycle = self._first_lifecycle()
        self._asked = LeaveRequests()
        # Signals that had come when they were looked at last, before the verdict.
        self._heeded = 0
        self._cancel = CancelMark(launch.request.folder.cancel)
        self._began = time.monotonic()
        time_limit = None if launch.request.job.script is not None else launch.request.job.train.time_limit
        self._time_limit_s = math.inf if time_limit is None else parse_duration(time_limit)

    def run(self) -> int:
        """Return the exit code once the launch has ended; nothing of its process tree lives afterwards.

        Raises:
            RunFolderError: events cannot be recorded any more, so the launch was ended.
            RunTakenError: the run's lock is not the one that this launch holds, so the launch was ended.
            RendezvousError: the server of the launch's keys did not answer at the start.
        """
        try:
            code = self._lead()
        except RunTakenError:
            self._display.close()
            raise
        except OSError as error:
            self._display.close()
            # The first error is the cause: the files fail to be closed, too.
            while isinstance(error.__context__, OSError):
                error = error.__context__
            if error.errno in FULL:
                with contextlib.suppress(OSError, RunTakenError):
                    self._journal.note_full_disk()
            path = error.filename or self._launch.request.folder.path
            raise RunFolderError(
                f"the launch ended, since it cannot use {path}: {os.strerror(error.errno or 0)}",
                "once there is room again and the run folder is there, the same command resumes from the newest snapshot",
            ) from error
        if not self._display.close():
            # No one reads our standard output: its last flush would wait for ever, too.
            os._exit(code)
        return code

    def _lead(self) -> int:
        with contextlib.ExitStack() as at_end:
            for number, handler in self._asked.listen().items():
                at_end.callback(signal.signal, number, handler)
            ends = (self._journal, self._environment, self._metrics)
            for end in (*(each.close for each in ends), self._follower.end, self._agents.end):
                at_end.callback(end)
            self._announce()
            for node in self._agents.begin():
                self._nodes.expect(node)
            channel = self._open()
            tell = partial(self._tell, CommandRunner(self._launch, self._journal, channel, self._agents))
            try:
                while self._lifecycle.verdict is None:
                    self._turn(channel, tell)
                    time.sleep(_POLL_S)
            except StoreLostError as error:
                return self._end_without_store(tell, str(error))
            return self._close(channel, tell, self._lifecycle.verdict)

    def _tell(self, runner: CommandRunner, event: LifecycleEvent) -> None:
        """Pass *event* to the lifecycle, carry out its commands, and pass on their answers."""
        pending: deque[LifecycleEvent] = deque([event])
        while pending:
            now = Instant(time.monotonic(), time.time())
            for command in self._lifecycle.on(pending.popleft(), now):
                if (answer := runner.run(command)) is not None:
                    pending.append(answer)

    def _open(self) -> AgentChannel:
        try:
            channel = AgentChannel(self._launch.store.connect())
            channel.invite(self._launch.invitation())
        except StoreLostError as error:
            raise RendezvousError(
                str(error), "once it answers again, the same command resumes the run"
            ) from error
        return channel

    def _first_lifecycle(self) -> Lifecycle:
        plan, state = self._launch.plan, self._journal.state
        run = RunSoFar(
            step=state["step"],
            restarts=state["restarts"],
            ledger=tuple(self._launch.ledger.entries),
            is_resumed=self._launch.is_resumed,
        )
        # Memory may be ahead of the store, also before the first step.
        untrained_s = plan.restarts.grace_s if plan.snapshots.is_held_at_interval else UNTRAINED_S
        script = None if plan.script is None else plan.script.shown
        self._journal.state["script"] = script
        parallel = self._launch.request.job.parallel
        may_offload = parallel is not None and parallel.offload is None
        return Lifecycle(plan.restarts, self._nodes, run, untrained_s, script=script, may_offload=may_offload)

    def _announce(self) -> None:
        launch = self._launch
        # Its state is replaced from here on.
        lost = ending_of(launch.request.folder)
        self._journal.event(
            events.RUN_STARTED,
            launch=launch.number,
            resumed=launch.is_resumed,
            pid=os.getpid(),
            torch=version("torch"),
            uri=launch.catalog.storage.uri,
            endpoint=launch.store.endpoint,
            resume_command=told_command(),
            schema=SCHEMA_VERSION,
        )
        if lost is not None:
            self._journal.event(
                events.SUPERVISOR_LOST,
                launch=launch.number - 1,
                step=max(self._journal.state["step"], self._metrics.last_step()),
                **asdict(lost),
            )
        for damage in (self._journal.damage, self._metrics.damage):
            if damage is not None:
                self._journal.event(events.RECORD_DAMAGED, path=damage.place, reason=damage.why)
        if launch.is_edited:
            self._journal.event(events.ENTRY_POINT_EDITED, path=str(launch.launch_folder / "train.py"))
        if launch.drift:
            differences = [difference.to_json() for difference in launch.drift]
            self._journal.event(events.DRIFT_FOUND, launch=launch.number, differences=differences)
        left = RestartPolicy(launch.plan.restarts).left(self._launch.ledger.entries, time.time())
        epochs = None if launch.request.job.script is not None else launch.request.job.train.epochs
        self._journal.know(epochs=epochs, budget_left=left, resume_command=told_command())

    def _turn(self, channel: AgentChannel, tell: Callable[[LifecycleEvent], None]) -> None:
        self._launch.lock.require_held()
        for message in channel.take():
            self._hear(message, tell)
        self._look_at_signals(tell)
        self._agents.turn(self._lifecycle, tell)
        self._follower.turn(time.monotonic())
        self._profiles.turn(time.monotonic(), channel.request_profile)
        self._remote_files.turn(channel, time.monotonic())
        if (refused := self._launch.store.refused()) is not None:
            self._journal.event(events.CONNECTION_REFUSED, **asdict(refused))
        for node in channel.silent_nodes():
            # An agent of this machine that hangs or was stopped: its end is seen at the next turn.
            if not self._agents.kill(node):
                tell(NodeLost(node, "node_lost", "it has given no sign of life"))
        tell(TimePassed())
        self._journal.turn()

    def _hear(self, message: Message, tell: Callable[[LifecycleEvent], None]) -> None:
        """Record *message*, and pass on the events that the lifecycle needs."""
        match message:
            case LogLines():
                self._journal.update(held=message.held)
                self._ingest.lines(message.lines)
                self._profiles.heard(message.lines)
                tell(message)
            case NodeReports():
                self._ingest.reports(message.reports)
                for report in message.reports:
                    if report.get("reason") == FENCED:
                        tell(SnapshotFenced(report["generation"]))
            case Activity() | Printed() | Warned():
                self._journal.hear(message)
            case NodeFigures():
                self._ingest.figures(message)
            case FilePiece() | FilesSent() | NodeReady():
                self._remote_files.hear(message)
                if isinstance(message, NodeReady):
                    tell(message)
            case _:
                tell(message)

    def _hear_last(self, message: Message, tell: Callable[[LifecycleEvent], None]) -> None:
        """Take in the messages that still matter once the launch has its verdict."""
        last = LogLines | Printed | Warned | NodeReports | FilePiece | FilesSent
        if isinstance(message, last):
            self._hear(message, tell)

    def _look_at_signals(self, tell: Callable[[LifecycleEvent], None]) -> None:
        if self._lifecycle.verdict is None:
            self._heeded = len(self._asked.numbers)
        if len(self._asked.numbers) > 1:
            tell(_SECOND_SIGNAL)
        elif self._asked.numbers and not self._lifecycle.is_leaving and self._lifecycle.verdict is None:
            tell(LeaveAsked(signal.Signals(self._asked.numbers[0]).name))
        elif self._lifecycle.verdict is None and (asked := self._cancel.look(time.monotonic())) is not None:
            if asked == NOW:
                tell(Interrupted(_CANCELLED, errors.KILLED_BY_USER))
            elif not self._lifecycle.is_leaving:
                tell(LeaveAsked(_CANCELLED))
        elif (
            time.monotonic() - self._began >= self._time_limit_s
            and self._lifecycle.verdict is None
            and not self._lifecycle.is_leaving
        ):
            self._time_limit_s = math.inf  # it asks once
            tell(LeaveAsked(f"train.time_limit of {self._launch.request.job.train.time_limit}"))

    def _see_off(
        self, tell: Callable[[LifecycleEvent], None], verdict: Verdict, is_hurried: Callable[[], bool]
    ) -> Verdict:
        """Wait for the agents to exit, whose writers may still be writing a snapshot; return the verdict.

        A request that comes meanwhile cuts the wait short, and may change the verdict.
        """
        grace_s = self._launch.plan.restarts.grace_s
        began = time.monotonic()
        deadline = max(began + _LEAVE_S, (self._asked.first_at or began) + grace_s)
        while not self._agents.are_gone and time.monotonic() < deadline:
            if is_hurried():
                if verdict.exit_code == errors.INTERRUPTED:
                    tell(_SECOND_SIGNAL)
                return self._lifecycle.verdict or verdict
            time.sleep(_POLL_S)
        return verdict

    def _close(self, channel: AgentChannel, tell: Callable[[LifecycleEvent], None], verdict: Verdict) -> int:
        """End the agents, take in their last messages, and write the verdict."""
        is_hurried = Hurry(self._asked, self._cancel, self._heeded)
        self._launch.store.outlive_store()
        if self._lifecycle.is_idle:
            with contextlib.suppress(StoreLostError):
                for generation in (*self._metrics.missing_of, self._journal.generation):
                    self._remote_files.gather_last(
                        channel, generation, lambda message: self._hear_last(message, tell), is_hurried
                    )
            self._metrics.complete()
        # This process may have been stopped since: the launch that follows ends the run.
        if verdict.status != "interrupted" and self._launch.store.is_led_anew():
            tell(RunTakenOver())
            verdict = self._lifecycle.verdict or verdict
        # Messages from and to others are lost with the store; how the launch ended is not.
        with contextlib.suppress(StoreLostError):
            if (running := self._lifecycle.generation) is not None:  # on other machines, too
                channel.request("stop", running.number)
            channel.stop(verdict.exit_code, is_cancelled=self._launch.request.folder.cancel.exists())
        if self._lifecycle.is_idle:
            verdict = self._see_off(tell, verdict, is_hurried)
        self._agents.end()
        with contextlib.suppress(StoreLostError):
            channel.await_notice(self._agents.nodes, _NOTICE_S)
            for message in channel.take():
                self._hear_last(message, tell)
        return self._conclude(verdict)

    def _end_without_store(self, tell: Callable[[LifecycleEvent], None], error: str) -> int:
        """End the agents, whose store has gone, and write the verdict."""
        self._agents.end()
        tell(Interrupted(f"the store at {self._launch.store.endpoint} is lost: {error}"))
        assert self._lifecycle.verdict is not None
        return self._conclude(self._lifecycle.verdict)

    def _conclude(self, verdict: Verdict) -> int:
        self._profiles.give_up("the launch ended")
        self._journal.tell_warnings()
        fields = {**verdict.fields, **self._journal.durations.figures()}
        if verdict.status == "finished" and (left := self._agents.not_reached):
            changes = [str(change) for change in left]
            self._journal.event(events.SCALE_NOT_REACHED, changes=changes, seconds=fields["seconds"])
        if verdict.status == "interrupted":
            # The writer has reported its last snapshot by now.
            fields["goes_on_from"] = step_of(self._journal.state["snapshot"])
        # For a failure, `exit_code` is the worker's.
        figures = {
            "exit_code": verdict.exit_code,
            "ends_with": verdict.exit_code,
            "event": verdict.event,
            **fields,
        }
        self._journal.update(status=verdict.status, workers=[], verdict=self._mask.value(figures))
        self._journal.event(verdict.event, **fields)
        asked = len(self._asked.numbers)
        self._follower.finish(lambda: len(self._asked.numbers) > asked)
        return verdict.exit_code
