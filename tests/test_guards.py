"""The guards bite."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

BITTEN = "mark it e2e or integration, or ask for the fixture `real_processes`"
OUTSIDE = Path(__file__).with_name("written-by-a-unit-test.txt")


def test_a_process_is_refused() -> None:
    """A unit test that starts one fails at that line, whatever it would catch."""
    with pytest.raises(pytest.fail.Exception, match="started a process") as caught:
        subprocess.run([sys.executable, "-c", ""], check=False)
    assert BITTEN in str(caught.value)


def test_a_fork_is_refused() -> None:
    """So is a fork, which is how loader processes start."""
    with pytest.raises(pytest.fail.Exception, match="started a process"):
        os.fork()


def test_a_write_outside_is_refused() -> None:
    """Nothing is left in the checkout, by whichever door."""
    with pytest.raises(pytest.fail.Exception, match="wrote outside"):
        OUTSIDE.write_text("x")
    assert not OUTSIDE.exists()


def test_a_write_outside_by_descriptor_is_refused() -> None:
    """The low-level way is seen too."""
    with pytest.raises(pytest.fail.Exception, match="wrote outside"):
        os.open(OUTSIDE, os.O_CREAT | os.O_WRONLY)
    assert not OUTSIDE.exists()


def test_reading_and_temporary_files_are_allowed(tmp_path: Path) -> None:
    """A unit test reads anything, and writes to its own folder and to temporary files."""
    assert "guards bite" in Path(__file__).read_text(encoding="utf-8")
    (tmp_path / "a").write_text("x")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").write_text("x")
    Path(os.devnull).write_text("x")


@pytest.mark.usefixtures("real_processes")
def test_asking_lifts_the_guards() -> None:
    """With the fixture `real_processes` a test may start processes."""
    done = subprocess.run([sys.executable, "-c", "print(1)"], check=True, capture_output=True, text=True)
    assert done.stdout == "1\n"
