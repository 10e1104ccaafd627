"""What an agent tells the supervisor of one generation: its workers, what they and the writer say, how they end."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from elasticflow.launcher.agent import stack_dumps
from elasticflow.launcher.agent.rank_logs import RankLog

if TYPE_CHECKING:
    from elasticflow.launcher.agent.orphans import EndedOrphan
    from elasticflow.launcher.agent.worker_heartbeats import WorkerHeartbeats
    from elasticflow.launcher.agent.workers import ForkedWorkers
    from elasticflow.launcher.rendezvous.rounds import Outbox
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.client.writer_process import WriterProcess

# Of one message, so that none is large.
_MOST_LINES = 20


class Reporter:
    """Posts to *feed* on behalf of *node*."""

    def __init__(
        self, feed: Outbox, node: str, folder: RunFolder, writer: WriterProcess, heartbeats: WorkerHeartbeats
    ) -> None:
        self._feed, self._node, self._folder = feed, node, folder
        self._writer, self._heartbeats = writer, heartbeats
        self._generation = 0
        self._ranks: dict[int, int] = {}
        self._logs: list[RankLog] = []

    def begun(self, generation: int, ranks: dict[int, int], pids: dict[int, int]) -> None:
        """Workers of *generation* have started; *ranks* and *pids* are by local rank. Their logs are followed now."""
        self._generation, self._ranks = generation, ranks
        self._logs = [RankLog(self._folder, generation, rank) for rank in ranks.values()]
        workers = [
            {"rank": rank, "pid": pids[local_rank], "node": self._node} for local_rank, rank in ranks.items()
        ]
        self._feed.post({"type": "workers", "generation": generation, "node": self._node, "workers": workers})

    def forward(self) -> None:
        """Pass on new lines of the rank logs and the writer's reports."""
        lines = [line for log in self._logs for line in log.lines()]
        for first in range(0, len(lines), _MOST_LINES):
            piece = lines[first : first + _MOST_LINES]
            self._feed.post({"type": "lines", "lines": piece, "held": self._heartbeats.held()})
        reports = self._writer.reports()
        if reports:
            self._feed.post({"type": "writer", "reports": reports})

    def left_behind(self, process: EndedOrphan) -> None:
        """A process that a worker had left behind was ended."""
        self._feed.post({"type": "left_behind", "node": self._node, **asdict(process)})

    def standstill(self, *, is_so: bool) -> None:
        """All workers of the node have stood still for too long, or one moves again."""
        self._feed.post(
            {"type": "standstill", "generation": self._generation, "node": self._node, "is_so": is_so}
        )

    def stacks(self, workers: ForkedWorkers) -> None:
        """Tell where each worker that lives stands; all of them write their stacks to their standard errors."""
        gone = workers.exits()
        pids = {rank: pid for rank, pid in workers.pids().items() if rank not in gone}
        found = stack_dumps.collect(pids, workers.stderrs)
        told = [
            {
                "node": self._node,
                "rank": self._ranks[stand.local_rank],
                "phase": stand.phase,
                "step": stand.step,
                "seconds": round(stand.seconds, 1),
                "limit_s": round(stand.limit_s, 1),
                "log": str(workers.stderrs[stand.local_rank]),
                **found[stand.local_rank],
            }
            for stand in self._heartbeats.stands()
            if stand.local_rank in found
        ]
        self._heartbeats.concede()
        self._feed.post(
            {"type": "stacks", "generation": self._generation, "node": self._node, "workers": told}
        )

    def ended(self, workers: ForkedWorkers, alone: set[int], *, failed: bool) -> None:
        """No worker is left; the local ranks in *alone* ended by themselves."""
        self.forward()
        for log in self._logs:
            log.close()
        self._logs = []
        self._feed.post(
            {
                "type": "ended",
                "generation": self._generation,
                "node": self._node,
                "failed": failed,
                "workers": workers.endings(self._ranks, alone),
            }
        )
