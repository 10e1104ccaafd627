"""What there is of a run on this machine: its processes, and what they hold open."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.end_to_end.harness import Running

_MEMORY = Path("/dev/shm")  # not a place for temporary files here, but what is counted


@dataclass(frozen=True)
class Holdings:
    """What a process and its children hold: descriptors, by kind, and processes.

    Attributes:
        files: All open descriptors of the process itself.
        memory: Those of files in memory.
        ports: Listening sockets, of it and of its children.
        children: Processes below it, workers and their own left out.
    """

    files: int = 0
    memory: int = 0
    ports: int = 0
    children: int = 0

    def __str__(self) -> str:
        """Return it in words."""
        return f"{self.files} files, {self.memory} memfd, {self.ports} ports, {self.children} helpers"

    def is_more_than(self, other: Holdings) -> bool:
        """Return whether any of it is more than in *other*."""
        ours, theirs = vars(self).values(), vars(other).values()
        return any(here > there for here, there in zip(ours, theirs, strict=True))


def holdings(process: psutil.Process) -> Holdings:
    """Return what *process* holds now."""
    targets = []
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            targets.append(str(link.readlink()))
    family = [process, *process.children(recursive=True)]
    ports, helpers = set(), 0
    for each in family:
        with suppress(psutil.NoSuchProcess):
            ports |= {c.laddr for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
            helpers += any("elasticflow." in part for part in each.cmdline()) and not _is_worker(each)
    return Holdings(len(targets), sum("memfd:" in target for target in targets), len(ports), helpers - 1)


def _is_worker(process: psutil.Process) -> bool:
    """Return whether it was forked by a warm server, whose command line it has inherited."""
    parent = process.parent()
    return parent is not None and parent.cmdline() == process.cmdline()


def agents_of(running: Running) -> dict[str, psutil.Process]:
    """Return the agents that run workers now, by node."""
    found = {}
    for worker in running.wait_for("workers", lambda: running.state().get("workers")):
        with suppress(psutil.Error, IndexError):
            found[str(worker["node"])] = psutil.Process(worker["pid"]).parents()[1]
    return found


def sessions(running: Running) -> set[int]:
    """Return the ids of the sessions that processes of the run lead or are in."""
    found = set()
    for process in running.tree():
        with suppress(OSError, ValueError):
            found.add(_session(process.pid))
    return found


def members(of: set[int]) -> list[int]:
    """Return the living processes that are in one of these sessions."""
    found = []
    for pid in psutil.pids():
        with suppress(OSError, ValueError):
            if _session(pid) in of:
                found.append(pid)
    return found


def shared_memory() -> set[str]:
    """Return the names of all shared memory that outlives its process."""
    return {path.name for path in _MEMORY.iterdir()}


def abandoned_memory() -> set[str]:
    """Return the names of the shared memory that no living process has mapped: other tests use theirs meanwhile."""
    names, mapped = shared_memory(), set()
    for pid in psutil.pids():
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
                if f"{_MEMORY}/" in line:
                    mapped.add(line.rpartition("/")[2].removesuffix(" (deleted)"))
    return names - mapped


def _session(pid: int) -> int:
    state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    if state[0] == "Z":
        raise ValueError(pid)
    return int(state[3])
