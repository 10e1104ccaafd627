"""The agent that a command starts before it reads its job file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from pathlib import Path

_MARK = "STARTED_AHEAD_TEST"


def _left(mark: str) -> list[psutil.Process]:
    left = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process)
    return left


@pytest.mark.usefixtures("real_processes")
@pytest.mark.skipif(sys.platform != "linux", reason="its death signal is Linux'")
def test_it_ends_with_a_command_that_launches_nothing(tmp_path: Path) -> None:
    """A job file that is not there: the command says so alone, and no process outlives it."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow", "run", "absent.toml"],
        env={**os.environ, _MARK: mark},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert 2 == done.returncode
    assert "absent.toml" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    deadline = time.monotonic() + 60
    while (left := _left(mark)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [] == left
