"""`elasticflow runs rm` and `prune`: what is shown goes, whole, and nothing else."""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

Ran = tuple[int, str, str]
DAY_S = 86_400


@pytest.fixture
def ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Return a function that runs `elasticflow runs` in a project with five runs of two jobs."""
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    for age, job, run_id, status in (
        (1, "a", "new", "finished"),
        (2, "a", "middle", "failed"),
        (40, "a", "old", "finished"),
        (3, "b", "broken", "failed"),
        (50, "b", "ancient", "interrupted"),
    ):
        write(job, run_id, status, age)

    def run(*arguments: str) -> Ran:
        code = call(["runs", *arguments])
        return code, *capsys.readouterr()

    return run


def write(job: str, run_id: str, status: str, days: float) -> Path:
    """Make a run that gave its last sign of life so many days ago."""
    folder = Path("runs", job, run_id)
    folder.mkdir(parents=True)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - days * DAY_S))
    state = {"status": status, "job": job, "run_id": run_id, "step": 7, "started": at, "updated": at}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "metrics.jsonl").write_text("x" * 1000)
    return folder


def left() -> set[str]:
    """Return the ids of the runs that are there."""
    return {path.name for path in Path("runs").glob("*/*")}


ALL = {"new", "middle", "old", "broken", "ancient"}


def test_what_is_named_goes(ran: Callable[..., Ran]) -> None:
    """Folder and all; a job's folder goes with its last run; each is named and weighed first."""
    code, out, err = ran("rm", "old", "broken", "--dry-run")
    assert (code, err) == (0, "")
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["old", "a", "finished"],
        ["broken", "b", "failed"],
    ]
    assert left() == ALL
    assert ran("rm", "old", "broken", "ancient", "--yes")[1].splitlines()[-1].startswith("removed 3 runs, 3.")
    assert left() == {"new", "middle"}
    assert {path.name for path in Path("runs").iterdir()} == {"a"}


def test_nobody_is_asked_where_nobody_is(ran: Callable[..., Ran]) -> None:
    """And nothing goes."""
    code, _, err = ran("rm", "old")
    assert code == 2
    assert "give --yes, or --dry-run to look only" in err
    code, _, err = ran("rm", "none")
    assert (code, left()) == (2, ALL)


def test_a_run_that_is_running_stays(ran: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch) -> None:
    """With all others that were named beside it, and its files, which come and go, are not looked at; prune passes it over."""

    def gone(*_: object) -> list[Path]:
        raise FileNotFoundError

    with Path("runs/a/old/lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with monkeypatch.context() as busy:
            busy.setattr(Path, "rglob", gone)
            code, _, err = ran("rm", "old", "broken", "--yes")
        assert code == 2
        assert "help: end it first: elasticflow cancel old" in err
        assert left() == ALL
        assert ran("prune", "--keep", "1", "--yes")[0] == 0
    assert left() == {"new", "old", "broken"}


def test_pinned_snapshots_keep_a_run(ran: Callable[..., Ran]) -> None:
    """Unless it is said that they may go, too."""
    pin, copy = (Path("runs/a/old", below, "pins/s.json") for below in ("", "logged"))
    copy.parent.mkdir(parents=True)
    copy.write_text("{}")
    pin.parent.mkdir()
    pin.write_text("{}")
    code, _, err = ran("rm", "old", "--yes")
    assert code == 2
    assert "has 1 pinned snapshot\nhelp: they go with it: say --pinned, or unpin them" in err
    assert ran("prune", "--older-than", "30 d", "--yes")[0] == 0
    assert left() == ALL - {"ancient"}
    assert ran("rm", "old", "--yes", "--pinned")[0] == 0
    assert left() == ALL - {"ancient", "old"}


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        (("--keep", "1"), {"middle", "old", "ancient"}),
        (("a", "--keep", "0"), {"new", "middle", "old"}),
        (("--older-than", "30 d"), {"old", "ancient"}),
        (("--older-than", "36 h", "--status", "failed"), {"middle", "broken"}),
        (("--status", "failed", "--status", "interrupted", "--keep", "1"), {"middle", "ancient"}),
        (("--older-than", "90 d"), set()),
    ],
)
def test_runs_that_meet_all_rules_go(ran: Callable[..., Ran], rules: tuple[str, ...], gone: set[str]) -> None:
    """The newest of each job count as such, whatever else they are."""
    assert ran("prune", *rules, "--yes")[0] == 0
    assert left() == ALL - gone


def test_rules_that_say_nothing_are_refused(ran: Callable[..., Ran]) -> None:
    """No rule at all, or no time."""
    assert "say which runs" in ran("prune", "--yes")[2]
    assert 'must be a time, like "30 s"' in ran("prune", "--older-than", "soon", "--yes")[2]
    assert left() == ALL


def test_snapshots_elsewhere_stay_and_are_named(ran: Callable[..., Ran]) -> None:
    """They may be shared, and cost money: nobody is to forget them."""
    launch = Path("runs/a/old/launches/0001")
    launch.mkdir(parents=True)
    (launch / "job.json").write_text(json.dumps({"job": {"snapshots": {"uri": "s3://bucket/a"}}}))
    out = ran("rm", "old", "--dry-run")[1]
    assert "old: its snapshots at s3://bucket/a/old/ stay" in out


def test_listing_needs_no_word(ran: Callable[..., Ran]) -> None:
    """`runs`, `runs list`, `runs JOB` and options alone; help shows them all."""
    assert ran() == ran("list")
    assert ran("a") == ran("list", "a")
    assert len(json.loads(ran("--format", "json")[1])) == 5
    help_text = ran("--help")[1]
    assert all(word in help_text for word in ("list", "rm", "prune"))


def test_a_folder_that_cannot_be_removed_is_no_run_any_more(
    ran: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it is named."""

    def refuse(path: os.PathLike[str]) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", refuse)
    code, _, err = ran("rm", "old", "--yes")
    assert code == 2
    assert "could not be removed: [Errno 16]" in err
    assert len(json.loads(ran("--format", "json")[1])) == 4
