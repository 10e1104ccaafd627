"""Variables of [env] are there before torch and the job's modules are imported, in every generation."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

# Torch's own modules, which the fork server imports, read the first one; the job's module reads the others.
MODULE = """
import json
import os
from pathlib import Path

import torch._inductor.config as inductor
from examples.mnist import Net as Plain

SEEN = {name: os.environ.get(name) for name in ("HF_HOME", "SOME_TOKEN")}
AT_IMPORT = inductor.max_autotune


class Net(Plain):
    def __init__(self, width=8):
        super().__init__(width)
        generation = os.environ["ELASTICFLOW_GENERATION"]
        Path(__file__).with_name(f"seen-{generation}.json").write_text(json.dumps([SEEN, AT_IMPORT]))
"""
SECRET = "a-secret-that-no-record-holds"  # of the test


def test_workers_have_the_jobs_variables(project: Project) -> None:
    """Also after a kill; the secret one is in no file of the run."""
    project.write("named.py", MODULE)
    lines = (
        '[env]\nHF_HOME = "/somewhere"\nTORCHINDUCTOR_MAX_AUTOTUNE = "1"\nSOME_TOKEN = "${env:MY_SECRET}"\n'
    )
    job = project.root / "jobs" / "mnist.toml"
    job.write_text(f"{job.read_text()}\n{lines}")
    sets = ("model.entry=named:Net", "model.args.width=8", "train.epochs=100", "nodes.nproc_per_node=1")
    running = project.run("jobs/mnist.toml", "variables", *sets, MY_SECRET=SECRET)
    running.wait_for_step(3)
    first = running.state()["generation"]
    os.kill(running.pid_of(0), signal.SIGKILL)
    running.wait_for_step(3, generation=first)
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 75, running.told()

    for generation in (first, first + 1):
        seen = json.loads((project.root / f"seen-{generation}.json").read_text())
        assert seen == [{"HF_HOME": "/somewhere", "SOME_TOKEN": SECRET}, True]
    texts = [p.read_bytes() for p in running.run.path.rglob("*") if p.is_file()]
    assert not any(SECRET.encode() in text for text in [*texts, running.told().encode()])
