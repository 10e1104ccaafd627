"""One supervisor per run: the lock of a run folder (floor 3)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from typing import TYPE_CHECKING

from elasticflow.errors import RunLockedError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.run_folder import RunFolder


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock; the kernel gives it back when this process ends, however it ends.

    Raises:
        RunLockedError: another process holds it.
        StorageError: the run folder cannot be made.
    """
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StorageError(
            f"cannot make the run folder {folder.path}: {error.strerror}",
            "check that the project is writable",
        ) from error
    try:
        if not _take(descriptor):
            holder = os.pread(descriptor, 32, 0).decode() or "unknown"
            raise RunLockedError(
                f"run {folder.run_id} is running (process {holder})",
                f"wait for it, or stop it: kill -TERM {holder}",
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Return whether the lock was had; `status` holds it for an instant to see whether anybody does."""
    for _ in range(5):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False
