"""StopTraining from the job's own code, through the launcher: the run is finished, and everybody says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.end_to_end.harness import named, steps_of

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

OWN = """
import os

import torch
from torch.nn.functional import cross_entropy

from elasticflow import StopTraining

calls = 0


def loss(outputs, targets):
    global calls
    calls += torch.is_grad_enabled()
    if calls == 12 and os.environ["RANK"] == "1":
        raise StopTraining("the loss is low enough")
    return cross_entropy(outputs, targets)
"""


def test_one_rank_ends_training_for_all(project: Project) -> None:
    """Raised on rank 1 in step 12: exit 0 after step 11, with its snapshot; resume has nothing to do; status says who."""
    project.write("own.py", OWN)
    sets = ("nodes.nproc_per_node=2", "dataset.micro_batch_size=", "model.loss=own:loss")
    running = project.run("jobs/mnist.toml", "stop", *sets)
    assert running.end() == 0, running.told()

    events = running.events()
    (stopped,) = named(events, "training.stopped")
    assert (11, 1, "the loss is low enough") == (stopped["step"], stopped["by_rank"], stopped["reason"])
    (finished,) = named(events, "run.finished")
    assert (11, 0, "rank 1: the loss is low enough") == (
        finished["step"],
        finished["restarts"],
        finished["stopped"],
    )
    last = named(events, "snapshot.committed")[-1]
    assert (11, "end") == (last["step"], last["trigger"])
    assert list(range(1, 12)) == steps_of(running.run)
    assert "after step 11 by rank 1: the loss is low enough" in running.told()

    again = project.start("resume", "stop", run_id="stop")
    assert again.end() == 2
    assert "run stop is finished" in again.told()
    status = project.start("status", "stop", run_id="stop")
    assert status.end() == 0
    assert "stopped by  rank 1: the loss is low enough" in status.told()
