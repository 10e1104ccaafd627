"""What an agent tells the supervisor of one generation: its workers, what they and the writer say, how they end (floor 3)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.launcher.rank_logs import RankLog

if TYPE_CHECKING:
    from elasticflow.launcher.heartbeats import Heartbeats
    from elasticflow.launcher.rendezvous import Feed
    from elasticflow.launcher.workers import ForkedWorkers
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.staging import WriterProcess


class Reports:
    """Posts to *feed* on behalf of *node*."""

    def __init__(
        self, feed: Feed, node: str, folder: RunFolder, writer: WriterProcess, heartbeats: Heartbeats
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
        if lines:
            self._feed.post({"type": "lines", "lines": lines, "held": self._heartbeats.held()})
        reports = self._writer.reports()
        if reports:
            self._feed.post({"type": "writer", "reports": reports})

    def hung(self, hang: dict[str, Any]) -> None:
        """A worker made no progress for too long."""
        rank = self._ranks[hang["local_rank"]]
        self._feed.post({"type": "hang", "rank": rank, "phase": hang["phase"], "seconds": hang["seconds"]})

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
