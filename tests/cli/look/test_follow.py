"""`elasticflow status --follow`: another terminal sees what the run's own does, and may go at any time."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.observe.hand_made import evaluation, event, make_run

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 60


@pytest.mark.usefixtures("real_processes")
def test_it_tells_what_happened_and_what_happens(tmp_path: Path) -> None:
    """The newest launch from its beginning, then on, until nobody leads the run."""
    (tmp_path / "pyproject.toml").touch()
    folder = make_run(tmp_path)
    first = [
        event(0, "run.started", 0, launch=1, resumed=False, pid=1, torch="2.13.0"),
        event(1, "run.interrupted", 1),
    ]
    second = event(5, "run.started", 1, launch=2, resumed=True, pid=os.getpid(), torch="2.14.0")
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*first, second]))
    (folder / "state.json").write_text(
        json.dumps({"status": "running", "job": "mnist", "run_id": folder.name})
    )
    with (folder / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "elasticflow", "status", "--follow"]
        watching = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        leaving = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out = watching.stdout
        assert out is not None
        assert "torch 2.14.0" in out.readline()
        assert leaving.stdout is not None
        leaving.stdout.readline()
        leaving.send_signal(signal.SIGINT)
        assert leaving.wait(LIMIT_S) == 130
        leaving.stdout.close()
        failed = event(
            6, "worker.failed", 2, rank=1, node="n0", pid=7, class_="crash", error="killed by SIGKILL"
        )
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(failed) + "\n")
        assert "rank 1" in out.readline()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(evaluation(7, 60, 0.98, 0.985)) + "\n")
        assert "accuracy 0.9800" in out.readline()
        new = folder / "logs" / "g0003"
        new.mkdir()
        (new / "rank0.stdout").write_text("hello\n")
        assert "elasticflow logs" in out.readline()
        assert "hello" in out.readline()
        assert watching.poll() is None
    (folder / "state.json").write_text(
        json.dumps({"status": "finished", "job": "mnist", "run_id": folder.name})
    )
    assert watching.wait(LIMIT_S) == 0
    out.close()


@pytest.mark.usefixtures("real_processes")
def test_a_reader_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    """Nothing of the run was touched: no file has changed."""
    (tmp_path / "pyproject.toml").touch()
    folder = make_run(tmp_path)
    before = _states(folder)
    done = subprocess.run(
        [sys.executable, "-m", "elasticflow", "status", "-f"],
        cwd=tmp_path,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0
    assert before == _states(folder)


def _states(folder: Path) -> dict[str, tuple[int, int]]:

    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
