"""What a command says when its output does not get where it is sent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
pytestmark = pytest.mark.usefixtures("real_processes")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments", [["guide", "restarts"], ["guide", "--schema", "job"], ["--help"], ["guide", "EF101"]]
)
def test_full_disk_is_told(arguments: list[str]) -> None:
    """Also where all of it still fits the buffer, and only the last flush fails."""
    with FULL.open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "elasticflow", *arguments],
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert (2, "error: the output cannot be written: No space left on device\n") == (
        done.returncode,
        done.stderr,
    )


def test_reader_that_leaves_is_no_error() -> None:
    """Nothing is said of it: `elasticflow guide | head`."""
    command = f"{sys.executable} -m elasticflow guide restarts | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)

    assert (1, "") == (done.stdout.count("\n"), done.stderr)


def test_closed_streams_are_no_error() -> None:
    """Nor do files that are opened later get their numbers: what a process prints would be in them."""
    command = f"{sys.executable} -m elasticflow guide restarts"
    done = subprocess.run(
        ["sh", "-c", f"{command} <&- >&-"], capture_output=True, text=True, check=False, timeout=100
    )
    assert (0, "") == (done.returncode, done.stderr)
    done = subprocess.run(
        ["sh", "-c", f"{command} 2>&- <&-"], capture_output=True, text=True, check=False, timeout=100
    )
    assert (0, True) == (done.returncode, done.stdout.startswith("# "))


def test_signs_that_the_locale_lacks_are_no_error() -> None:
    """A question mark stands for each, such as for the marks of `doctor`."""
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow", "validate", "✓.toml"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert (1, b"") == (done.returncode, done.stderr)
    assert done.stdout.startswith(b"error[EF001]: no such file: ?.toml\n")
