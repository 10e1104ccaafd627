"""An agent's reports to the supervisor about a generation: its workers, their lines and the writer's, and their ends."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.agent import stack_dumps
from elasticflow.launcher.agent.printed import RankPrints
from elasticflow.launcher.agent.rank_logs import RankLog, StderrWarnings
from elasticflow.launcher.journal.warning_tally import WarningTally
from elasticflow.protocol.messages import (
    Activity,
    LogLines,
    NodeFigures,
    NodeReports,
    Printed,
    Stacks,
    StalledWorker,
    Standstill,
    StartedWorker,
    Warned,
    WorkersEnded,
    WorkersStarted,
    report,
)
from elasticflow.system.process_record import ProcessRecord
from elasticflow.system.processes import STOPPED, STOPPED_S

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from elasticflow.events import EventRecord
    from elasticflow.launcher.agent.flight_recorder import FlightRecorder
    from elasticflow.launcher.agent.worker_heartbeats import WorkerHeartbeats
    from elasticflow.launcher.agent.workers import ForkedWorkers
    from elasticflow.launcher.rendezvous.supervisor_channel import Outbox
    from elasticflow.protocol.messages import WorkerEnd
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.client.writer_process import WriterProcess

# Lines in one message, so that none is large.
_MOST_LINES = 20
# Shorter activities are not reported.
_MOMENT_S = 0.8
_LOOK_S = 0.2
# Each worker writes its figures every few seconds.
_FIGURES_S = 1.0
# Each message costs agent and supervisor more than a line in it: those of several short steps travel together.
_FORWARD_S = 0.1


class Reporter:
    """Posts to *outbox* on behalf of *node*; *compiles*: its workers compile their model."""

    def __init__(
        self,
        outbox: Outbox,
        node: str,
        folder: RunFolder,
        writer: WriterProcess,
        heartbeats: WorkerHeartbeats,
        *,
        compiles: bool = False,
    ) -> None:
        self._compiles = compiles
        self._outbox, self._node, self._folder = outbox, node, folder
        self._writer, self._heartbeats = writer, heartbeats
        self._generation = 0
        self._ranks: Mapping[int, int] = {}
        self._logs: dict[int, RankLog] = {}
        self._stderrs: dict[int, StderrWarnings] = {}
        self._tally = WarningTally()
        self._prints: RankPrints | None = None
        self._told = Activity(node, "")  # the last activity, without its seconds
        self._looked = self._forwarded = self._figures_at = 0.0
        self._windows: list[int] = []

    def started(self, generation: int, ranks: Mapping[int, int], pids: Mapping[int, int]) -> None:
        """Report that workers of *generation* have started, and follow their logs; *ranks* and *pids* are by local rank."""
        self._generation, self._ranks, self._windows = generation, ranks, []
        self._logs = {rank: RankLog(self._folder, generation, rank) for rank in ranks.values()}
        self._stderrs = {
            rank: StderrWarnings(self._folder.rank_log(generation, rank, "stderr")) for rank in ranks.values()
        }
        self._prints = RankPrints(self._folder, generation, time.monotonic) if 0 in ranks.values() else None
        workers = tuple(
            StartedWorker(rank, node=self._node, **ProcessRecord.of(pids[local]).to_json())
            for local, rank in ranks.items()
        )
        self._outbox.post(WorkersStarted(generation, self._node, workers))

    def look(self) -> None:
        """Pass on new lines and reports, as `forward` does; lines ten times a second at most, unless the writer reports."""
        reports = self._writer.reports()
        if reports or time.monotonic() >= self._forwarded + _FORWARD_S:
            self._forward(reports)

    def forward(self) -> None:
        """Pass on new lines of the rank logs, then the writer's reports."""
        self._forward(self._writer.reports())

    def _forward(self, reports: Sequence[EventRecord]) -> None:
        self._forwarded = time.monotonic()
        lines = [line for log in self._logs.values() for line in log.lines()]
        for first in range(0, len(lines), _MOST_LINES):
            piece = tuple(lines[first : first + _MOST_LINES])
            self._outbox.post(LogLines(piece, self._heartbeats.held()))
        if reports:
            self._outbox.post(NodeReports(tuple(reports)))
        self._count_warnings()
        if self._prints is not None:
            self._post_printed(self._prints, has_failed=None)

    def _count_warnings(self) -> None:
        for rank, log in self._logs.items():
            for found in (*log.warnings(), *self._stderrs[rank].take()):
                warned = Warned(self._node, rank, self._generation, *found)
                if (told := self._tally.add(warned)) is not None:
                    self._outbox.post(told)

    def _post_printed(self, prints: RankPrints, *, has_failed: bool | None) -> None:
        lines, left_out = prints.take() if has_failed is None else prints.end(has_failed=has_failed)
        if lines or left_out:
            self._outbox.post(Printed(self._generation, tuple(lines), left_out))

    def activity(self, exits: Mapping[int, tuple[int, float]]) -> None:
        """Report the node's activity once it has lasted for longer than a moment, and its end.

        Args:
            exits: Exit code and Unix time of each local rank that has ended.
        """
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        activity = self._activity(exits)
        if replace(activity, seconds=0.0) != self._told:
            self._told = replace(activity, seconds=0.0)
            self._outbox.post(activity)

    def _activity(self, exits: Mapping[int, tuple[int, float]]) -> Activity:
        left = [rank for local, rank in self._ranks.items() if local not in exits]
        if exits and left:
            seconds = time.time() - max(at for _, at in exits.values())
            if seconds >= _MOMENT_S:
                ended = [self._ranks[local] for local in exits]
                return Activity.of_peers(self._node, "rank", left, ended, seconds)
        awaited = self._heartbeats.awaited()
        if awaited is None or awaited.seconds < _MOMENT_S:
            return Activity(self._node, "")
        subject = "torch.compile" if self._compiles and awaited.phase == "compile" else ""
        return Activity(self._node, awaited.phase, subject, awaited.step, round(awaited.seconds, 3))

    def figures(self) -> None:
        """Report the workers' figures once each of them has written new ones."""
        now = time.monotonic()
        if now < self._figures_at + _FIGURES_S:
            return
        self._figures_at = now
        ranks = self._heartbeats.figures(self._ranks)
        windows = [each.windows for each in ranks]
        if len(ranks) == len(self._ranks) and all(
            new > old for new, old in zip(windows, self._windows or [0] * len(windows), strict=True)
        ):
            self._windows = windows
            self._outbox.post(NodeFigures(self._generation, self._node, ranks))

    def standstill(self, *, is_so: bool, is_one_stopped: bool) -> None:
        """Report that workers of the node have made no progress for too long, or that one makes progress again."""
        self._outbox.post(
            Standstill(self._generation, self._node, is_so=is_so, is_one_stopped=is_one_stopped)
        )

    def stacks(self, workers: ForkedWorkers, recorder: FlightRecorder) -> None:
        """Report the stack of each living worker, and the dump of its flight recorder if it has one.

        The workers write their stacks to their standard errors.
        """
        asked = time.monotonic()
        dumps = recorder.ask(self._ranks[local_rank] for local_rank in workers.left())
        stalled = self.stalled(workers)
        recorder.await_dumps(dumps.values(), asked)
        written = {rank: str(path) for rank, path in dumps.items() if path.exists()}
        if not any(worker.state == STOPPED for worker in stalled):
            self._heartbeats.allow_as_long()
        stalled = tuple(replace(worker, dump=written.get(worker.rank, "")) for worker in stalled)
        self._outbox.post(Stacks(self._generation, self._node, stalled))

    def stalled(self, workers: ForkedWorkers) -> tuple[StalledWorker, ...]:
        """Return where each living worker stands."""
        stacks = stack_dumps.collect(workers.left(), workers.streams.stderrs)
        return tuple(
            StalledWorker(
                node=self._node,
                rank=self._ranks[progress.local_rank],
                phase=progress.phase,
                step=progress.step,
                seconds=round(progress.seconds, 1),
                limit_s=STOPPED_S if stack.state == STOPPED else round(progress.limit_s, 1),
                log=str(workers.streams.stderrs[progress.local_rank]),
                **stack._asdict(),
            )
            for progress in self._heartbeats.progress()
            if (stack := stacks.get(progress.local_rank)) is not None
        )

    def lingered(self, workers: Iterable[StalledWorker]) -> None:
        """Report that workers are ended which stayed though their peers had ended well."""
        for worker in workers:
            frames = tuple(map(str, worker.frames))
            where = (
                f"it was at {frames[0]}" if frames else "it was in no Python code, as at the end of a process"
            )
            lingered = report(
                events.WORKER_LINGERED,
                node=self._node,
                rank=worker.rank,
                seconds=worker.seconds,
                reason=where,
                frames=frames,
                stacks=worker.log,
            )
            self._outbox.post(NodeReports((lingered,)))

    def ended(self, workers: ForkedWorkers, alone: Container[int], *, failed: bool) -> None:
        """Report that no worker is left; the local ranks in *alone* ended by themselves."""
        self.forward()
        for rank, log in self._logs.items():
            log.close()
            self._stderrs[rank].close()
        self._logs, self._stderrs = {}, {}
        for warned in self._tally.rest():
            self._outbox.post(warned)
        if self._prints is not None:
            self._post_printed(self._prints, has_failed=failed)
            self._prints = None
        self._told = Activity(self._node, "")
        self._post_ended(self._generation, workers.ends(self._ranks, alone), failed=failed)

    def never_started(self, generation: int) -> None:
        """Report that no worker of *generation* is here: it was stopped before any had started."""
        self._post_ended(generation, (), failed=False)

    def _post_ended(self, generation: int, ends: tuple[WorkerEnd, ...], *, failed: bool) -> None:
        ended = WorkersEnded(generation, self._node, failed=failed, workers=ends, sent_at=time.time())
        self._outbox.post(ended)
