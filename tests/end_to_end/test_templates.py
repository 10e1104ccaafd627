"""The example of each form of loop trains; the trainer class is killed and resumed in the middle of an epoch."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.lint.rungs import TEMPLATES
from elasticflow.system import fault_injection
from tests.end_to_end.harness import LIMIT_S, ROOT, named, steps_of, tensors

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running
    from tests.forked import ForkedPrograms

ARGUMENTS = {
    "function": ["--steps=3"],
    "class": ["1"],
    "accelerate": ["--epochs=1"],
    "fabric": ["--epochs=1"],
    "transformers": ["--steps=3"],
    "sharded": ["--epochs=1"],
}
SCRIPTS = {**TEMPLATES, "sharded": "own_loop/train_sharded.py"}
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric", "transformers": "transformers"}


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in ("fabric", "transformers") else ())
        for name in SCRIPTS
    ],
)
def test_an_example_trains_to_its_end(project: Project, template: str, forked: ForkedPrograms) -> None:
    """By plain python, as its head says."""
    if template in PACKAGES:
        pytest.importorskip(PACKAGES[template])
    script = project.root / "examples" / SCRIPTS[template]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = forked.start(script, *ARGUMENTS[template], environment=environment, cwd=script.parent)
    assert program.wait(LIMIT_S) == 0, program.stderr.read_text()


def _trainer_class(project: Project, run_id: str, **environment: str) -> Running:
    return project.run(
        "examples/rungs/rungs.toml", run_id, f'script.entry="examples/{TEMPLATES["class"]}"',
        'script.args=["1"]', "snapshots.every=10 steps", "nodes.nproc_per_node=2", job="rungs", **environment,
    )  # fmt: skip


def test_the_trainer_class_is_killed_and_ends_with_the_same_bits(project: Project) -> None:
    """A worker dies in the middle of the epoch: the same steps and tensors as without."""
    alone = _trainer_class(project, "alone")
    faults = {fault_injection.VARIABLE: "training.step=kill@14 rank=1 generation=1"}
    run = _trainer_class(project, "disturbed", **faults)
    assert (run.end(), alone.end()) == (0, 0), run.told() + alone.told()
    assert [event["rank"] for event in named(run.events(), events.WORKER_FAILED)] == [1]
    assert steps_of(run.run) == steps_of(alone.run) == list(range(1, 64))
    assert tensors(run.run) == tensors(alone.run)
