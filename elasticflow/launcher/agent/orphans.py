"""Processes that workers leave behind: found once their parents are gone, asked to end, then killed. Linux only.

A child that leads a session of its own escapes the signals that end a worker's session. It bears the run's mark in its
environment, as everything that descends from an agent does, unless whoever started it took `ELASTICFLOW_RUN_ID` out of
that: then it is meant to outlive the run, and is left alone. An agent is given such orphans by the kernel
(`adopt_orphans`); a supervisor looks for those that no agent has (`unclaimed`), since an agent may have been killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.protocol import worker_environment
from elasticflow.system import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from elasticflow.run_folder import RunFolder

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
# What dies with its parent is dead by then, and need not be told of.
_SETTLE_S = 0.2
GRACE_S = 3.0
_POLL_S = 0.02
_LONGEST_COMMAND = 120
_AGENT = "elasticflow.launcher.agent.main"


def adopt_orphans() -> None:
    """Have descendants whose parent ends become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Process(NamedTuple):
    """A process that no other can be taken for: its id and when it was started, in clock ticks."""

    pid: int
    started: int


@dataclass(frozen=True)
class EndedOrphan:
    """A process that outlived the worker that started it.

    Attributes:
        pid: Its process id.
        command: Its command line, cut short.
        was_killed: It did not end when it was asked to.
    """

    pid: int
    command: str
    was_killed: bool


@dataclass
class _Asked:
    command: str
    since: float
    is_told: bool = False
    is_killed: bool = False


class Orphans:
    """The processes that workers of a run have left behind.

    Args:
        find: Returns the process ids of those that are there now.
        tell: Called with each that had to be ended.
    """

    def __init__(self, find: Callable[[], Iterable[int]], tell: Callable[[EndedOrphan], None]) -> None:
        self._find, self._tell = find, tell
        self._asked: dict[Process, _Asked] = {}

    def look(self, now: float) -> None:
        """Take in those that are there now. To be called while workers of the run have none that are meant to live."""
        for pid in self._find():
            if (started := _started(pid)) is not None:
                self._asked.setdefault(Process(pid, started), _Asked(_command(pid), now))

    def pursue(self, now: float) -> bool:
        """Ask those that were found to end, kill those that had their grace; return whether any is left."""
        for process, asked in list(self._asked.items()):
            _reap(process.pid)
            if _started(process.pid) != process.started:
                if asked.is_told:
                    self._tell(EndedOrphan(process.pid, asked.command, asked.is_killed))
                del self._asked[process]
            elif not asked.is_told and now >= asked.since + _SETTLE_S:
                asked.is_told = True
                _send(process.pid, signal.SIGTERM)
            elif not asked.is_killed and now >= asked.since + _SETTLE_S + GRACE_S:
                asked.is_killed = True
                _send(process.pid, signal.SIGKILL)
        return bool(self._asked)

    def end(self) -> None:
        """Return once none is left, not even of those that they leave behind themselves; each has its grace."""
        deadline = time.monotonic() + 2 * GRACE_S
        while time.monotonic() < deadline:
            self.look(time.monotonic())
            if not self.pursue(time.monotonic()):
                return
            time.sleep(_POLL_S)


def adopted(run: RunFolder, own: Collection[int]) -> list[int]:
    """Return the processes with the mark of *run* that the kernel gave to this one, which started only its *own* children.

    Their descendants are among them. Dead ones are let go.
    """
    found: list[int] = []
    waiting = [pid for pid in processes.children_of(os.getpid()) if pid not in own]
    for pid in waiting:
        if _is_marked(pid, run):
            found.append(pid)
            waiting += processes.children_of(pid)
        elif _started(pid) is None:
            _reap(pid)
    return found


def unclaimed(run: RunFolder) -> list[int]:
    """Return the processes of this machine with the mark of *run* that descend from no agent."""
    marked = {pid for pid in processes.all_processes() if _is_marked(pid, run)} - {os.getpid()}
    roots = [pid for pid in marked if processes.parent_of(pid) not in marked and _AGENT not in _command(pid)]
    for pid in roots:
        roots += [child for child in processes.children_of(pid) if child in marked]
    return roots


def _is_marked(pid: int, run: RunFolder) -> bool:
    # Another project may have a run of the same id.
    marks = {
        f"{worker_environment.RUN_ID}={run.run_id}".encode(),
        f"{worker_environment.RUN_FOLDER}={run.path}".encode(),
    }
    return marks <= processes.variables_of(pid)


def _started(pid: int) -> int | None:
    """Return when the process was started; None if it is gone, or a zombie."""
    return None if processes.state_of(pid) in ("", "Z", "X") else processes.started_at(pid)


def _command(pid: int) -> str:
    return processes.command_line(pid)[:_LONGEST_COMMAND]


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reap(pid: int) -> None:
    """Let a dead child go; one that is another's child is another's to let go."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
