"""What ends a process: its parent's death, without which a killed launcher leaves orphans, and signals.

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
from pathlib import Path

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
# linux/sched.h
_PF_EXITING = 0x4

# How a process dies of what it did itself; other signals come from outside.
FAULTS = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGILL})


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends.

    fork clears the setting, so every process of the tree calls this for itself. The parent is checked
    afterwards: it may have died before the call. Where prctl does not exist (macOS), a thread looks
    at the parent twice a second instead.

    Args:
        parent: Process id of the expected parent.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True, name="lifeline").start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def leave_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask a command to leave: SIGHUP is none where `nohup` has it ignored."""
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
    """Return whether a process that ended with *exit_code* (negative: a signal) was killed by somebody else."""
    return exit_code is not None and exit_code < 0 and -exit_code not in FAULTS


def is_ending(pid: int) -> bool:
    """Return whether the process is on its way out: the kernel is closing what it held. False where that is not told."""
    try:
        fields = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
        return bool(int(fields[6]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return False
