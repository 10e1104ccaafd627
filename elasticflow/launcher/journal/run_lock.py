"""One supervisor per run: the lock of a run folder."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

from elasticflow.errors import NOT_STARTED, ElasticflowError, RunTakenError, StorageError
from elasticflow.system import records
from elasticflow.system.file_lock import FileLock, LockHeldError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.run_folder import RunFolder


class RunLock:
    """The lock of a run that this process holds."""

    def __init__(self, folder: RunFolder, descriptor: int) -> None:
        self._path = folder.lock
        self._locked = os.fstat(descriptor)

    def require_held(self) -> None:
        """Return if the run's lock file is still the file that was locked.

        Another launch locks a new file where the old one was removed or replaced, and both would write the run's records.

        Raises:
            RunTakenError: the lock file is another file, or gone.
        """
        try:
            if os.path.samestat(self._locked, self._path.stat()):
                return
            why = "is not the file that this launch locked: another launch may have the run"
        except (FileNotFoundError, NotADirectoryError):
            why = "was removed, so another launch can take the run"
        except OSError:  # of a file system that does not answer nothing is known
            return
        raise RunTakenError(
            f"the launch ended and writes no more: {self._path} {why}",
            "leave the lock file where it is: it is free once its process has ended; `elasticflow status` shows the run",
        )


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[RunLock]:
    """Hold the run's lock; the kernel gives it back when this process ends, however it ends.

    A run folder that was made for this, and whose launch is refused before it begins, is removed again.

    Raises:
        RunLockedError: another process holds it.
        RecordError: the lock's path holds no file, or a file that may not be used.
        StorageError: the run folder cannot be made.
    """
    is_new = not folder.path.exists()
    lock = _lock(folder)
    try:
        yield RunLock(folder, lock.descriptor)
    except ElasticflowError as error:
        if is_new and error.exit_code == NOT_STARTED:
            _remove(folder)
        raise
    finally:
        lock.close()


def _lock(folder: RunFolder) -> FileLock:
    """Lock the run and return the lock."""
    records.require_usable([folder.lock], ())
    try:
        return FileLock.take(folder.lock)
    except LockHeldError as held:
        raise held.refusal(f"run {folder.run_id}") from None
    except OSError as error:
        raise StorageError(
            f"cannot make the run folder {folder.path}: {error.strerror}",
            "check that the project is writable",
        ) from error


def _remove(folder: RunFolder) -> None:
    """Remove a run folder in which nothing has begun, and the job's and the project's folder of runs if they are empty."""
    if (folder.path / "generations").exists():
        return
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.path.parent.rmdir()
        folder.path.parent.parent.rmdir()
