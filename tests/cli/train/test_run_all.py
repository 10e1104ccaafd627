"""Cases of a file with [matrix] on the command line: `plan`, `plan -o`, `run --case`, `run --all`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.cli.main import call
from elasticflow.cli.train import run_all as run_all_module
from elasticflow.cli.train.run_all import run_all
from elasticflow.cli.train.run_options import RunOptions, run_id_of
from elasticflow.errors import CaseError, StorageError
from tests.end_to_end.harness import copy_examples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.launcher.machines.remote import Order
    from elasticflow.run_folder import RunFolder

SWEEP = """extends = "mnist.toml"

[nodes]
max = 2

[matrix.axes]
job.seed = [1, 2]

[matrix.cases.wide]
model.args.width = 64
"""
Ran = tuple[int, str, str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with the example job and a sweep of it, which is also the current folder."""
    copy_examples(tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "jobs" / "sweep.toml").write_text(SWEEP, "utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str], project: Path) -> Callable[..., Ran]:
    """Return a function that runs the command line in the project and returns code, output and errors."""

    def run(*arguments: str) -> Ran:
        code = call(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the signal handlers back that a sweep sets for its process."""
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def test_plan_lists_cases_and_shows_one(ran: Callable[..., Ran]) -> None:
    """Each with what it changes; a case is planned like any job."""
    code, out, _ = ran("plan", "jobs/sweep.toml")
    assert code == 0
    assert out.splitlines()[:6] == [
        "jobs/sweep.toml: 3 cases of one file",
        "",
        "CASE   job.seed  model.args.width",
        "seed1  1         -",
        "seed2  2         -",
        "wide   -         64",
    ]
    assert ran("run", "jobs/sweep.toml", "--all", "--dry-run")[1] == out
    facts = json.loads(ran("plan", "jobs/sweep.toml", "--format", "json")[1])
    assert {"case": "wide", "job": "mnist-wide", "changes": {"model.args.width": 64}} == facts[2]
    assert "mnist-wide" in ran("plan", "jobs/sweep.toml", "--case", "wide")[1]
    assert ran("run", "jobs/sweep.toml", "--case", "seed2", "--dry-run")[0] == 0


@pytest.mark.parametrize("option", ["--deep", "--diff=nightly"])
def test_plan_of_all_cases_ignores_no_option(ran: Callable[..., Ran], option: str) -> None:
    """What concerns one job wants a case."""
    code, out, err = ran("plan", "jobs/sweep.toml", option)
    assert (code, out) == (2, "")
    assert "about one of them, give --case" in err


def test_plan_writes_the_files_of_one_case(ran: Callable[..., Ran], project: Path) -> None:
    """The header says how to make it again; `resume` finds the case in job.json."""
    assert ran("plan", "jobs/sweep.toml", "--case", "seed2", "-o", "build")[0] == 0
    assert (
        "elasticflow plan jobs/sweep.toml --case=seed2 -o DIR" in (project / "build" / "train.py").read_text()
    )
    assert json.loads((project / "build" / "job.json").read_text())["case"] == "seed2"


@pytest.mark.parametrize("command", ["run", "plan -o build", "verify --worlds 1", "verify --faults 5"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("jobs/sweep.toml", "say which one: --case seed1"),
        ("jobs/sweep.toml --case wid", 'did you mean "wide"?'),
        ("jobs/mnist.toml --case seed1", "has no [matrix]"),
    ],
)
def test_commands_that_need_one_job_say_so(
    ran: Callable[..., Ran], command: str, options: str, words: str
) -> None:
    """Exit code 2; the answer names the cases."""
    code, _, err = ran(*command.split(), *options.split())
    assert code == 2
    assert words in err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("jobs/mnist.toml --all", "has no [matrix]: it is one job"),
        ("jobs/sweep.toml --all --case wide", "give it without --case"),
        ("jobs/sweep.toml --all --join host:1", "--join and"),
        ("jobs/sweep.toml --all --node-rank 1", "and --node-rank"),
        (f"jobs/sweep.toml --all --run-id {'x' * 99}", "an id has at most 100 letters"),
        ("jobs/sweep.toml --all --set train.epochs=0", "train.epochs must be at least 1, not 0"),
        ("jobs/sweep.toml --all --set snapshots.uri=${env:NOT_SET_ANYWHERE}", "NOT_SET_ANYWHERE is not set"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_it_begins(
    ran: Callable[..., Ran], project: Path, options: str, words: str
) -> None:
    """Exit code 2, and no run folder."""
    code, _, err = ran("run", *options.split())
    assert (code, words in err) == (2, True), err
    assert not (project / "runs").exists()


def test_a_sweep_leads_alone_whatever_rank_a_variable_names(
    ran: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many programs set $NODE_RANK; `--node-rank` is refused."""
    monkeypatch.setenv("NODE_RANK", "1")
    code, _, err = ran("run", "jobs/sweep.toml", "--all", "--dry-run")
    assert code == 0, err


def test_validate_checks_every_case(ran: Callable[..., Ran], project: Path) -> None:
    """A mistake in one names it."""
    code, out, _ = ran("validate", "jobs/sweep.toml", "--set", "nodes.max=1")
    assert (code, out) == (0, "1 file (3 cases) checked: no problems\n")
    (project / "jobs" / "sweep.toml").write_text(SWEEP.replace("width", "widht"), "utf-8")
    code, out, _ = ran("validate", "jobs/sweep.toml", "--format", "concise")
    assert code == 1
    assert (
        'jobs/sweep.toml:10:12: error[EF204] examples.mnist:Net takes no argument "widht" (case wide)' in out
    )


def test_ids_of_runs_end_in_their_case() -> None:
    """So that cases of one sweep never meet under one snapshots.uri, and a run's own id is understood too."""
    assert run_id_of("tuning", "lr0.1") == "tuning-lr0.1"
    assert run_id_of("tuning-lr0.1", "lr0.1") == "tuning-lr0.1"
    assert run_id_of("tuning", None) == "tuning"
    assert run_id_of(None, "lr0.1").endswith("-lr0.1")
    with pytest.raises(CaseError):
        run_id_of("x" * 90, "y" * 20)


class Trainer:
    """Stands for training: says what becomes of each case, and writes what a run leaves."""

    def __init__(self, **codes: int | BaseException) -> None:
        self.codes = codes
        self.asked: list[str] = []

    def __call__(self, job: LoadedJob, run: RunFolder) -> int:
        """Train one case."""
        assert job.case is not None
        self.asked.append(job.case)
        code = self.codes.get(job.case, 0)
        if isinstance(code, BaseException):
            raise code
        run.launch(1).mkdir(parents=True, exist_ok=True)
        status = {0: "finished", 75: "interrupted"}.get(code, "failed")
        run.state.write_text(json.dumps({"status": status, "step": 5, "steps": 5, "launch": 1}))
        return code


def sweep(train: Trainer) -> int:
    """Run all cases of the project's file with a stand-in for training."""
    return run_all(RunOptions(job_file=Path("jobs/sweep.toml"), run_id="tuning"), train)


@pytest.mark.usefixtures("project", "handlers")
def test_a_failed_case_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither one that could not be started; the exit code tells, and the same command tries those again."""
    refused = StorageError("cannot write there")
    assert sweep(train := Trainer(seed1=3, seed2=refused)) == 1
    assert train.asked == ["seed1", "seed2", "wide"]
    out, err = capsys.readouterr()
    assert "warning: case seed2 was not started: cannot write there" in err
    assert out.splitlines()[-6:] == [
        "CASE   RUN           OUTCOME                       STEP  LOSS  EVALUATION  TIME",
        *(line for line in out.splitlines()[-5:-2]),
        "",
        "try those that failed again with: elasticflow run jobs/sweep.toml --all --run-id tuning",
    ]
    assert [" ".join(line.split()[:4]) for line in out.splitlines()[-5:-2]] == [
        "seed1 tuning-seed1 failed, restart",
        "seed2 - not started",
        "wide tuning-wide finished 5/5",
    ]
    assert sweep(train := Trainer()) == 0
    assert train.asked == ["seed1", "seed2"]
    assert "finished before" in capsys.readouterr().out


@pytest.mark.usefixtures("project", "handlers")
def test_a_narrow_terminal_has_the_outcomes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns that other commands show are left out; no row is wrapped."""
    monkeypatch.setattr(run_all_module, "terminal_width", lambda: 40)
    sweep(Trainer())
    head, *rows = capsys.readouterr().out.splitlines()[-4:]
    assert head.split() == ["CASE", "OUTCOME", "EVALUATION"]
    assert [row.split()[:2] for row in rows] == [[case, "finished"] for case in ("seed1", "seed2", "wide")]


@pytest.mark.usefixtures("project", "handlers")
@pytest.mark.parametrize(
    ("stops", "code"), [(75, 75), (130, 130), (KeyboardInterrupt(), 75)], ids=["drained", "twice", "between"]
)
def test_a_signal_stops_the_sweep(
    capsys: pytest.CaptureFixture[str], stops: int | BaseException, code: int
) -> None:
    """The rest is not begun; it says how to continue."""
    assert sweep(train := Trainer(seed2=stops)) == code
    assert train.asked == ["seed1", "seed2"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "continue with: elasticflow run jobs/sweep.toml --all --run-id tuning"
    assert lines[-3].split()[:4] == ["wide", "-", "not", "begun"]


@pytest.mark.usefixtures("project", "handlers")
def test_a_warning_that_all_cases_have_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """nodes.max without an endpoint, three times the same."""
    assert sweep(Trainer()) == 0
    assert capsys.readouterr().err.count("warning[EF401]") == 1


@pytest.mark.usefixtures("project", "handlers")
def test_a_file_with_cases_means_the_newest_of_their_runs(
    ran: Callable[..., Ran], capsys: pytest.CaptureFixture[str]
) -> None:
    """`status FILE` and its like, also where a variable of the file is not set."""
    sweep(Trainer(seed2=1))
    capsys.readouterr()
    with Path("jobs/sweep.toml").open("a", encoding="utf-8") as file:
        file.write('\n[snapshots]\nuri = "s3://${env:NOT_SET_ANYWHERE}/x"\n')
    code, out, _ = ran("status", "jobs/sweep.toml", "--format", "json")
    assert (code, json.loads(out)["job"]) in {(0, "mnist-wide"), (0, "mnist-seed1"), (0, "mnist-seed2")}


def test_a_flag_that_decides_for_an_axis_is_warned_of(ran: Callable[..., Ran]) -> None:
    """It wins, and the cases differ in name only."""
    out = ran("validate", "jobs/sweep.toml", "--set", "job.seed=7", "--set", "nodes.max=1")[1]
    assert "warning[EF318]: job.seed is an axis, and the flag wins: its cases differ in name only" in out
    assert " --> --set:1:5" in out
    assert "change the axis instead: --set 'matrix.axes.job.seed=[...]'" in out
    assert ran("plan", "jobs/sweep.toml", "--case", "seed1", "--set", "job.seed=7")[0] == 0


def test_hosts_are_told_the_run_of_a_case(
    project: Path, monkeypatch: pytest.MonkeyPatch, ran: Callable[..., Ran]
) -> None:
    """By the path of its folder, in which a host sees that the run was cancelled."""
    runs: list[str] = []

    def run_on_hosts(orders: list[tuple[object, Order]], *_: object, **__: object) -> int:
        runs.extend(order.run for _, order in orders)
        return 0

    monkeypatch.setattr("elasticflow.launcher.machines.run_on_hosts.run_on_hosts", run_on_hosts)
    (project / "hosts.txt").write_text("a\n", "utf-8")
    ran("run", "jobs/sweep.toml", "--hosts", "hosts.txt", "--run-id", "tuning", "--case", "wide")
    assert ["mnist-wide/tuning-wide"] == runs
