"""The main job as shipped: how well it trains, and on which data."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.compiler.plan.forecast import Knowledge, forecast
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.deep.check import try_out
from elasticflow.jobfile.load import require_job
from elasticflow.observe.estimates import read_run_facts
from examples.mnist import digits
from tests.end_to_end.harness import ROOT, Project, Running, named, read_lines

if TYPE_CHECKING:
    from pathlib import Path

MNIST5K = ROOT.parent / "shared" / "data" / "mnist5k"


def roots(place: str) -> tuple[str, str]:
    """Return the overrides that train and test on *place*."""
    return f'dataset.args.root="{place}"', f'evaluation.args.root="{place}"'


def accuracy(running: Running) -> float:
    """Return the last accuracy in metrics.jsonl."""
    return float([line["eval"]["accuracy"] for line in read_lines(running.run.metrics) if "eval" in line][-1])


def opened(running: Running) -> dict[str, tuple[str, str]]:
    """Return source and fingerprint of every dataset that was opened, by name."""
    return {
        event["name"]: (event["source"], event["fingerprint"])
        for event in named(running.events(), "dataset.opened")
    }


@pytest.mark.campaign  # .ci/run does so, by README's first command
def test_main_job_reaches_its_accuracy(project: Project) -> None:
    """`elasticflow run jobs/mnist.toml`: at least 0.97 on the test digits, on two workers."""
    running = project.run("jobs/mnist.toml", "good")
    assert running.end() == 0, running.told()
    assert accuracy(running) >= 0.97
    assert opened(running)["train"] == (str(project.root / "examples" / "mnist"), digits("train").fingerprint)
    require_foreseen(project.root / "jobs" / "mnist.toml", running)


def require_foreseen(job_file: Path, running: Running) -> None:
    """What `--deep` and `plan` tell of a job is what its run came to."""
    loaded = require_job(job_file)
    facts = try_out(loaded.job, loaded.project_root).facts
    events = running.events()
    staged = {event["bytes"] for event in named(events, "snapshot.staged")}
    (told,) = {event["parameters"] for event in named(events, "training.started")}
    assert (staged, told) == ({facts.snapshot_bytes}, facts.parameters)
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    run_facts = read_run_facts(running.run, loaded.job, plan, loaded.project_root)
    ahead = forecast(loaded.job, Knowledge(**run_facts.facts))
    lines = read_lines(running.run.metrics)
    assert run_facts.drift == []
    assert ahead.steps == max(line["step"] for line in lines)
    assert ahead.evaluations == len([line for line in lines if "eval" in line])
    # The last of an epoch may be a multiple of steps, too; the forecast is an estimate.
    assert ahead.snapshots is not None
    assert abs(ahead.snapshots - len(named(events, "snapshot.committed"))) <= 2


@pytest.mark.nightly
@pytest.mark.skipif(not MNIST5K.is_dir(), reason="needs MNIST's digits in ../shared/data/mnist5k")
def test_the_same_job_trains_mnist(project: Project) -> None:
    """Only the place of the data and the length changed: at least 0.95 on MNIST's 28 x 28 digits after 3 epochs."""
    sets = (*roots(str(MNIST5K)), "train.epochs=3", "lr_scheduler.args.T_max=3")
    running = project.run("jobs/mnist.toml", "bigger", *sets)
    assert running.end() == 0, running.told()
    assert accuracy(running) >= 0.95
    assert opened(running)["evaluation"] == (str(MNIST5K), digits("test", str(MNIST5K)).fingerprint)
