"""Fault points: what a clause does, and that the list in the module is the truth about the source."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import elasticflow
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(elasticflow.__file__).parent
POINT = "commit.before_manifest"
SCRIPT = """
import os
from elasticflow.system import fault_injection
fault_injection.arm(os.environ)
for number in range(1, 4):
    print(number, flush=True)
    fault_injection.reach("commit.before_manifest")
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    """Leave nothing armed behind."""
    yield
    fault_injection.arm({})


def test_every_listed_point_is_reached_somewhere_and_vice_versa() -> None:
    """POINTS names exactly the points in the source, so that a campaign over it leaves none out."""
    reached = {
        name
        for path in PACKAGE.rglob("*.py")
        if path.name != "fault_injection.py"
        for name in re.findall(r'fault_injection\.reach\(\s*"([^"]+)"', path.read_text(encoding="utf-8"))
    }
    assert sorted(fault_injection.POINTS) == sorted(reached)


@pytest.mark.parametrize("main", ["snapshots/writer/main.py", "runtime/worker.py"])
def test_processes_that_reach_points_arm_them(main: str) -> None:
    """Both kinds of processes that take part in a save read the variable."""
    assert "fault_injection.arm(os.environ)" in (PACKAGE / main).read_text(encoding="utf-8")


def test_unarmed_point_does_nothing() -> None:
    """Without the variable, reaching a point has no effect."""
    fault_injection.arm({})
    fault_injection.reach(POINT)


def test_raises_the_error_at_the_arrivals_asked_for() -> None:
    """`@2-3`: the second and the third arrival fail with that errno, the others do not."""
    fault_injection.arm({fault_injection.VARIABLE: f"{POINT}=raise:ENOSPC@2-3"})
    seen: list[int | None] = []
    for _ in range(4):
        try:
            fault_injection.reach(POINT)
            seen.append(None)
        except OSError as error:
            seen.append(error.errno)
    assert [None, errno.ENOSPC, errno.ENOSPC, None] == seen


def test_stalls() -> None:
    """`stall:S` delays its thread and continues."""
    fault_injection.arm({fault_injection.VARIABLE: f"{POINT}=stall:0.2@1"})
    began = time.monotonic()
    fault_injection.reach(POINT)
    fault_injection.reach(POINT)
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize(
    ("clause", "acts"),
    [("rank=1", True), ("rank=0", False), ("generation=3", True), ("rank=1 generation=2", False)],
)
def test_acts_in_the_process_meant(clause: str, acts: bool) -> None:
    """Rank and generation are those of the environment."""
    environment = {"RANK": "1", "ELASTICFLOW_GENERATION": "3"}
    fault_injection.arm({**environment, fault_injection.VARIABLE: f"{POINT}=raise:EIO {clause}"})
    if acts:
        with pytest.raises(OSError, match="on cue"):
            fault_injection.reach(POINT)
    else:
        fault_injection.reach(POINT)


def test_a_cue_is_for_one_process(tmp_path: Path) -> None:
    """Nothing before the cue; who takes it leaves its process id, and whoever comes later is spared."""
    cue = tmp_path / "cue"
    environment = {fault_injection.VARIABLE: f"{POINT}=raise:EIO cue={cue}, storage.write=raise:EIO"}
    fault_injection.arm(environment)
    fault_injection.reach(POINT)
    cue.touch()
    with pytest.raises(OSError, match="on cue"):
        fault_injection.reach(POINT)
    fault_injection.arm(environment)
    fault_injection.reach(POINT)
    with pytest.raises(OSError, match=r"storage\.write"):
        fault_injection.reach("storage.write")
    assert [f"cue.{os.getpid()}"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize(
    "clause", ["no.such=kill", f"{POINT}=explode", f"{POINT}=stall", f"{POINT}=raise:ENOSUCH", "nonsense"]
)
def test_a_clause_not_understood_is_refused(clause: str) -> None:
    """A typing mistake never makes a test pass for nothing."""
    with pytest.raises(ValueError, match="cannot act on"):
        fault_injection.arm({fault_injection.VARIABLE: clause})


def test_kill_and_stop_are_real(real_processes: None) -> None:
    """`kill` at the second arrival ends the process by SIGKILL there; `stop` halts it until it is continued."""
    environment = {**os.environ, fault_injection.VARIABLE: f"{POINT}=kill@2"}
    killed = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, timeout=100, check=False
    )
    assert (-signal.SIGKILL, b"1\n2\n") == (killed.returncode, killed.stdout)

    environment = {**os.environ, fault_injection.VARIABLE: f"{POINT}=stop@1"}
    with subprocess.Popen([sys.executable, "-c", SCRIPT], env=environment, stdout=subprocess.PIPE) as stopped:
        _, status = os.waitpid(stopped.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        stopped.send_signal(signal.SIGCONT)
        assert b"1\n2\n3\n" == stopped.communicate(timeout=100)[0]
        assert 0 == stopped.returncode
