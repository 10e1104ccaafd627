"""Processes that workers leave behind: found once their parents are gone, asked to end, then killed. Linux only.

A child that leads a session of its own escapes the signals that end a worker's session. It has a mark in its environment,
as everything that descends from an agent does: the run's, or its launch's if it was forked and not exec'd. Where its
parent took `ELASTICFLOW_RUN_ID` out of its environment it is meant to outlive the run, and is left alone. The kernel makes such orphans children of the agent
(`processes.adopt_orphans`); a supervisor looks for those that no agent has (`unclaimed`), since an agent may have been
killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elasticflow import events
from elasticflow.protocol import worker_environment
from elasticflow.protocol.messages import report
from elasticflow.system.processes import LOADER, children_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from elasticflow.events import EventRecord
    from elasticflow.run_folder import RunFolder

# A process that dies with its parent is dead by then, and need not be reported.
_SETTLE_S = 0.2
GRACE_S = 3.0
_POLL_S = 0.02
_LONGEST_COMMAND = 120
_AGENT = "elasticflow.launcher.agent.main"


@dataclass
class _Asked:
    command: str
    since: float
    is_own: bool
    is_told: bool = False
    is_killed: bool = False


class Orphans:
    """The processes that workers of a run have left behind.

    Args:
        find: Returns the process ids of those that exist now.
        tell: Called with the event of each of them that had to be ended, and is not elasticflow's own.
        node: Node of the workers; None: unknown.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[int]],
        tell: Callable[[EventRecord], object],
        node: str | None = None,
    ) -> None:
        self._find, self._tell, self._node = find, tell, node
        self._asked: dict[psutil.Process, _Asked] = {}

    def look(self, now: float) -> None:
        """Take in the orphans that exist now. To be called while no process that workers started is meant to live."""
        for pid in self._find():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if _is_alive(process):
                    command, is_own = _describe(process)
                    self._asked.setdefault(process, _Asked(command, now, is_own))

    def pursue(self, now: float) -> bool:
        """Ask known orphans to end, and kill those that had their grace; return whether any is left."""
        for process, asked in list(self._asked.items()):
            _reap(process.pid)
            if not _is_alive(process):
                if asked.is_told and not asked.is_own:
                    self._tell(
                        report(
                            events.PROCESS_LEFT_BEHIND,
                            node=self._node,
                            pid=process.pid,
                            command=asked.command,
                            was_killed=asked.is_killed,
                        )
                    )
                del self._asked[process]
            elif not asked.is_told and now >= asked.since + _SETTLE_S:
                asked.is_told = True
                _send(process, signal.SIGTERM)
            elif not asked.is_killed and now >= asked.since + _SETTLE_S + GRACE_S:
                asked.is_killed = True
                _send(process, signal.SIGKILL)
        return bool(self._asked)

    def end(self) -> None:
        """End all orphans, also those that orphans leave behind; each has its grace."""
        deadline = time.monotonic() + 2 * GRACE_S
        while time.monotonic() < deadline:
            self.look(time.monotonic())
            if not self.pursue(time.monotonic()):
                return
            time.sleep(_POLL_S)


def adopted(run: RunFolder, own: Collection[int]) -> list[int]:
    """Return the orphans of *run* that the kernel made children of this process, and their descendants.

    This process has started its *own* children only. Other children that are dead are reaped.
    """
    orphans: list[int] = []
    # Without a launch's mark of its own, this process cannot tell forks of its workers by one: no mark is no match.
    launch = os.environ.get(worker_environment.LAUNCH_ID)
    launches = set() if launch is None else {launch}
    waiting = [pid for pid in children_of(os.getpid()) if pid not in own]
    for pid in waiting:
        if _is_marked(pid, run, launches):
            orphans.append(pid)
            waiting += children_of(pid)
        else:
            _reap(pid)
    return orphans


def unclaimed(run: RunFolder) -> list[int]:
    """Return the processes of this machine with a mark of *run* that descend from no agent."""
    launches = _launch_ids(run)
    parents: dict[int, int] = {}
    for pid in psutil.pids():
        if pid != os.getpid() and _is_marked(pid, run, launches):
            with suppress(psutil.NoSuchProcess):
                parents[pid] = psutil.Process(pid).ppid()
    orphans = [pid for pid, parent in parents.items() if parent not in parents and not _is_agent(pid)]
    for orphan in orphans:
        orphans += [pid for pid, parent in parents.items() if parent == orphan]
    return orphans


def _launch_ids(run: RunFolder) -> set[str]:
    """Return the ids of the launches of *run*, as far as their records can be read."""
    # Agents need neither, and are light.
    from elasticflow.compiler.provenance.origins import JOB_JSON
    from elasticflow.system import records

    made = [records.read(run.launch(number) / JOB_JSON) for number in run.launch_numbers()]
    return {record["launch_id"] for record in made if isinstance(record, dict) and record.get("launch_id")}


def _is_marked(pid: int, run: RunFolder, launches: Collection[str]) -> bool:
    with suppress(psutil.Error, OSError):
        # psutil takes three times as long, and a machine may have thousands of processes: nearly none has a mark.
        if b"ELASTICFLOW_" not in Path(f"/proc/{pid}/environ").read_bytes():
            return False
        variables = psutil.Process(pid).environ()
        # A forked process has the environment in which the fork server was started, before its run was known.
        if variables.get(worker_environment.LAUNCH_ID) in launches:
            return True
        # Another project may have a run of the same id.
        folder = variables.get(worker_environment.RUN_FOLDER)
        return variables.get(worker_environment.RUN_ID) == run.run_id and folder == str(run.path)
    return False


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _is_agent(pid: int) -> bool:
    with suppress(psutil.Error):
        return _AGENT in psutil.Process(pid).cmdline()
    return False


def _describe(process: psutil.Process) -> tuple[str, bool]:
    """Return words for *process*, and whether it is elasticflow's: not one that a worker's code has started."""
    with suppress(psutil.Error):
        name, command = process.name(), process.cmdline()
        if not any(flag == "-m" and word.startswith("elasticflow.") for flag, word in pairwise(command)):
            return " ".join(command)[:_LONGEST_COMMAND], False
        # A process that a worker forks has the worker's command line, except for its name.
        return f"{name}, forked by a worker", name in (LOADER, Path(command[0]).name)
    return "", False


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)


def _reap(pid: int) -> None:
    """Reap a dead child of this process; leave other processes to their parents."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
