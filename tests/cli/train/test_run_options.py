from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from elasticflow.cli.main import call
from elasticflow.cli.train import run
from elasticflow.cli.train.run_options import RunOptions, check_place
from elasticflow.errors import FINISHED, NOT_STARTED, RayError
from elasticflow.jobfile.load import require_job
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.launcher.supervisor.launch_record import Request


def test_command_that_goes_on_has_all_that_says_where_and_what() -> None:
    """The machines, the case and the values except secrets, as it is recorded; quoted as a shell needs it."""
    options = RunOptions(
        job_file=Path("jobs/sweep.toml"),
        overrides=("env.NOTE=a b", "env.API_KEY=hunter2"),
        hosts=Path("hosts.txt"),
        case="lr1",
    )
    assert (
        options.command_with("nightly-lr1")
        == "elasticflow run jobs/sweep.toml --hosts hosts.txt --case lr1 --set 'env.NOTE=a b' --run-id nightly-lr1"
    )
    assert "elasticflow run a.toml --on ray --run-id x" == RunOptions(
        job_file=Path("a.toml"), on="ray"
    ).command_with("x")


def test_drift_is_accepted_of_a_run_that_is_named() -> None:
    """Without a run id a new run begins, which has drifted from nothing."""
    options = RunOptions(job_file=Path("a.toml"), accept_drift=True)
    with pytest.raises(click.UsageError, match="name the run with --run-id"):
        options.check()
    replace(options, run_id="nightly").check()


JOB = """
[job]
name = "small"
[model]
entry = "torch.nn:Linear"
args = { in_features = 4, out_features = 2 }
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
[dataset]
entry = "torch.utils.data:TensorDataset"
global_batch_size = 8
samples = 64
[train]
epochs = 1
"""


def test_rank_without_a_run_to_join_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine would lead a run of its own. Rank 0 leads, a static rendezvous needs ranks, and any program may set $NODE_RANK."""
    static = ("--set", "nodes.min=2", "--set", "torchrun.rdzv_backend=static")
    led: list[int | None] = []

    def launch(request: Request, _: str) -> int:
        led.append(request.node_rank)
        return FINISHED

    monkeypatch.setattr(run, "launch_shown", launch)
    loaded = loaded_in(tmp_path / "project")
    words = ["run", str(loaded.path), "--set", "nodes.max=2", "--set", "nodes.endpoint=head:29400"]
    assert NOT_STARTED == call([*words, "--node-rank", "1"])
    assert "add --join head:29400" in capsys.readouterr().err
    assert FINISHED == call([*words, "--node-rank", "0"])
    assert FINISHED == call([*words, *static, "--node-rank", "1"])
    monkeypatch.setenv("NODE_RANK", "2")
    assert FINISHED == call(words)
    assert [0, 1, 2] == led
    (tmp_path / "hosts.txt").touch()
    hosts = ("--hosts", str(tmp_path / "hosts.txt"))
    assert NOT_STARTED == call([*words, *hosts])
    assert "names no host" in capsys.readouterr().err
    assert NOT_STARTED == call([*words, *hosts, "--node-rank", "0"])
    assert "give it without --join, --node-rank" in capsys.readouterr().err


def loaded_in(folder: Path, *overrides: str) -> LoadedJob:
    """Return a job whose project is *folder*."""
    folder.mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    (folder / "job.toml").write_text(JOB)
    return require_job(folder / "job.toml", overrides, environment=None)


@pytest.mark.parametrize("overrides", [(), ("snapshots.uri=snapshots",)])
def test_package_of_ray_is_no_place_for_snapshots(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Ray removes it; the remedy names a place and another way to submit."""
    with pytest.raises(RayError, match="a package that Ray unpacked") as refused:
        check_place(loaded_in(tmp_path / "_ray_pkg_0123abcd", *overrides))
    assert "set snapshots.uri" in (refused.value.remedy or "")
    assert "ray job submit" in (refused.value.remedy or "")


def test_package_of_ray_may_hold_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a warning, if snapshots lie elsewhere; any other folder is taken without a word."""
    check_place(loaded_in(tmp_path / "plain"))
    assert "" == capsys.readouterr().err
    check_place(loaded_in(tmp_path / "_ray_pkg_0123abcd" / "project", "snapshots.uri=s3://bucket/small"))
    assert "which Ray removes" in capsys.readouterr().err


def test_records_and_words_for_people_do_not_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That a run is finished is said beside the records, or where people read."""
    (tmp_path / "pyproject.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "small" / "r1")
    folder.path.mkdir(parents=True)
    folder.state.write_text('{"status": "finished"}')
    sentence = "run r1 is finished: nothing was trained; another --run-id begins a new run; elasticflow resume r1 --set train.epochs=N, or train.steps=N, trains this one longer\n"
    for form, said in (("console", (sentence, "")), ("json", ("", sentence))):
        assert RunOptions(job_file=Path("a.toml"), log_format=form).has_finished(folder)
        assert capsys.readouterr() == said
