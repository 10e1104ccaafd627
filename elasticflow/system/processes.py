"""Processes: their ends, and facts from the kernel beyond psutil's.

A process ends with its parent here: without that, a killed launcher leaves orphans.

Source: torch 2.13 starts workers with `start_new_session=True` and no death signal; a SIGKILLed agent
leaves them training to the end (torch/distributed/elastic/multiprocessing/subprocess_handler).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.system.kernel_files import text_in

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable


# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
# linux/sched.h
_PF_EXITING = 0x4

STOPPED, IN_KERNEL = "T", "D"
"""The kernel's names for the states of a process that a signal has stopped, and of one in a call that no signal ends."""
LOADER = "ef-loader"
"""The name of a loader process in the kernel (`set_name`)."""

# Signals by which a process dies of its own doing; other signals come from outside.
FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL})


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    fork clears the setting, so every process of the tree calls this for itself. The parent is checked
    afterwards: it may have died before the call. Where prctl does not exist (macOS), a thread looks
    at the parent twice a second instead.
    """
    if sys.platform == "linux":
        libc = _libc()
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifeline").start()
    if os.getppid() != parent:
        os._exit(1)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def append_output_to(path: str) -> None:
    """Append the output of this process, and of its later children, to the file at *path* from now on."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def adopt_orphans() -> None:
    """Have descendants whose parent ends become children of this process; Linux only."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_name(name: str) -> None:
    """Have the kernel call this process *name*, as `ps` and `top` show it: 15 characters; Linux only."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def leave_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a command to exit: not SIGHUP where `nohup` has it ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def signal_or_code(exit_code: int) -> str:
    """Return `killed by SIGKILL` for -9, `exit code 3` for 3."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def is_killed_from_outside(exit_code: int | None) -> bool:
    """Return whether a process that ended with *exit_code* (negative: a signal) was killed by someone else."""
    return exit_code is not None and exit_code < 0 and -exit_code not in FAULTS


def is_ending(pid: int) -> bool:
    """Return whether the process is exiting: the kernel is closing its files; False where the kernel does not tell."""
    fields = _stat(pid)
    return bool(fields) and bool(int(fields[6]) & _PF_EXITING)


def state_of(pid: int) -> str:
    """Return the state of the process as the kernel names it: R, S, D, T, Z; empty where it does not tell."""
    return next(iter(_stat(pid)), "")


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU time that all threads of the process have used; 0 where the kernel does not tell."""
    fields = _stat(pid)
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def io_bytes_of(pid: int) -> int:
    """Return the bytes that the process has read and written, by read(2) and write(2); 0 where the kernel does not tell."""
    fields = text_in(Path(f"/proc/{pid}/io")).split()
    return int(fields[1]) + int(fields[3]) if fields else 0


def waits_for_lock(pid: int) -> bool:
    """Return whether the main thread of the process waits for a lock or a thread; True where the kernel does not tell."""
    function = text_in(Path(f"/proc/{pid}/wchan"))
    return function in {"", "0"} or "futex" in function


def started_at(pid: int) -> int | None:
    """Return the process's start, in clock ticks after the machine's start (macOS: after 1970); None if it is gone.

    The start tells the process from a later one with the same id.
    """
    fields = _stat(pid)
    if not fields and sys.platform == "darwin":
        import psutil

        with suppress(psutil.Error):
            return int(100 * psutil.Process(pid).create_time())  # macOS notes the time at the start
    return int(fields[19]) if fields else None


def boot_id() -> str | None:
    """Return the id of this start of the machine: another one after each start; None where the kernel does not tell."""
    return text_in(Path("/proc/sys/kernel/random/boot_id")) or None


def children_of(pid: int) -> list[int]:
    """Return the process ids of the children that any thread of the process has; none where the kernel does not tell.

    psutil would read all processes of the machine, and each restart would wait for that.
    """
    children = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                children += [int(child) for child in (task / "children").read_text().split()]
    return children


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether the process has a handler for the signal, which psutil cannot tell; True on macOS, which does not."""
    for line in text_in(Path(f"/proc/{pid}/status")).splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return not Path("/proc/self").exists()


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the command's name; none if the process is gone.

    psutil has neither the flags nor the kernel's own names of states, and its times change when the clock is set.
    """
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


# A process that a signal has stopped certainly does nothing until another signal comes.
STOPPED_S = 10.0
_LOOK_S = 1.0
# If this process was paused for so long, its child may have been stopped and woken up with it.
_PAUSE_S = 5.0


class StoppedChild:
    """Watches *child* of this process.

    Args:
        now: On the monotonic clock.
    """

    def __init__(self, child: subprocess.Popen[bytes], now: float) -> None:
        self._child, self._looked = child, now
        self._since: float | None = None

    def look(self, now: float, helpers: Callable[[], Iterable[int]] = tuple) -> None:
        """Kill the child if it, or one of the *helpers* that do its work, was stopped `STOPPED_S` ago; looks once a second."""
        if now < self._looked + _LOOK_S:
            return
        was_paused, self._looked = now > self._looked + _PAUSE_S, now
        if was_paused or not any(state_of(pid) == STOPPED for pid in (self._child.pid, *helpers())):
            self._since = None
        elif self._since is None:
            self._since = now
        elif now >= self._since + STOPPED_S:
            self._child.kill()
