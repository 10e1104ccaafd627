"""Bad input and bad luck at launch: exact messages, exit codes, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys

import pytest

from elasticflow import events
from tests.end_to_end.harness import ROOT, Project, named, read_lines

QUICK = ("train.epochs=2",)

MODEL = """
import torch
from torch import nn


def {name}(model, batch):
    inputs, targets = batch
    {body}
"""


def test_taken_port_is_named(project: Project) -> None:
    """nodes.endpoint on a port in use: exit 2 before anything starts."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        running = project.run("jobs/mnist.toml", "taken", *QUICK, f"nodes.endpoint=localhost:{port}")
        assert running.end(30) == 2, running.told()

    assert f"error: nodes.endpoint: cannot listen on *:{port}: Address already in use" in running.told()
    assert [] == running.events()


def test_snapshot_uri_that_cannot_be_written_is_named(project: Project) -> None:
    """snapshots.uri on a file instead of a folder: exit 2, the key and the cause are named."""
    project.write("occupied", "a file")
    running = project.run("jobs/mnist.toml", "nowhere", *QUICK, "snapshots.uri=occupied/snapshots")
    assert running.end(30) == 2, running.told()

    assert "snapshots.uri" in running.told()
    assert "occupied/snapshots" in running.told()


def test_running_run_is_not_started_twice(project: Project) -> None:
    """A second command for the same run: exit 2, with the process that holds it."""
    first = project.run("jobs/mnist.toml", "twice", "train.epochs=30")
    first.wait_for_step(3)
    second = project.run("jobs/mnist.toml", "twice", "train.epochs=30")
    assert second.end(30) == 2, second.told()
    assert f"error: run twice is running (process {first.process.pid})" in second.told()
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end(30) == 75, first.told()

    changed = project.run("jobs/mnist.toml", "twice", "train.epochs=30", "dataset.global_batch_size=32")
    expected = changed.end(30)
    refused = project.run("jobs/mnist.toml", "twice", "train.epochs=30", "model.args.width=8")
    assert refused.end(30) == 2, refused.told()
    assert "error: run twice cannot go on with what changed since its last launch:" in refused.told()
    assert "would corrupt the run" in refused.told()
    assert "model.args" in refused.told()
    assert expected == 2, changed.told()
    assert re.search(r"dataset\.global_batch_size +64 -> 32", changed.told())


def test_nothing_to_resume_says_where_it_looked(project: Project) -> None:
    """`resume` in a project without runs: exit 2."""
    running = project.start("resume", run_id="none")
    assert running.end(30) == 2

    assert f"error: no run under {project.root / 'runs'} can go on" in running.told()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ('raise ValueError("label 11 is no digit")', "ValueError: label 11 is no digit"),
        (
            'return nn.functional.cross_entropy(model(inputs), targets) * float("nan")',
            "the loss of step 1 is nan",
        ),
    ],
)
def test_error_in_user_code_is_shown_first_and_once(project: Project, body: str, error: str) -> None:
    """A step that raises, a loss that is not finite: the worker's own error, no restart without hope, exit 1."""
    project.write("steps.py", MODEL.format(name="step", body=body))
    job = (project.root / "jobs" / "mnist.toml").read_text()
    project.write(
        "jobs/bad.toml",
        job.replace('loss = "torch.nn.functional:cross_entropy"', 'step = "steps:step"')
        .replace('metrics = { accuracy = "examples.mnist:accuracy" }', "")
        .replace("max accuracy", "min loss"),
    )
    running = project.run("jobs/bad.toml", "bad", *QUICK)
    assert running.end() == 1, running.told()

    failed = named(running.events(), events.WORKER_FAILED)
    assert error in failed[0]["error"]
    assert error in running.output.read_text()
    if "raise" in body:
        assert 1 == len(failed)
        assert 1 == running.output.read_text().count('raise ValueError("label 11 is no digit")')


def test_module_that_fails_at_import_is_a_user_error(project: Project) -> None:
    """The module's own traceback, from a rank; the fork server lives through it."""
    project.write(
        "steps.py",
        "import sys\nraise RuntimeError('no licence for this model')\n\ndef step(model, batch):\n    ...\n",
    )
    job = (project.root / "jobs" / "mnist.toml").read_text()
    project.write(
        "jobs/bad.toml",
        job.replace('loss = "torch.nn.functional:cross_entropy"', 'step = "steps:step"')
        .replace('metrics = { accuracy = "examples.mnist:accuracy" }', "")
        .replace("max accuracy", "min loss"),
    )
    running = project.run("jobs/bad.toml", "bad", *QUICK)
    assert running.end() == 1, running.told()

    assert "RuntimeError: no licence for this model" in running.output.read_text()
    assert 1 == len(named(running.events(), events.WORKER_FAILED))
    assert ["steps"] == [e["module"] for e in named(running.events(), events.PRELOAD_REFUSED)]


def test_resume_on_other_data_is_refused(project: Project) -> None:
    """The run's data changed under the same path: the worker refuses, naming both fingerprints."""
    data = project.root / "data"
    data.mkdir()
    for file in (project.root / "examples" / "mnist").glob("*.gz"):
        (data / file.name).write_bytes(file.read_bytes())
    sets = ("train.epochs=20", f"dataset.args.root={data}")
    first = project.run("jobs/mnist.toml", "changed", *sets)
    first.wait_for_step(25)
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end(30) == 75, first.told()
    for name in ("images-idx3", "labels-idx1"):
        (data / f"train-{name}-ubyte.gz").write_bytes((data / f"t10k-{name}-ubyte.gz").read_bytes())

    second = project.run("jobs/mnist.toml", "changed", *sets)
    assert second.end() == 1, second.told()
    error = named(second.events(), events.WORKER_FAILED)[0]["error"]
    assert error.startswith("the data of `train` is not what the snapshot was trained on: fingerprint ")


def test_missing_torch_is_one_clear_line(project: Project) -> None:
    """Without torch: exit 2 and what to install; a path hook hides the one that is here."""
    project.write(
        "hidden/sitecustomize.py",
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'torch' else real(name, package)\n",
    )
    running = project.start(
        "run",
        "jobs/mnist.toml",
        run_id="none",
        PYTHONPATH=f"{project.root / 'hidden'}:{sys.path[0]}:{ROOT}",
    )
    assert running.end(30) == 2, running.told()

    assert "error: torch is not installed\nhelp: pip install 'elasticflow[torch]'" in running.told()


def test_changed_evaluation_begins_the_best_value_anew_and_no_more(project: Project) -> None:
    """Other data, another metric and direction: told as harmless, no consent asked for; the training goes on."""
    sets = ("train.steps=100000", "train.epochs=", "evaluation.every=10 steps", "snapshots.every=10 steps")
    first = project.run("jobs/mnist.toml", "other", *sets)
    first.wait_for("an evaluation", lambda: any("eval" in line for line in read_lines(first.run.metrics)))
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end(30) == 75, first.told()
    step = first.state()["step"]

    changed = (
        "evaluation.args.split=train",
        "evaluation.best=min loss",
        f"train.steps={step + 20}",
        "train.epochs=",
    )
    told = project.start("plan", "jobs/mnist.toml", *(f"--set={text}" for text in changed), run_id="other")
    assert told.end(30) == 0, told.told()
    assert "it could go on as this job" in told.told()
    assert "--accept-drift" not in told.told()

    second = project.run("jobs/mnist.toml", "other", *sets[2:], *changed)
    assert second.end() == 0, second.told()
    assert re.search(r"evaluation\.args\.split +test -> train", second.told())
    assert "looked for anew (it was " in second.told()
    (reset,) = named(second.events(), events.BEST_RESET)
    assert reset["measured_by"]["ranked_by"] == "max accuracy by examples.mnist:accuracy"
    assert reset["now"]["ranked_by"] == "min loss by torch.nn.functional:cross_entropy"
    steps = [line["step"] for line in read_lines(second.run.metrics) if "eval" not in line]
    assert steps == list(range(1, step + 21))
    evaluations = [line for line in read_lines(second.run.metrics) if "eval" in line and line["step"] > step]
    assert evaluations[-1]["best"] == min(line["eval"]["loss"] for line in evaluations)
