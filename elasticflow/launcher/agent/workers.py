"""Workers of one node, forked by the warm server.

torch's own `MultiprocessContext` counts a worker as finished only when its return value has arrived in a queue, and
waits for ever for a worker that exits by `os._exit` (measured, torch 2.13). Here exit code 0 is success and any other is
failure.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.rank_logs import tail
from elasticflow.launcher.rendezvous import network
from elasticflow.launcher.rendezvous.store_keys import master_key
from elasticflow.protocol.messages import WorkerEnd
from elasticflow.protocol.store_address import address_for_others
from elasticflow.system.free_memory import OomKills
from elasticflow.system.polling import attempts
from elasticflow.system.processes import IN_KERNEL, started_at, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping
    from pathlib import Path

    from elasticflow.launcher.agent.worker_streams import WorkerStreams
    from elasticflow.launcher.fork_server.client import ForkServer
    from elasticflow.launcher.rendezvous.supervisor_channel import Assignment
    from elasticflow.protocol.control_store import RemoteControlStore


# Seconds after a second SIGKILL in which a process has to be gone.
_KILLED_S = 5.0


class GroupState(enum.Enum):
    """State of a group of workers: FAILED once one has ended with another exit code than 0, FINISHED once all have with 0."""

    RUNNING = enum.auto()
    FINISHED = enum.auto()
    FAILED = enum.auto()


class ForkedWorkers:
    """The local worker group of one generation.

    Attributes:
        streams: Files of their standard streams, which `close` closes.
    """

    def __init__(
        self, server: ForkServer, environments: Mapping[int, Mapping[str, str]], streams: WorkerStreams
    ) -> None:
        self._server, self._environments, self.streams = server, environments, streams
        self._pids: dict[int, int] = {}
        self._excused: dict[int, tuple[int, float]] = {}
        self._closed = self._is_server_lost = False
        self._oom_kills = OomKills()

    def start(self) -> None:
        """Start the workers.

        Raises:
            HelperLostError: the fork server is gone.
        """
        for local_rank, environment in self._environments.items():
            stdout, stderr = self.streams.stdouts[local_rank], self.streams.stderrs[local_rank]
            self._pids[local_rank] = self._server.spawn(local_rank, environment, str(stdout), str(stderr))

    def poll(self, *, may_leave: bool = False) -> GroupState:
        """Take in what the server reports, show streams that are to be shown, and return the group's state.

        Args:
            may_leave: The workers were asked to exit, and may do so with any code and by any signal.

        Raises:
            HelperLostError: the fork server is gone, and its workers with it.
        """
        if not self._server.pump():
            raise self._server.lost()
        self.streams.show()
        codes = [code for code, _ in self.exits().values()]
        if any(codes) and not may_leave:
            return GroupState.FAILED
        return GroupState.FINISHED if len(codes) == len(self._pids) else GroupState.RUNNING

    def exits(self) -> dict[int, tuple[int, float]]:
        """Exit code (negative: signal) and unix time of each local rank that has ended."""
        ended = {
            rank: self._server.exits[pid] for rank, pid in self._pids.items() if pid in self._server.exits
        }
        return ended | self._excused

    def excuse(self) -> None:
        """Have the workers that are left count as ended with exit code 0; `close` ends them."""
        self._excused = {rank: (0, time.time()) for rank in self.left()}

    def left(self) -> dict[int, int]:
        """Process ids of the local ranks that have not ended."""
        gone = self.exits()
        return {rank: pid for rank, pid in self._pids.items() if rank not in gone}

    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return dict(self._pids)

    def ends(self, ranks: Mapping[int, int], alone: Container[int]) -> tuple[WorkerEnd, ...]:
        """Return how each worker ended.

        Args:
            ranks: Global ranks, by local rank.
            alone: Local ranks that ended by themselves; the others were ended by this agent.
        """
        exits = self.exits()
        ends = []
        for local_rank, rank in ranks.items():
            code, at = exits.get(local_rank, (-signal.SIGKILL, time.time()))
            failed_alone = local_rank in alone and code != 0
            # One that runs gives its memory back, which takes many seconds where hundreds of gigabytes are pinned.
            is_left = local_rank not in exits and not self._is_server_lost
            is_stuck = is_left and state_of(self._pids[local_rank]) == IN_KERNEL
            ends.append(
                WorkerEnd(
                    rank=rank,
                    pid=self._pids[local_rank],
                    exit_code=code,
                    at=at,
                    ended_by_us=local_rank not in alone,
                    oom_killed=failed_alone and self._oom_kills.includes(self._pids[local_rank]),
                    stderr=tail(self.streams.stderrs[local_rank]) if failed_alone else "",
                    remains=IN_KERNEL if is_stuck else "",
                )
            )
        return tuple(ends)

    def send(self, number: signal.Signals) -> None:
        """Send *number* to each worker that still lives, not to its loader processes."""
        for rank, pid in self._pids.items():
            if rank not in self.exits():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self, number: signal.Signals, timeout: float) -> None:
        """Send *number* to every worker's session, and SIGKILL to what is left after *timeout* seconds."""
        if self._closed:  # their process ids may be others' by now
            return
        self._closed = True
        self._end(number, timeout)
        self.streams.close()

    def _end(self, number: signal.Signals, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for sent in (number, signal.SIGKILL):
            for pid in self._pids.values():
                if pid in self._server.exits and started_at(pid) is not None:
                    continue  # its session is empty, and the id was given again
                # The session may hold loader processes even when its leader is gone; and a worker forked
                # a moment ago may not lead its session yet.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, sent)
            self.send(sent)
            limit = max(deadline, time.monotonic() + _KILLED_S) if sent == signal.SIGKILL else deadline
            while len(self.exits()) < len(self._pids) and time.monotonic() < limit:
                if not self._server.pump(0.05):
                    self._is_server_lost = True  # nothing tells the workers' ends any more
                    return
            if len(self.exits()) == len(self._pids):
                return


def environment_of_script(master: tuple[str, int], generation: int, errors: Path) -> dict[str, str]:
    """Return the variables that torchrun gives a script beyond those of `environment_of`, or with other values.

    Args:
        master: Address and port at which rank 0 may listen.
        generation: Number of the worker group over the whole run: one more than it was restarted.
        errors: File in which torch's `record` writes the worker's exception.
    """
    host, port = master
    return {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_RESTART_COUNT": str(generation - 1),
        "TORCHELASTIC_ERROR_FILE": str(errors),
    }


def environment_of(
    assignment: Assignment, local_rank: int, role: str, run_id: str, master: tuple[str, int]
) -> dict[str, str]:
    """Return the variables that torchrun gives a worker, under its own names.

    Args:
        master: Host and port of the launch's store.
    """
    rank = str(assignment.first_rank + local_rank)
    world_size = str(assignment.world_size)
    host, port = master
    return {
        "RANK": rank,
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(assignment.group_rank),
        "ROLE_RANK": rank,
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": str(assignment.nproc),
        "WORLD_SIZE": world_size,
        "GROUP_WORLD_SIZE": str(assignment.group_world_size),
        "ROLE_WORLD_SIZE": world_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


_LOOPBACK = "127.0.0.1"
# Rank 0's node tells within milliseconds, and is lost long before the limit if it does not live.
_LOOK_S, _LONGEST_S = 0.005, 300.0


def master_of(
    store: RemoteControlStore,
    host: str,
    interface: str | None,
    assignment: Assignment,
    may_wait: Callable[[], None],
) -> tuple[str, int]:
    """Return address and port at which rank 0 may listen, the same on every node; waits for rank 0's node.

    Nothing holds the port meanwhile: another program may take it, as with torchrun.

    Args:
        interface: Interface that workers talk over, if the job names one.
        may_wait: Called again and again while rank 0's node has not told: it may be lost; an exception ends the wait.

    Raises:
        StoreLostError: the store does not answer, or rank 0's node has not told in time.
    """
    if assignment.group_world_size == 1:
        return _LOOPBACK, _free_port(_LOOPBACK)
    key = master_key(assignment.generation)
    if assignment.first_rank == 0:
        # The address under which other nodes reach this machine: the job's, or that towards the launch's keys.
        own = address_for_others(store.own_address) if interface is None else network.find(interface).address
        address, port = own, _free_port("")
        store.set(key, json.dumps([address, port]))
    else:
        for _ in attempts(_LONGEST_S, _LOOK_S):
            if store.check([key]):
                break
            may_wait()
        address, port = json.loads(store.get(key, _LOOK_S))
    # Without an address of its own it is on the machine that serves the launch's keys.
    return address or host, port


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
