"""What ssh starts on a host: one node of a run on a machine, and no signal to anybody else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import INTERRUPTED, NOT_STARTED
from elasticflow.launcher.machines import remote
from elasticflow.launcher.machines.remote import CANCELLED, Order
from elasticflow.system.file_lock import FileLock
from elasticflow.system.process_record import ProcessRecord

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")


@pytest.fixture
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the run."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def order(folder: Path, host: str, launch: str) -> Order:
    """Return the order of a node that ends by itself at once."""
    return Order(str(folder), ("--version",), {}, "job/run", 0.0, host, launch)


def started() -> subprocess.Popen[str]:
    """Return what ssh starts."""
    program = [sys.executable, "-m", "elasticflow.launcher.machines.remote"]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ordered(what: Order) -> tuple[int, str]:
    """Return the exit code of what ssh starts, and all that it says; its standard input ends after the order."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow.launcher.machines.remote"],
        input=what.to_line(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout


def test_process_of_another_machine_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping: subprocess.Popen[bytes]
) -> None:
    """Hosts may share their folder for temporary files: the number in the lock is of another machine's process."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(remote, "_ENDING_S", 0.0)
    what = order(tmp_path, "b", "two")
    elsewhere = ProcessRecord(sleeping.pid, "another-host", "another-boot", 1)
    lock = FileLock.take(remote.lock_path(what))
    lock.write(elsewhere, node="a", launch="one")
    started = time.monotonic()

    def give_up(seconds: float) -> None:
        if time.monotonic() > started + 1:
            lock.close()
        else:
            os.sched_yield()

    monkeypatch.setattr(time, "sleep", give_up)
    taken = remote._take_lock(what, lambda: False)
    assert isinstance(taken, FileLock)
    taken.close()
    assert sleeping.poll() is None


def test_machines_that_share_a_folder_lock_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on NFS holds for all machines; two of them are two hosts of a run."""
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    here = remote.lock_path(order(tmp_path, "a", "one"))
    monkeypatch.setattr(remote, "boot_id", lambda: "another")
    assert here != remote.lock_path(order(tmp_path, "b", "one"))


def test_machine_and_folder_under_two_names_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping: subprocess.Popen[bytes]
) -> None:
    """The second name is told with the first, and nobody is signalled."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    path = remote.lock_path(order(tmp_path, "a", "one"))
    lock = FileLock.take(path)
    lock.write(ProcessRecord.of(sleeping.pid), node="a", launch="one")
    code, said = ordered(order(tmp_path, "b", "one"))
    lock.close()

    assert NOT_STARTED == code
    assert "error: b and a are the same machine" in said
    assert f"process {sleeping.pid} on" in said
    assert sleeping.poll() is None


def test_node_that_lost_its_connection_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked to leave, and its machine's next node begins."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    what = order(tmp_path, "a", "one")
    lock = FileLock.take(remote.lock_path(what))
    node = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=(lock.descriptor,)
    )
    lock.write(ProcessRecord.of(node.pid), node="a", launch="one")
    lock.close()

    with started() as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(what.to_line())
        process.stdin.flush()
        asked, begun = process.stdout.readline(), process.stdout.readline()
    assert f"process {node.pid} on" in asked
    assert begun.startswith("a node on")
    assert -signal.SIGTERM == node.wait(60)


def test_process_whose_connection_is_gone_waits_for_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleeping: subprocess.Popen[bytes]
) -> None:
    """The node that has the lock next is that of a later connection, and would be asked to leave."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    what = order(tmp_path, "a", "one")
    lock = FileLock.take(remote.lock_path(what))  # of a process that has not begun its node yet
    code, said = ordered(what)
    lock.write(ProcessRecord.of(sleeping.pid), node="a", launch="one")
    lock.close()

    assert (INTERRUPTED, "") == (code, said)
    assert sleeping.poll() is None


def test_the_last_words_of_a_node_are_passed_on(tmp_path: Path) -> None:
    """It may print faster than the connection takes it, as at its end."""
    prints = "print('line\\n' * 9999 + 'last words')"
    program = f"""if True:
        import subprocess, sys
        from elasticflow.launcher.machines import remote
        remote._start = lambda order, lock: subprocess.Popen(
            [sys.executable, "-c", {prints!r}], stdout=subprocess.PIPE
        )
        sys.exit(remote.main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdin is not None
        assert started.stdout is not None
        started.stdin.write(order(tmp_path, "a", "one").to_line())
        started.stdin.flush()
        lines = started.stdout.read().splitlines()
    assert lines[1:] == ["line"] * 9999 + ["last words"]


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_run_that_was_cancelled_is_not_to_be_started_again(tmp_path: Path, *, is_cancelled: bool) -> None:
    """A node that was asked to leave its host alone exits with the same code, and is started again."""
    program = """if True:
        import subprocess, sys
        from elasticflow.launcher.machines import remote
        remote._start = lambda order, lock: subprocess.Popen(["sh", "-c", "exit 75"], stdout=subprocess.PIPE)
        sys.exit(remote.main())
    """
    if is_cancelled:
        cancel = tmp_path / "runs" / "job" / "run" / "cancel"
        cancel.parent.mkdir(parents=True)
        cancel.touch()
    line = order(tmp_path, "a", "one").to_line()
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as node:
        assert node.stdin is not None
        node.stdin.write(line)
        node.stdin.flush()  # its end would be that of the connection, at which the node is asked to leave
        assert node.wait(60) == (CANCELLED if is_cancelled else INTERRUPTED)
