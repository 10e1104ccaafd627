"""The end of a supervisor that recorded none: the certain facts, and the likely cause.

A supervisor writes down at launch on which machine it runs. Where a run's state says `running` and no process leads the
run, that record is compared with the machine as it is now.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from elasticflow.protocol.json_codec import from_json
from elasticflow.system.free_memory import counts_of_kills, is_in_log
from elasticflow.system.processes import boot_id, started_at
from elasticflow.system.records import read, unix_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.run_folder import RunFolder

MACHINE, DISK_FULL = "machine", "is_disk_full"  # in state.json
Kind = Literal[
    "killed", "out_of_memory", "machine_restarted", "container_restarted", "disk_full", "elsewhere"
]
# A machine comes up within this; if the supervisor was silent for longer, it may have ended before the machine did.
_BOOT_S = 600.0
_PROC = Path("/proc")
# Bytes: with less a supervisor cannot write its state.
_ROOM = 1 << 16


@dataclass(frozen=True)
class Machine:
    """The machine that a supervisor runs on; None for facts that the machine does not tell.

    Attributes:
        boot_id: Another one after each start of the machine.
        init_started: When the first process of the container or machine began, in clock ticks after the machine's start.
        process_started: When this process began, in the same ticks.
        booted: Unix time of the machine's start.
        memory_kills: How many processes the kernel has killed for memory, by the file that counts them.
    """

    host: str
    boot_id: str | None = None
    init_started: int | None = None
    process_started: int | None = None
    booted: float | None = None
    memory_kills: dict[str, int] = field(default_factory=dict)

    @classmethod
    def here(cls) -> Machine:
        """Return this machine now."""
        return cls(
            socket.gethostname(),
            boot_id(),
            started_at(1),
            started_at(os.getpid()),
            _booted(),
            counts_of_kills(),
        )


def machine_of(record: object) -> Machine | None:
    """Return the machine whose fields *record*, from state.json, holds; None for anything else, as earlier versions wrote."""
    with suppress(ValueError):
        return from_json(Machine, record)
    return None


@dataclass(frozen=True)
class Ending:
    """The end of a supervisor that wrote nothing about it.

    Attributes:
        likely: The probable cause, in words; None if *known* says it.
        last_seen: Unix time of its last sign of life; None: unknown.
        in_generation: The newest generation that it led; 0: none, or unknown.
    """

    kind: Kind
    known: str
    likely: str | None = None
    last_seen: float | None = None
    in_generation: int = 0

    @property
    def text(self) -> str:
        """The facts and the cause in one line."""
        return self.known if self.likely is None else f"{self.known}; likely {self.likely}"


def ending_of(folder: RunFolder) -> Ending | None:
    """Return how the supervisor of the newest launch ended; None if its state says so. No process holds the run's lock."""
    state = read(folder.state)
    if not isinstance(state, dict) or state.get("status") != "running":
        return None
    then, pid = machine_of(state.get(MACHINE)), _whole(state.get("pid"))
    last_seen = unix_time(state.get("updated"))
    ending = explain(then, Machine.here(), last_seen, lambda since: pid is not None and is_in_log(pid, since))
    if state.get(DISK_FULL) is True:
        ending = Ending("disk_full", "the disk of the run folder was full, and it could write no more")
    elif ending.kind == "killed" and _is_full(folder.path):
        known = f"{ending.known}; the disk of the run folder is full"
        ending = Ending("disk_full", known, "it could write no more")
    generation = _whole(state.get("generation")) or 0
    return replace(ending, last_seen=last_seen, in_generation=generation)


def explain(
    then: Machine | None, now: Machine, updated: float | None, is_logged: Callable[[float], bool]
) -> Ending:
    """Return the end of a supervisor on *then*, judged from *now*.

    Args:
        then: Machine that it ran on; None: unknown.
        now: This machine.
        updated: Unix time of its last sign of life.
        is_logged: Returns True if the kernel's log says that it killed the supervisor for memory after so many seconds from the
            machine's start.
    """
    if then is None:
        return Ending("killed", "the supervisor ended without a word", "killed, or the machine went down")
    if then.host != now.host:
        return Ending("elsewhere", f"it ran on {then.host}, and only that machine can tell what became of it")
    if then.boot_id is not None and now.boot_id is not None and then.boot_id != now.boot_id:
        return _restarted(now, updated)
    if (
        then.init_started is not None
        and now.init_started is not None
        and then.init_started != now.init_started
    ):
        known = "the container it ran in was ended and another one started, on the same start of the machine"
        return Ending("container_restarted", known, "ended from outside together with its container")
    if is_logged((then.process_started or 0) / os.sysconf("SC_CLK_TCK")):
        return Ending("out_of_memory", "the kernel killed it because memory ran out, says the kernel's log")
    return _of_counts(then, now)


def _restarted(now: Machine, updated: float | None) -> Ending:
    at = ""
    if now.booted is not None:
        at = time.strftime(" at %Y-%m-%d %H:%M:%S", time.localtime(now.booted))
    known = f"the machine has been started again since{at}"
    if now.booted is None or updated is None:
        likely = "a power cut, a crash or a shutdown ended it"
    elif (silent_s := now.booted - updated) <= _BOOT_S:
        likely = "a power cut, a crash or a shutdown that did not wait ended it"
    else:
        known += f", {silent_s / 60:.0f} min after its last sign of life"
        likely = "the machine was off for so long, or the supervisor was killed before"
    return Ending("machine_restarted", known, likely)


def _of_counts(then: Machine, now: Machine) -> Ending:
    known = "the machine has not been started again"
    for file, before in then.memory_kills.items():
        after = now.memory_kills.get(file)
        if after is None:  # the control group is gone, and its count with it
            continue
        if after > before:
            whose = "on this machine" if file.startswith(str(_PROC)) else "in its control group"
            many = "1 process" if after == before + 1 else f"{after - before} processes"
            known += f"; since the launch the kernel has killed {many} {whose} because memory ran out"
            return Ending("out_of_memory", known, "it was one of those killed for memory")
        return Ending(
            "killed", f"{known}, and no process was killed for memory", "killed from outside (SIGKILL)"
        )
    return Ending("killed", known, "killed (SIGKILL); whether memory had run out is not to be seen here")


def _is_full(path: Path) -> bool:
    """Return whether there is no room where *path* is, as far as that can be asked."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _ROOM


def _booted() -> float | None:
    import psutil

    with suppress(OSError, RuntimeError):  # a sandbox need not tell
        return psutil.boot_time()
    return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
