"""One supervisor per run."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import PortTakenError, RunLockedError, RunTakenError, StorageError
from elasticflow.launcher.journal.run_lock import locked
from elasticflow.run_folder import RunFolder
from elasticflow.system.file_lock import holder_of
from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from pathlib import Path


def test_second_launch_of_a_running_run_is_refused(tmp_path: Path) -> None:
    """The holder's process is named, and how to stop it; once it is gone the run can continue."""
    folder = RunFolder.of(tmp_path, "small", "run")
    with locked(folder):
        with pytest.raises(RunLockedError) as refused, locked(folder):
            pass
        assert (
            f"run run is running (process {os.getpid()} on {socket.gethostname()})\n"
            f"  help: wait for it, or stop it: kill -TERM {os.getpid()}"
        ) == str(refused.value)
    with locked(folder):
        assert ProcessRecord.of() == holder_of(folder.lock)


def test_lock_held_for_an_instant_is_waited_for(tmp_path: Path) -> None:
    """`status` takes it to see whether anybody holds it: no reason to refuse."""
    folder = RunFolder.of(tmp_path, "small", "run")
    folder.path.mkdir(parents=True)
    descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)

    def look() -> None:
        time.sleep(0.03)
        os.close(descriptor)

    looking = threading.Thread(target=look)
    looking.start()
    with locked(folder):
        pass
    looking.join()


def test_lock_leaves_the_number_of_its_last_holder_only(tmp_path: Path) -> None:
    """A longer number of an earlier holder does not shine through."""
    folder = RunFolder.of(tmp_path, "small", "run")
    folder.path.mkdir(parents=True)
    folder.lock.write_text("1" * 1000)
    with locked(folder):
        assert ProcessRecord.of() == holder_of(folder.lock)


def test_run_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "runs").write_text("a file")
    folder = RunFolder.of(tmp_path, "small", "run")
    with pytest.raises(StorageError) as refused, locked(folder):
        pass

    assert f"cannot make the run folder {folder.path}: Not a directory" == refused.value.message


def _refuse(folder: RunFolder, made: str) -> None:
    """Refuse a launch that has made something in its run folder."""
    with locked(folder):
        (folder.path / made).mkdir()
        raise PortTakenError("taken")


def test_a_launch_that_is_refused_leaves_no_run_folder(tmp_path: Path) -> None:
    """One that it made goes, with the empty folders above; one that was there stays, and so does what began."""
    folder = RunFolder.of(tmp_path, "small", "run")
    with pytest.raises(PortTakenError):
        _refuse(folder, "logs")
    assert [] == list(tmp_path.iterdir())

    with locked(folder):
        pass
    with pytest.raises(PortTakenError):
        _refuse(folder, "logs")
    assert folder.lock.exists()

    begun = RunFolder.of(tmp_path, "small", "begun")
    with pytest.raises(PortTakenError):
        _refuse(begun, "generations")
    assert begun.lock.exists()


def test_lock_of_a_folder_that_was_removed_meanwhile_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for a launch that was refused locks the file that is there, not the one that is gone."""
    folder = RunFolder.of(tmp_path, "small", "run")
    taken: list[int] = []
    flock = fcntl.flock

    def locking(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if not taken:
            folder.lock.unlink()
        taken.append(descriptor)

    monkeypatch.setattr(fcntl, "flock", locking)
    with locked(folder):
        assert 2 == len(taken)
        assert os.path.samestat(os.fstat(taken[1]), folder.lock.stat())


def test_a_lock_file_that_is_not_the_one_that_was_locked_is_noticed(tmp_path: Path) -> None:
    """Removed, or replaced and locked by another launch; the run folder of that one stays."""
    folder = RunFolder.of(tmp_path, "small", "run")
    with locked(folder) as lock:
        lock.require_held()
        folder.lock.unlink()
        with pytest.raises(RunTakenError, match="/lock was removed, so another launch can take the run"):
            lock.require_held()
        with locked(folder) as other:
            other.require_held()
            with pytest.raises(RunTakenError, match="is not the file that this launch locked"):
                lock.require_held()


def _lose_the_lock(folder: RunFolder) -> None:
    """Find that the lock is gone, while it is held."""
    with locked(folder) as lock:
        folder.lock.unlink()
        lock.require_held()


def test_a_launch_whose_lock_is_gone_removes_nothing(tmp_path: Path) -> None:
    """The run folder may be another launch's by then."""
    folder = RunFolder.of(tmp_path, "small", "run")
    with pytest.raises(RunTakenError):
        _lose_the_lock(folder)
    assert folder.path.is_dir()
