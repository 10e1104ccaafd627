from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elasticflow.cli.main import call
from tests.cli.small_job import JOB, PIECES
from tests.compiler.jobs import job_in

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a project with one job, being the working folder."""
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "pieces.py").write_text(PIECES)
    (tmp_path / "small.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_says_what_it_wrote_and_how_to_run_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes the folder, exits 0 and tells the two ways to run it by hand."""
    assert call(["plan", "small.toml", "-o", "out"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "wrote out: train.py, torchrun.sh, torchrun.args, plan.json, job.json, sources/",
        "  several workers: bash out/torchrun.sh",
        "  one process:     python out/train.py",
    ]
    assert job_in(project / "out").job.name == "small"
    assert call(["plan", "small.toml", "-o", "my files"]) == 0
    assert "bash 'my files/torchrun.sh'\n" in capsys.readouterr().out


def test_applies_overrides(project: Path) -> None:
    """--set changes the job that is compiled."""
    assert call(["plan", "small.toml", "-o", "out", "--set", "train.epochs=9", "--set", "job.seed=4"]) == 0
    job = job_in(project / "out")
    assert (job.train.epochs, job.job.seed) == (9, 4)


def test_keeps_an_edited_entry_point(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An edited train.py is refused with exit code 2, and replaced by --force."""
    call(["plan", "small.toml", "-o", "out"])
    (project / "out" / "train.py").write_text("# mine\n")
    capsys.readouterr()
    assert call(["plan", "small.toml", "-o", "out"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: out: edited by hand since it was written: train.py",
        "help: --force replaces it; or write to another folder",
    ]
    assert call(["plan", "small.toml", "-o", "out", "--force"]) == 0
    assert (project / "out" / "train.py").read_text() != "# mine\n"


def test_leaves_nothing_of_ours_behind(project: Path) -> None:
    """A base that the job extends no longer goes from the folder; what a person put there stays."""
    base = project / "base.toml"
    base.write_text(JOB)
    (project / "small.toml").write_text('extends = "base.toml"\n')
    call(["plan", "small.toml", "-o", "out"])
    (project / "out" / "notes.txt").write_text("mine\n")
    assert (project / "out" / "sources" / "base.toml").is_file()
    (project / "small.toml").write_text(JOB)

    assert call(["plan", "small.toml", "-o", "out"]) == 0

    assert not (project / "out" / "sources" / "base.toml").exists()
    assert (project / "out" / "notes.txt").is_file()


@pytest.mark.parametrize("place", ["small.toml", "small.toml/out"])
def test_over_a_file_is_refused(project: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    """A file where a folder should be: said, and untouched."""
    assert call(["plan", "small.toml", "-o", place]) == 2
    assert "help: a file stands in the way: name a folder" in capsys.readouterr().err
    assert (project / "small.toml").read_text() == JOB


@pytest.mark.parametrize("command", [["plan", "-o", "out"], ["plan"]])
def test_a_job_with_errors_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """Errors in the job file are shown as diagnostics; exit code 2, nothing is written."""
    (project / "small.toml").write_text(JOB.replace("epochs", "epoch"))
    assert call([command[0], "small.toml", *command[1:]]) == 2
    assert 'unknown key "epoch" in [train]' in capsys.readouterr().err
    assert not (project / "out").exists()


def test_an_argument_that_is_a_date_is_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A TOML date in args is refused with the key's name."""
    (project / "small.toml").write_text(JOB.replace("lr = 0.1", "lr = 2026-11-20"))
    assert call(["plan", "small.toml"]) == 2
    assert "args.lr" in capsys.readouterr().err


@pytest.mark.integration
def test_the_same_job_compiles_to_the_same_bytes(tmp_path: Path) -> None:
    """Whatever the folder one stands in, hash seed, locale, umask, time zone, earlier files, and the checkout's state."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "pieces.py").write_text(PIECES)
    (project / "pyproject.toml").touch()
    job = JOB.replace("{ lr = 0.1 }", '{ lr = 0.1, h\u00f6he = "\u00e9", a = 1, b = { c = inf } }').replace(
        "inf", "1e30"
    )
    (project / "jobs").mkdir()
    (project / "jobs" / "base.toml").write_text(job.replace("h\u00f6he", "name"), encoding="utf-8")
    (project / "jobs" / "small.toml").write_text('extends = "base.toml"\n', encoding="utf-8")
    (project / "pieces.py").write_text(PIECES.replace("(params, lr)", "(params, lr, name, a, b)"))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.example", "-C", str(project)]
    ways: list[tuple[list[str], Path, dict[str, str]]] = [
        ([], project, {"PYTHONHASHSEED": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC"}),
        ([], tmp_path, {"PYTHONHASHSEED": "2", "LC_ALL": "C", "PYTHONUTF8": "0", "TZ": "Asia/Tokyo"}),
        (["init", "-q"], project / "jobs", {"PYTHONHASHSEED": "3", "HOME": "/nowhere"}),
        (["add", "-A"], Path("/"), {}),
        (["commit", "-q", "-m", "all"], project, {}),
    ]
    found = []
    for number, (arguments, folder, variables) in enumerate(ways):
        if arguments:
            subprocess.run([*git, *arguments], check=True, timeout=100)
        out = project / "build"
        if number % 2 == 0:  # else over what is there
            shutil.rmtree(out, ignore_errors=True)
        job_file, place = (os.path.relpath(path, folder) for path in (project / "jobs" / "small.toml", out))
        subprocess.run(
            [sys.executable, "-m", "elasticflow", "plan", job_file, "-o", place],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables},
            umask=(0o022, 0o077)[number % 2],
            capture_output=True,
            check=True,
            timeout=60,
        )
        found.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert 7 <= len(found[0])
    assert [found[0]] * len(ways) == found


@pytest.mark.usefixtures("real_processes")
def test_no_torch_is_loaded(project: Path) -> None:
    """Neither the plan nor its files need torch, nor what only other commands need."""
    code = (
        "import sys\n"
        "from elasticflow.cli.main import call\n"
        "assert call(['plan', 'small.toml']) == 0\n"
        "assert call(['plan', 'small.toml', '-o', 'out']) == 0\n"
        "print('loaded:', *sorted({'torch', 'numpy', 'fsspec', 'structlog', 'pieces'} & set(sys.modules)))\n"
    )
    environ = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "loaded:")
