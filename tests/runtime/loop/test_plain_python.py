"""Scripts under plain python: what they fork, their group of one, and a second start, as real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.errors import ANSWER_IS_NO, FINISHED, NOT_STARTED
from elasticflow.system.file_lock import holder_of
from tests.forked import ROOT
from tests.launcher.conftest import is_alive, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.forked import ForkedPrograms, Program

PROGRAM = Path(__file__).parents[1] / "programs" / "plain_python.py"
LIMIT_S = 90.0
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture
def start(tmp_path: Path, forked: ForkedPrograms) -> Iterator[Callable[..., Program]]:
    """Return what starts the program in a run folder of that name."""
    started: list[Program] = []

    def begin(folder: str, *arguments: str) -> Program:
        words = ("--folder", str(tmp_path / folder), *arguments)
        started.append(forked.start(PROGRAM, *words, environment=ENVIRONMENT, cwd=tmp_path))
        return started[-1]

    yield begin
    for program in started:
        program.kill()


def is_training(folder: Path) -> bool:
    """Return whether a snapshot is committed there."""
    return any(folder.glob("snapshots/*/MANIFEST.json"))


def test_pools_end_and_a_group_of_one_is_there(start: Callable[..., Program], tmp_path: Path) -> None:
    """A pool in a dataset's constructor, Process.terminate, all_reduce, barrier, DistributedDataParallel; then a second start."""
    told = ""
    for _ in range(2):
        ended = start("run")
        code, told = ended.wait(LIMIT_S), ended.stderr.read_text()
        assert FINISHED == code, told
    assert "continues after step 4" in told
    assert is_training(tmp_path / "run")


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells what a process has open")
def test_children_hold_nothing_of_a_run_and_end_with_it(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    """Of a killed process: the child of its main thread ends, another thread's lives on, and the run continues at once."""
    run = tmp_path / "run"
    process = start("run", "--forks", str(tmp_path), "--steps", "100000", "--pause", "0.05")
    children: dict[str, dict[str, Any]] = {}
    for name in ("main", "thread"):
        wait_until((tmp_path / name).exists, LIMIT_S)
        children[name] = json.loads((tmp_path / name).read_text())
    try:
        for child in children.values():
            assert [] == [
                what for what in child["opened"] if what.startswith("socket:") or what.endswith("/lock")
            ]
            assert not child["ignores"]
        second = start("run")
        assert NOT_STARTED == second.wait(LIMIT_S)
        told = second.stderr.read_text()
        assert f"is running (process {process.pid} on " in told
        assert "Traceback" not in told

        wait_until(lambda: is_training(run), LIMIT_S)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
        wait_until(lambda: not is_alive(children["main"]["pid"]), LIMIT_S)
        third = start("run", "--steps", "100000", "--pause", "0.05")
        wait_until(
            lambda: (holder := holder_of(run / "lock")) is not None and holder.pid == third.pid, LIMIT_S
        )
        assert is_alive(children["thread"]["pid"])
    finally:
        for child in children.values():
            if is_alive(child["pid"]):
                os.kill(child["pid"], signal.SIGKILL)


def test_run_that_was_started_elsewhere_ends_at_its_first_fenced_snapshot(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    """Where no lock is seen, as on another host: the older one says why, without `finished` and without a traceback."""
    store = ("--snapshots", str(tmp_path / "store"))
    older = start("older", *store, "--steps", "100000", "--pause", "0.05")
    wait_until(lambda: any(tmp_path.glob("store/by-hand/snapshots/[0-9]*")), LIMIT_S)
    newer = start("newer", *store, "--steps", "100000", "--pause", "0.05")
    code = older.wait(LIMIT_S)
    told = older.stderr.read_text()
    assert ANSWER_IS_NO == code, told
    assert "error: this run was started a second time, and continues there (generation 2, process " in told
    assert "finished" not in told
    assert "Traceback" not in told
    assert newer.poll() is None
