"""State of the job's own, named in snapshots.include: drained with the run, restored with it, missed when gone."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots import loading
from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

OWN = '''
import torch
from torch.nn.functional import cross_entropy


class Curriculum:
    """How often the loss was asked for while training, and when last."""

    def __init__(self):
        self.seen, self.trace = 0, torch.zeros(3)

    def state_dict(self):
        return {"seen": self.seen, "trace": self.trace}

    def load_state_dict(self, state):
        self.seen, self.trace = state["seen"], state["trace"]


curriculum = Curriculum()


def loss(outputs, targets):
    if torch.is_grad_enabled():
        curriculum.seen += 1
        curriculum.trace[curriculum.seen % 3] = curriculum.seen
    return cross_entropy(outputs, targets)
'''
SETS = (
    "nodes.nproc_per_node=2",
    "train.epochs=2",
    "dataset.micro_batch_size=",
    "model.loss=own:loss",
    'snapshots.include={ curriculum = "own:curriculum" }',
)


def included(running: Running) -> tuple[int, dict[str, Any], list[float]]:
    """Return step, state and tensor of the object in the newest snapshot."""
    catalog = Catalog(Storage(str(running.run.path)))
    newest = catalog.newest()
    assert newest is not None
    found = loading.load(catalog, newest.name)
    key = "include.curriculum/trace"
    data = memoryview(bytearray(newest.tensors[key].nbytes))
    found.read_into(key, data)
    return newest.step, found.state["state"]["include.curriculum"], list(data.cast("f"))


def test_object_of_the_jobs_own_goes_on_with_the_run(project: Project) -> None:
    """SIGTERM and resume: an object that counts steps has counted each of them once, on every worker."""
    project.write("own.py", OWN)
    drained = project.run("jobs/mnist.toml", "own", *SETS)
    drained.wait_for_step(8)
    os.kill(drained.process.pid, signal.SIGTERM)
    assert drained.end(60) == 75, drained.told()
    step, state, _ = included(drained)
    assert state["seen"] == step

    resumed = project.start("resume", "own", run_id="own")
    assert resumed.end() == 0, resumed.told()
    end, state, trace = included(resumed)
    assert end > step
    assert state["seen"] == end
    assert sorted(trace) == [end - 2, end - 1, end]
