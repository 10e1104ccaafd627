"""A lock on a file, which records the process that holds it."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from elasticflow.errors import RunLockedError
from elasticflow.system.polling import attempts
from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from pathlib import Path

# Seconds for which a process may hold the lock only to see if it is free.
LOOK_S = 0.1
_PAUSE_S = 0.02
# Bytes; a record has some two hundred.
_LONGEST = 4096


class LockHeldError(Exception):
    """Another process holds the lock.

    Attributes:
        note: The holder's text in the file; empty if it has written nothing yet, or something else.
        holder: The process; None if the file does not tell, as an earlier version's does not.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.note = _parsed(text)
        self.holder = ProcessRecord.from_json(self.note)
        self.who = f"process {text.strip() or 'unknown'}" if self.holder is None else str(self.holder)

    def refusal(self, run: str) -> RunLockedError:
        """Return the error that refuses a second start of *run*, and names the process that runs it."""
        remedy = "wait for it, or stop it"
        if self.holder is not None:
            where = "" if self.holder.is_on_this_machine else f" on {self.holder.host}"
            remedy += f"{where}: kill -TERM {self.holder.pid}"
        return RunLockedError(f"{run} is running ({self.who})", remedy)


class FileLock:
    """A lock (flock) that this process holds; the kernel gives it back when this process ends, however it ends.

    A child that this process forks has the same lock: it closes `descriptor`, or keeps the lock for as long as it lives.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def take(cls, path: Path, wait_s: float = LOOK_S, mode: int = 0o644) -> Self:
        """Lock the file at *path*, made with its folder if it is not there, and write this process into it.

        Raises:
            LockHeldError: another process holds it, and still does after *wait_s*.
            OSError: the file cannot be made, or its file system has no locks.
        """
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
            try:
                _take(descriptor, wait_s)
                if _is_at(path, descriptor):
                    lock = cls(descriptor)
                    lock.write(ProcessRecord.of())
                    return lock
            except BaseException:
                os.close(descriptor)
                raise
            # The file was removed in this moment: the next process would lock another one.
            os.close(descriptor)

    def write(self, holder: ProcessRecord, **note: Any) -> None:
        """Write *holder* and *note* into the file."""
        data = json.dumps({**holder.to_json(), **note}).encode()
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, data, 0)

    def close(self) -> None:
        """Give the lock back, unless another process has the descriptor, too."""
        os.close(self.descriptor)


def holder_of(path: Path) -> ProcessRecord | None:
    """Return the process that last wrote itself into the lock file at *path*; None if the file does not tell."""
    with suppress(OSError):
        return ProcessRecord.from_json(_parsed(path.read_text(encoding="utf-8", errors="replace")))
    return None


def _take(descriptor: int, wait_s: float) -> None:
    for _ in attempts(wait_s, _PAUSE_S):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    raise LockHeldError(os.pread(descriptor, _LONGEST, 0).decode(errors="replace"))


def _is_at(path: Path, descriptor: int) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _parsed(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        parsed = json.loads(text)
        return parsed if isinstance(parsed, dict) else {}
    return {}
