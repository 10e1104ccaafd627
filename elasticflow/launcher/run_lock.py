"""One supervisor per run: the lock of a run folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from typing import TYPE_CHECKING

from elasticflow.errors import NOT_STARTED, ElasticflowError, RunLockedError, StorageError
from elasticflow.system import records
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.run_folder import RunFolder

# Seconds for which a command that only looks whether anybody has the lock may hold it.
_STATUS_S = 0.1


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock; the kernel gives it back when this process ends, however it ends.

    A run folder that was made for this, and whose launch is refused before it begins, is removed again.

    Raises:
        RunLockedError: another process holds it.
        RecordError: where the lock should be is no file, or a file that may not be used.
        StorageError: the run folder cannot be made.
    """
    is_new = not folder.path.exists()
    descriptor = _lock(folder)
    try:
        yield
    except ElasticflowError as error:
        if is_new and error.exit_code == NOT_STARTED:
            _remove(folder)
        raise
    finally:
        os.close(descriptor)


def _lock(folder: RunFolder) -> int:
    """Lock the run and return the descriptor of the open lock file."""
    while True:
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            records.require_usable([folder.lock], ())
            descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StorageError(
                f"cannot make the run folder {folder.path}: {error.strerror}",
                "check that the project is writable",
            ) from error
        try:
            _take(folder, descriptor)
            if _is_there(folder, descriptor):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        # A launch that was refused has removed the file in this moment.
        os.close(descriptor)


def _is_there(folder: RunFolder, descriptor: int) -> bool:
    """Return whether the run folder's lock is still the open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), folder.lock.stat())
    return False


def _remove(folder: RunFolder) -> None:
    """Remove a run folder in which nothing has begun, and the job's and the project's folder of runs if they are empty."""
    if (folder.path / "generations").exists():
        return
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.path.parent.rmdir()
        folder.path.parent.parent.rmdir()


def _take(folder: RunFolder, descriptor: int) -> None:
    """Return once the lock is held; `status` holds it for an instant to see whether anybody does.

    Raises:
        RunLockedError: another process keeps it.
    """
    for _ in attempts(_STATUS_S, _STATUS_S / 5):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
    holder = os.pread(descriptor, 32, 0).decode(errors="replace") or "unknown"
    raise RunLockedError(
        f"run {folder.run_id} is running (process {holder})",
        f"wait for it, or stop it: kill -TERM {holder}",
    )
