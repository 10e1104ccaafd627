"""Bad input and bad luck at launch: exact messages, exit codes, nothing left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from tests.end_to_end.harness import ROOT, named, read_lines, steps_of

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

QUICK = ("train.epochs=2",)
RAISES = 'raise ValueError("label 11 is no digit")'
TELL = "test -e tried || { touch tried; echo no display; exit 3; }; cat > told.json"


def test_taken_port_is_named(project: Project) -> None:
    """nodes.endpoint on a port in use: exit 2 before anything starts."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        running = project.run("jobs/mnist.toml", "taken", *QUICK, f"nodes.endpoint=localhost:{port}")
        assert running.end() == 2, running.told()

    assert f"error: nodes.endpoint: cannot listen on *:{port}: Address already in use" in running.told()
    assert [] == running.events()


def test_snapshot_uri_that_cannot_be_written_is_named(project: Project) -> None:
    """snapshots.uri on a file instead of a folder: exit 2, the key and the cause are named."""
    project.write("occupied", "a file")
    running = project.run("jobs/mnist.toml", "nowhere", *QUICK, "snapshots.uri=occupied/snapshots")
    assert running.end() == 2, running.told()

    assert "snapshots.uri" in running.told()
    assert "occupied/snapshots" in running.told()


def test_nothing_to_resume_says_where_it_looked(project: Project) -> None:
    """`resume` in a project without runs: exit 2."""
    running = project.start("resume", run_id="none")
    assert running.end() == 2

    assert f"error: no run under {project.root / 'runs'} can continue" in running.told()


@pytest.mark.parametrize("place", ["step", "module"])
def test_error_in_user_code_is_shown_first_and_once(project: Project, place: str) -> None:
    """A step or a module that raises: the worker's own error, no restart without hope, exit 1; the fork server lives through it.

    [notify] alone has somebody told; its command fails first, and is run again before the launch ends.
    """
    line = {
        "step": f"def step(model, batch):\n    {RAISES}\n",
        "module": f"{RAISES}\n\ndef step(model, batch):\n    ...\n",
    }
    project.write("steps.py", line[place])
    job = (project.root / "jobs" / "mnist.toml").read_text()
    project.write(
        "jobs/bad.toml",
        job.replace('loss = "torch.nn.functional:cross_entropy"', 'step = "steps:step"')
        .replace('metrics = { accuracy = "examples.mnist:accuracy" }', "")
        .replace("max accuracy", "min loss")
        + f"\n[notify]\ncommand = ['sh', '-c', {json.dumps(TELL)}]\n",
    )
    running = project.run("jobs/bad.toml", "bad", *QUICK)
    assert running.end() == 1, running.told()

    (failed,) = named(running.events(), events.WORKER_FAILED)
    assert "ValueError: label 11 is no digit" in failed["error"]
    assert "ValueError: label 11 is no digit" in running.output.read_text()
    assert 1 == running.output.read_text().count(RAISES)
    refused = [e["module"] for e in named(running.events(), events.PRELOAD_REFUSED)]
    assert ["steps"] * (place == "module") == refused

    told = json.loads((project.root / "told.json").read_text())
    assert ("failed", 1, "elasticflow why bad") == (told["event"], told["exit_code"], told["next"])
    first = f"failed before its first step: rank {failed['rank']}: ValueError: label 11 is no digit"
    assert first in told["text"]
    (unsent,) = named(running.events(), "sink.failed")
    assert ("notify.command", "sh: exit code 3: no display") == (unsent["sink"], unsent["error"])
    assert "sh: no display" in (running.run.path / "logs" / "sinks.log").read_text()


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
    assert running.end() == 2, running.told()

    assert "error: torch is not installed\nhelp: pip install 'elasticflow[torch]'" in running.told()


def evaluations_of(running: Running, after: int = 0) -> list[dict[str, Any]]:
    """Return the evaluations in metrics.jsonl after that step."""
    lines = read_lines(running.run.metrics)
    return [line for line in lines if "eval" in line and line["step"] > after]


def test_what_changes_between_two_launches_is_refused_or_told(project: Project) -> None:
    """A running run is not started twice. Without its lock it ends with an error that names it, and the other launch resumes.

    Another batch size, model or data: refused, with what differs, exit 2 or 1. Another evaluation, metric and direction:
    told as harmless, no consent asked for; the training continues, and the best value begins anew.
    """
    data = project.root / "data"
    data.mkdir()
    for file in (project.root / "examples" / "mnist").glob("*.gz"):
        (data / file.name).write_bytes(file.read_bytes())
    sets = (
        "train.epochs=",
        "evaluation.every=10 steps",
        "snapshots.every=10 steps",
        f"dataset.args.root={data}",
    )
    job, endless = "jobs/mnist.toml", "train.steps=100000"

    first = project.run(job, "other", *sets, endless)
    first.wait_for("an evaluation", lambda: evaluations_of(first))
    second = project.run(job, "other", *sets, endless)
    assert second.end() == 2, second.told()
    assert (
        f"error: run other is running (process {first.process.pid} on {socket.gethostname()})"
        in second.told()
    )
    first.run.lock.unlink()
    third = project.run(job, "other", *sets, endless)
    assert first.end() == 1, first.told()
    assert f"writes no more: {first.run.lock.name}" in first.told().replace(f"{first.run.lock.parent}/", "")
    third.wait_for("training", lambda: len(named(third.events(), events.TRAINING_FIRST_STEP)) == 2)
    os.kill(third.process.pid, signal.SIGTERM)
    assert third.end() == 75, third.told()
    assert third.tree() == []
    step = third.state()["step"]

    batch = project.run(job, "other", *sets, endless, "dataset.global_batch_size=32")
    assert batch.end() == 2, batch.told()
    assert re.search(r"dataset\.global_batch_size +64 -> 32", batch.told())
    model = project.run(job, "other", *sets, endless, "model.args.width=8")
    assert model.end() == 2, model.told()
    assert "error: run other cannot continue with what changed since its last launch:" in model.told()
    assert "would corrupt the run" in model.told()
    assert "model.args" in model.told()

    before = {}
    for kind in ("images-idx3", "labels-idx1"):
        train, test = (data / f"{split}-{kind}-ubyte.gz" for split in ("train", "t10k"))
        before[train] = train.read_bytes()
        train.write_bytes(test.read_bytes())
    otherwise = project.run(job, "other", *sets, endless)
    assert otherwise.end() == 1, otherwise.told()
    error = named(otherwise.events(), events.WORKER_FAILED)[0]["error"]
    assert error.startswith("the data of `train` is not what the snapshot was trained on: fingerprint ")
    for path, content in before.items():
        path.write_bytes(content)

    changed = (*sets, "evaluation.args.split=train", "evaluation.best=min loss", f"train.steps={step + 20}")
    told = project.start("plan", job, *(f"--set={text}" for text in changed), run_id="other")
    assert told.end() == 0, told.told()
    assert "it could continue as this job" in told.told()
    assert "--accept-drift" not in told.told()

    last = project.run(job, "other", *changed)
    assert last.end() == 0, last.told()
    assert re.search(r"evaluation\.args\.split +test -> train", last.told())
    assert "looked for anew (it was " in last.told()
    (reset,) = named(last.events(), events.BEST_RESET)
    assert reset["measured_by"]["ranked_by"] == "max accuracy by examples.mnist:accuracy"
    assert reset["now"]["ranked_by"] == "min loss by torch.nn.functional:cross_entropy"
    assert named(last.events(), events.RUN_FINISHED)
    assert list(range(1, step + 21)) == steps_of(last.run)
    evaluations = evaluations_of(last, step)
    assert evaluations[-1]["best"] == min(line["eval"]["loss"] for line in evaluations)
