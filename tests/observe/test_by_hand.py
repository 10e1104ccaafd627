"""A run that plain python started: views read what rank 0 has logged, and commands that need a supervisor say so."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.cli.main import call
from elasticflow.errors import RunNotFoundError
from elasticflow.observe.by_hand import RunByHand
from elasticflow.observe.records import read
from elasticflow.observe.runs import find_run, list_runs
from elasticflow.observe.status import read_status
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

NAME = "000000000004-0001-0000000a"


def line(generation: int, event: str, step: int, /, **fields: Any) -> dict[str, Any]:
    """Return a line of rank 0's log."""
    common = {
        "origin": events.OURS,
        "job": "hand",
        "run_id": "by-hand",
        "node": "0",
        "rank": 0,
        "level": "info",
    }
    at = f"2026-11-23T10:{generation:02d}:{step:02d}Z"
    return {**common, "timestamp": at, "event": event, "generation": generation, "step": step, **fields}


def steps(generation: int, first: int, last: int) -> list[dict[str, Any]]:
    """Return the lines of these steps."""
    return [
        line(generation, events.STEP, n, epoch=0, samples=8 * n, loss=generation + n / 10, time=float(n))
        for n in range(first, last + 1)
    ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the folder of a run whose first start was killed after step 7, and whose second reached step 6 so far."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = RunFolder.of(tmp_path, "hand", "by-hand")
    (run.path / "generations").mkdir(parents=True)
    committed = line(1, events.SNAPSHOT_COMMITTED, 4, name=NAME, bytes=1, seconds=0.1, trigger="steps")
    first = [
        line(1, events.TRAINING_STARTED, 0, steps=10, epoch=0),
        *steps(1, 1, 4),
        committed,
        *steps(1, 5, 7),
    ]
    measured = line(2, events.EVALUATION, 5, epoch=0, eval={"loss": 0.5}, best=None)
    told = {"origin": "own", "event": "hello", "timestamp": "2026-11-23T10:02:06Z", "level": "info"}
    second = [
        line(2, events.TRAINING_STARTED, 4, steps=10, epoch=0),
        *steps(2, 5, 5),
        measured,
        *steps(2, 6, 6),
        told,
    ]
    for generation, lines in enumerate((first, second), 1):
        log = run.rank_log(generation, 0)
        log.parent.mkdir(parents=True)
        log.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return run


def test_each_step_counts_once(folder: RunFolder) -> None:
    """Lines beyond the step from which the second start continued are those of steps done again."""
    run = find_run(folder.path.parents[2], "by-hand", by_hand=True)
    assert isinstance(run, RunByHand)
    lines = list(read(run.metrics))
    assert [each["step"] for each in lines] == [1, 2, 3, 4, 5, 5, 6]
    assert [each["generation"] for each in lines if "eval" not in each] == [1, 1, 1, 1, 2, 2]
    assert [each["step"] for each in read(run.metrics_redone)] == [5, 6, 7]
    with folder.rank_log(2, 0).open("a") as log:
        log.write("".join(json.dumps(each) + "\n" for each in steps(2, 7, 7)))
    assert [each["step"] for each in read(run.metrics)][-1] == 7


def test_status(folder: RunFolder) -> None:
    """What is known without a supervisor; a run whose last line says so is finished."""
    status = read_status(find_run(folder.path.parents[2], str(folder.path), by_hand=True))
    assert (status.status, status.step, status.steps, status.loss) == ("interrupted", 6, 10, 2.6)
    assert (status.restarts, status.snapshot, status.evaluation) == (1, NAME, {"loss": 0.5})
    with folder.rank_log(2, 0).open("a") as log:
        log.write(json.dumps(line(2, events.TRAINING_FINISHED, 10, epoch=1)) + "\n")
    status = read_status(find_run(folder.path.parents[2], "hand", by_hand=True))
    assert (status.status, status.step) == ("finished", 10)


def test_what_needs_a_supervisor_says_so(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    """By path, id or name; it is not taken for the newest run either."""
    for text in (str(folder.path), "by-hand", "hand"):
        with pytest.raises(RunNotFoundError, match="no supervisor leads it, and no job is recorded"):
            find_run(folder.path.parents[2], text)
    assert list_runs(folder.path.parents[2]) == []
    assert call(["resume", "hand"]) == 2
    assert "the command that started it continues with it" in capsys.readouterr().err
    assert call(["status", "hand", "--follow"]) == 2
    assert "elasticflow logs hand --follow" in capsys.readouterr().err
    assert call(["cancel"]) == 2
    assert '"hand" was started without `elasticflow run`' in capsys.readouterr().err


def test_an_exception_is_a_failure_until_the_next_start(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a run of a supervisor: `status` and `why` show its error, and its own frames."""
    error, frame = "ValueError: sample 7 is broken", '  File "loop.py", line 9, in <module>\n    step()\n'
    traceback = f"Traceback (most recent call last):\n{frame}{error}\n"
    raised = line(2, events.WORKER_RAISED, 7, **{"class": "user_error"}, error=error, traceback=traceback)
    with folder.rank_log(2, 0).open("a") as log:
        log.write(json.dumps(raised) + "\n")
    assert call(["why", "hand"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("hand by-hand  failed, 1 failure\n")
    assert f"\nrank 0: {error}\n  Traceback" in told
    assert '    File "loop.py", line 9' in told
    assert call(["status", "hand", "--exit-code"]) == 1
    shown = capsys.readouterr().out
    assert f"error: rank 0: {error}\n" in shown
    assert "\n  step        7 of " in shown
    again = folder.rank_log(3, 0)
    again.parent.mkdir()
    again.write_text(json.dumps(line(3, events.TRAINING_STARTED, 4, steps=10, epoch=0)) + "\n")
    status = read_status(find_run(folder.path.parents[2], "hand", by_hand=True))
    assert (status.status, status.verdict) == ("interrupted", None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("status", "runs/hand/by-hand"), "launch      by hand, without a supervisor; generation 2"),
        (("status",), "continue with: the command that started it"),
        (("metrics", "runs/hand/by-hand"), "2.6000"),
        (("logs", "by-hand"), "hello"),
        (("why", "hand"), "nothing went wrong"),
        (("runs", "list"), "by-hand"),
        (("snapshots", "list", "hand"), "no snapshots of hand by-hand"),
        (("report", "hand"), "wrote runs/hand/by-hand/report.html"),
    ],
)
def test_commands_that_show_it(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    """All that look at a run; nothing but the report is written into its folder."""
    before = set(folder.path.rglob("*"))
    assert call(list(arguments)) == 0
    assert told in "".join(capsys.readouterr())
    assert {path.name for path in {*folder.path.rglob("*")} - before} <= {"report.html"}
