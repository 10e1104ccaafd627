"""Workers of one node, forked by the warm server: our PContext (floor 3).

torch's own `MultiprocessContext` counts a worker finished only when its return value has arrived in a
queue, and waits for ever for one that leaves by `os._exit` (measured, torch 2.13). Here exit code 0 is
success and anything else is failure.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.api import PContext, RunProcsResult
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from elasticflow.launcher.agent.memory_kills import MemoryKills
from elasticflow.launcher.agent.rank_logs import tail

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs

    from elasticflow.launcher.agent.fork_client import ForkServer


class ForkedWorkers(PContext):
    """The local worker group of one generation."""

    def __init__(
        self,
        server: ForkServer,
        name: str,
        entry_point: str,
        envs: dict[int, dict[str, str]],
        logs_specs: LogsSpecs,
    ) -> None:
        super().__init__(name, entry_point, dict.fromkeys(envs, ()), envs, logs_specs)
        self._server = server
        self._pids: dict[int, int] = {}
        self._closed = False
        self._memory_kills = MemoryKills()

    def start(self) -> None:
        """Start the workers; unlike torch's, installs no signal handlers: signals are the supervisor's."""
        self._start()
        for log in self._tail_logs:
            log.start()

    def _start(self) -> None:
        for local_rank, environment in self.envs.items():
            self._pids[local_rank] = self._server.spawn(
                local_rank, environment, self.stdouts[local_rank], self.stderrs[local_rank]
            )

    def exits(self) -> dict[int, tuple[int, float]]:
        """Exit code (negative: signal) and unix time of each local rank that has ended."""
        return {
            rank: self._server.exits[pid] for rank, pid in self._pids.items() if pid in self._server.exits
        }

    def _poll(self) -> RunProcsResult | None:
        if not self._server.pump():  # its workers have died with it
            raise self._server.lost()
        exits = self.exits()
        failed = {rank: code for rank, (code, _) in exits.items() if code != 0}
        if failed:
            return RunProcsResult(failures={r: self._failure(r, code) for r, code in failed.items()})
        if len(exits) == len(self._pids):
            return RunProcsResult(return_values=dict.fromkeys(exits))
        return None

    def _failure(self, local_rank: int, code: int) -> ProcessFailure:
        return ProcessFailure(local_rank=local_rank, pid=self._pids[local_rank], exitcode=code, error_file="")

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return dict(self._pids)

    def endings(self, ranks: dict[int, int], alone: set[int]) -> list[dict[str, Any]]:
        """Return how each worker ended, by global rank; those not in *alone* were ended by us."""
        exits = self.exits()
        found = []
        for local_rank, rank in ranks.items():
            code, at = exits.get(local_rank, (-signal.SIGKILL, time.time()))
            failed_alone = local_rank in alone and code != 0
            found.append(
                {
                    "rank": rank,
                    "pid": self._pids[local_rank],
                    "exit_code": code,
                    "at": at,
                    "ended_by_us": local_rank not in alone,
                    "oom_killed": failed_alone and self._memory_kills.includes(self._pids[local_rank]),
                    "stderr": tail(Path(self.stderrs[local_rank])) if failed_alone else "",
                }
            )
        return found

    def send(self, number: signal.Signals) -> None:
        """Send *number* to each worker that still lives, not to its loader processes."""
        for rank, pid in self._pids.items():
            if rank not in self.exits():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Send *death_sig* to every worker's session, and SIGKILL to what is left after *timeout* seconds."""
        if self._closed:  # their process ids may be somebody else's by now
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        for number in (death_sig, signal.SIGKILL):
            for pid in self._pids.values():
                # The session may hold loader processes even when its leader is gone; and a worker forked
                # a moment ago may not lead its session yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, number)
            self.send(number)
            limit = max(deadline, time.monotonic() + 5) if number == signal.SIGKILL else deadline
            while len(self.exits()) < len(self._pids) and time.monotonic() < limit:
                if not self._server.pump(0.05):
                    return
            if len(self.exits()) == len(self._pids):
                return


def environment_of(worker: Any, group: Any, extra: dict[str, str]) -> dict[str, str]:
    """Return the variables of one worker, under torchrun's own names."""
    return {
        "RANK": str(worker.global_rank),
        "LOCAL_RANK": str(worker.local_rank),
        "GROUP_RANK": str(group.group_rank),
        "ROLE_RANK": str(worker.role_rank),
        "ROLE_NAME": group.spec.role,
        "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
        "WORLD_SIZE": str(worker.world_size),
        "GROUP_WORLD_SIZE": str(group.group_world_size),
        "ROLE_WORLD_SIZE": str(worker.role_world_size),
        "MASTER_ADDR": str(group.master_addr),
        "MASTER_PORT": str(group.master_port),
        "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        **extra,
    }
