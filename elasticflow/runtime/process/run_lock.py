"""Lock that admits one group per run folder under plain `python` and torchrun, where no supervisor holds it."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING

from elasticflow.errors import StorageError
from elasticflow.system import forked_children
from elasticflow.system.file_lock import LOOK_S, FileLock, LockHeldError

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder
    from elasticflow.runtime.process.identity import Identity

# A killed process gives the lock back within this time, however much memory it had.
_DYING_S = 10.0
# Errors of file systems without locks: there the fence decides (`snapshots/writer/committer.py`).
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def hold(identity: Identity) -> None:
    """Lock the run folder until this process ends, if it is rank 0 and no supervisor holds that lock.

    Raises:
        RunLockedError: another start of the run is alive; the message names its process and machine.
        StorageError: the run folder cannot be written.
    """
    if identity.rank != 0 or identity.started_by == "launcher":
        return
    folder = identity.run_folder
    try:
        lock = _take(folder)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return
        raise StorageError(
            f"cannot write the run folder {folder.path}: {error.strerror}",
            "check that it is writable, or name another one: elasticflow.join(folder=...)",
        ) from error
    forked_children.own(lock.descriptor)


def _take(folder: RunFolder) -> FileLock:
    deadline = time.monotonic() + _DYING_S
    while True:
        try:
            return FileLock.take(folder.lock)
        except LockHeldError as held:
            holder = held.holder
            is_dying = holder is None or (holder.is_on_this_machine and not holder.is_alive)
            if not is_dying or time.monotonic() > deadline:
                raise held.refusal(f"the run in {folder.path}") from None
        time.sleep(LOOK_S)
