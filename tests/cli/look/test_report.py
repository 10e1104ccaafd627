"""`elasticflow report`: where it writes, which runs it takes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from tests.observe.hand_made import RUN_ID, make_run

if TYPE_CHECKING:
    from collections.abc import Callable

Ran = tuple[int, str, str]


@pytest.fixture
def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Return a function that runs `elasticflow report` in a project with one run."""
    (tmp_path / "pyproject.toml").touch()
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        code = call(["report", *arguments])
        return code, *capsys.readouterr()

    return run


def case_of_sweep(root: Path, case: str, run_id: str) -> None:
    """Make a run of a case."""
    launch = root / "runs" / f"mnist-{case}" / run_id / "launches" / "0001"
    launch.mkdir(parents=True)
    (launch / "job.json").write_text(json.dumps({"job": {"job": {"name": f"mnist-{case}"}}, "case": case}))


def test_it_lies_in_the_run_folder(ran: Callable[..., Ran]) -> None:
    """Whole, and replaced by the next one; elsewhere where that is asked for."""
    for _ in range(2):
        code, out, err = ran()
        assert (code, err) == (0, "")
        assert out.startswith(f"wrote runs/mnist/{RUN_ID}/report.html (")
    assert ran("mnist", "-o", "there/x.html")[0] == 0
    text = Path("there/x.html").read_text()
    assert text.startswith("<!doctype html>")
    assert "../runs/mnist" in text  # links to logs, from there
    assert text.endswith("</html>")


def test_several_runs_lie_beside_them(ran: Callable[..., Ran]) -> None:
    """In `runs/`."""
    assert ran(RUN_ID, "mnist")[1].startswith("wrote runs/report.html (")
    assert "comparison" in Path("runs/report.html").read_text()


def test_a_sweep_has_the_newest_run_of_each_case(ran: Callable[..., Ran]) -> None:
    """Of that job alone, by the job's name or its file."""
    for case, run_id in (("a", "r1"), ("b", "r1"), ("b", "r2")):
        case_of_sweep(Path(), case, run_id)
    (Path("runs/mnist-b/r2") / "state.json").write_text('{"started": "2026-11-21T00:00:00Z"}')
    code, _, err = ran("--sweep", "mnist", "-o", "x.html")
    assert (code, err) == (0, "")
    text = Path("x.html").read_text()
    assert "2 runs: the newest of each case" in text

    code, _, err = ran("--sweep", "cifar")
    assert code == 2
    assert 'no run of job "cifar" trains a case of a [matrix]' in err
    assert "help: train its cases" in err
    assert ran("mnist", "--sweep", "mnist")[0] == 2


def test_a_place_that_cannot_be_written_is_named(ran: Callable[..., Ran]) -> None:
    """A folder that is a file, a disk that is full, no permission."""
    Path("file").touch()
    code, _, err = ran("-o", "file/x.html")
    assert code == 2
    assert "error: file/x.html cannot be written" in err
    assert "help: choose a place: -o FILE" in err


def test_half_a_character_does_not_cost_the_report(ran: Callable[..., Ran]) -> None:
    """JSON may hold one, and UTF-8 has none: it becomes a question mark."""
    launch = Path("runs/mnist", RUN_ID, "launches", "0001")
    launch.mkdir(parents=True, exist_ok=True)
    (launch / "job.json").write_text('{"job": {"job": {"name": "a"}}, "machine": {"host": "\\ud800"}}')
    code, out, err = ran()
    assert (code, err) == (0, "")
    size = (Path("runs/mnist") / RUN_ID / "report.html").stat().st_size
    assert f"({size / 1000:,.0f} kB)" in out
