"""What is said of a supervisor that could not say how it ended: known and likely, apart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.journal import post_mortem
from elasticflow.launcher.journal.post_mortem import Ending, Machine, ending_of, explain, machine_of
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

GROUP, WHOLE = "/sys/fs/cgroup/memory.events", "/proc/vmstat"
THEN = Machine("here", "boot-1", 7, 12_300, 1_000.0, {GROUP: 2, WHOLE: 5})
LAST_SIGN = 5_000.0


def found(now: Machine, *, then: Machine | None = THEN, is_logged: bool = False) -> Ending:
    """Return what is said of a supervisor on *then*, silent since `LAST_SIGN`."""
    return explain(then, now, LAST_SIGN, lambda _: is_logged)


@pytest.mark.parametrize(
    ("now", "kind", "known", "likely"),
    [
        (THEN, "killed", "no process was killed for memory", "killed from outside (SIGKILL)"),
        (replace(THEN, memory_kills={}), "killed", "not been started again", "not to be seen here"),
        (
            replace(THEN, memory_kills={GROUP: 3}),
            "out_of_memory",
            "1 process in its control group",
            "one of those",
        ),
        (
            replace(THEN, memory_kills={WHOLE: 9}),
            "out_of_memory",
            "4 processes on this machine",
            "one of those",
        ),
        (
            replace(THEN, init_started=8),
            "container_restarted",
            "the container it ran in",
            "with its container",
        ),
        (replace(THEN, host="there"), "elsewhere", "it ran on here", None),
        (
            replace(THEN, boot_id="boot-2", booted=LAST_SIGN + 60),
            "machine_restarted",
            "again since at",
            "a power cut",
        ),
        (
            replace(THEN, boot_id="boot-2", booted=LAST_SIGN + 3600),
            "machine_restarted",
            "60 min after its last sign of life",
            "or the supervisor was killed before",
        ),
        (
            replace(THEN, boot_id="boot-2", booted=None),
            "machine_restarted",
            "started again since",
            "a power cut",
        ),
    ],
)
def test_what_is_known_and_what_is_likely(now: Machine, kind: str, known: str, likely: str | None) -> None:
    """Another start of the machine is certain, what led to it is not; counts of kills tell less than the log does."""
    ending = found(now)

    assert kind == ending.kind
    assert known in ending.known
    assert (likely is None) == (ending.likely is None)
    assert (likely or "") in (ending.likely or "")


def test_kernels_log_is_certain() -> None:
    """It names the process: nothing is only likely then."""
    ending = found(THEN, is_logged=True)

    assert ("out_of_memory", None) == (ending.kind, ending.likely)


def test_log_is_read_from_the_supervisors_start_on() -> None:
    """Process ids come again: a kill before it began was somebody else's."""
    asked: list[float] = []

    def is_logged(since: float) -> bool:
        asked.append(since)
        return False

    explain(THEN, THEN, LAST_SIGN, is_logged)

    assert [12_300 / os.sysconf("SC_CLK_TCK")] == asked


def test_machine_comes_back_as_it_was_written() -> None:
    """Through state.json."""
    here = Machine.here()

    assert here == machine_of(json.loads(json.dumps(asdict(here))))
    assert here.boot_id is not None
    assert here.process_started is not None


@pytest.mark.parametrize(
    "record", [None, [], {}, {"host": 1}, {"host": "x", "boot_id": 3, "memory_kills": [1]}]
)
def test_what_an_earlier_version_wrote_can_be_read(record: object) -> None:
    """A state without a machine, or with an odd one: that much less is known."""
    machine = machine_of(record)

    assert machine in (None, Machine("x"))
    assert "killed" == found(replace(THEN, host="x"), then=machine).kind


def _killed(folder: RunFolder, **machine: object) -> None:
    """Leave the state of a supervisor that really was killed."""
    folder.path.mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGKILL)
    process.wait()
    record = {**asdict(Machine.here()), **machine}
    state = {"status": "running", "pid": process.pid, "machine": record, "updated": "2026-11-20T10:00:00Z"}
    state["generation"] = 4
    folder.state.write_text(json.dumps(state))


@pytest.mark.usefixtures("real_processes")
def test_kill_and_forged_boot_id_are_told_apart(tmp_path: Path) -> None:
    """A real kill on this very start of the machine; and the same one as if the machine had been started again."""
    killed, rebooted = (RunFolder(tmp_path / "runs" / "job" / name) for name in ("killed", "rebooted"))
    _killed(killed)
    _killed(rebooted, boot_id="5a1f6ad2-0000-4000-8000-000000000000")
    endings = [ending_of(folder) for folder in (killed, rebooted)]

    assert ["killed", "machine_restarted"] == [ending and ending.kind for ending in endings]
    assert [(1795168800.0, 4)] * 2 == [
        ending and (ending.last_seen, ending.in_generation) for ending in endings
    ]


def test_disk_that_is_full_is_the_likelier_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor that cannot write its last word has not been killed; once there is room again nobody can tell."""
    folder = RunFolder(tmp_path / "runs" / "job" / "full")
    folder.path.mkdir(parents=True)
    folder.state.write_text(json.dumps({"status": "running", "machine": asdict(Machine.here())}))
    real = os.statvfs
    room = {"bavail": 0}

    def statvfs(path: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=room["bavail"], f_frsize=real(path).f_frsize)

    monkeypatch.setattr(os, "statvfs", statvfs)
    ending = ending_of(folder)
    assert ending is not None
    assert ("disk_full", "it could write no more") == (ending.kind, ending.likely)
    assert ending.known.endswith("the disk of the run folder is full")
    room["bavail"] = 1 << 20
    ending = ending_of(folder)
    assert ending is not None
    assert "killed" == ending.kind


@pytest.mark.parametrize("state", [None, {"status": "finished"}, {"status": "interrupted"}])
def test_who_said_how_it_ended_is_not_lost(tmp_path: Path, state: dict[str, str] | None) -> None:
    """Nor is a run that never began."""
    folder = RunFolder(tmp_path / "runs" / "job" / "run")
    folder.path.mkdir(parents=True)
    if state is not None:
        folder.state.write_text(json.dumps(state))

    assert ending_of(folder) is None
    assert "machine" == post_mortem.MACHINE
