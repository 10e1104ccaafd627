"""Decides when a node's standbys are made, and checks that there is memory for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.protocol.child_processes import MEMORY_FACTOR
from elasticflow.protocol.messages import report
from elasticflow.protocol.run_files import read_preparation
from elasticflow.protocol.worker_environment import TRAINING_PHASES
from elasticflow.system.free_memory import available
from elasticflow.system.processes import signal_or_code

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.launcher.agent.worker_heartbeats import WorkerHeartbeats
    from elasticflow.launcher.fork_server.client import ForkServer
    from elasticflow.protocol.child_processes import Warm

# While a worker copies a snapshot no standby is begun.
_PHASES = TRAINING_PHASES - {"snapshot"}
_LOOK_S = 0.2
# Bytes that a standby may take, until one has told.
_GUESS = 500_000_000
_MOST_DEATHS = 3


class StandbyKeeper:
    """Sees that each worker of the node has a standby, from the first step of a generation on.

    Args:
        warm: `restarts.warm` of the job.
        server: Starts them; it is ready.
        imports: File of the `Preparation`, from the last workers.
    """

    def __init__(
        self,
        warm: Warm,
        server: ForkServer,
        heartbeats: WorkerHeartbeats,
        workers: int,
        imports: Path,
        node: str,
        report: Callable[[EventRecord], None],
    ) -> None:
        self._server, self._heartbeats, self._workers = server, heartbeats, workers
        self._imports, self._node, self._report = imports, node, report
        ready = server.wait_ready()
        # Where workers have the job's modules from the fork on, a standby would save only what the accelerator takes.
        saves_time = ready.has_gpu or not ready.shares_imports
        self._is_on = warm == "standby" or (warm == "auto" and saves_time)
        self._asked: set[int] = set()
        self._deaths = 0
        self._is_announced = False
        self._looked = 0.0

    def begin(self) -> None:
        """The workers of a generation were started, from the standbys that there were."""
        self._asked.clear()
        self._deaths = 0
        self._is_announced = False

    def look(self, now: float) -> None:
        """Ask for the standbys that are missing, if it is time; to be called often while the workers run.

        Raises:
            HelperLostError: the fork server has ended.
        """
        if not self._is_on or now - self._looked < _LOOK_S:
            return
        self._looked = now
        phases = {progress.phase for progress in self._heartbeats.progress()}
        if self._count_deaths() and phases <= _PHASES:
            self._ask_and_tell()

    def _ask_and_tell(self) -> None:
        missing = [rank for rank in range(self._workers) if rank not in self._asked]
        if missing and self._has_memory_for(len(missing)):
            preparation = read_preparation(self._imports)
            for rank in missing:
                self._server.prepare(rank, self._workers, preparation, self._heartbeats.fd)
                self._asked.add(rank)
        ready = self._server.standbys
        if not self._is_announced and len(ready) == self._workers:
            self._is_announced = True
            pids = tuple(ready[rank].pid for rank in sorted(ready))
            seconds = max(standby.seconds for standby in ready.values())
            memory = sum(standby.memory for standby in ready.values())
            without_device = next((reason for s in ready.values() if (reason := s.without_device)), "")
            self._report(
                report(
                    events.STANDBYS_READY,
                    node=self._node,
                    pids=pids,
                    seconds=seconds,
                    memory=memory,
                    without_device=without_device,
                )
            )

    def _count_deaths(self) -> bool:
        """Count the standbys that have ended; return False if making others is hopeless."""
        while self._server.ended_standbys:
            ended = self._server.ended_standbys.pop()
            self._asked.discard(ended.local_rank)
            self._is_announced = False
            self._deaths += 1
            if self._deaths == _MOST_DEATHS:
                how = f"{'' if ended.code < 0 else 'with '}{signal_or_code(ended.code)}"
                self._end(f"{_MOST_DEATHS} ended before they were needed, the last {how}")
        return self._is_on

    def _has_memory_for(self, standbys: int) -> bool:
        known = [standby.memory for standby in self._server.standbys.values()]
        needed = standbys * max(known, default=_GUESS)
        if (free := available()) >= MEMORY_FACTOR * needed:
            return True
        self._end(f"they may take {needed // 10**6} MB, and {free // 10**6} MB of memory are free")
        return False

    def _end(self, reason: str) -> None:
        self._is_on = False
        self._report(report(events.STANDBYS_OFF, node=self._node, reason=reason))
