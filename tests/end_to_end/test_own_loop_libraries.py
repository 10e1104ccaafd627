"""Loops of torch's fully_shard, Accelerate, Lightning Fabric and the Trainer of Transformers on `elasticflow.join`.

They are killed, drained and resized.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file

from elasticflow import events
from tests.end_to_end.harness import named, read_lines, steps_of, tensors, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running


@dataclass(frozen=True)
class Example:
    """An example of examples/own_loop: its job, the package that it needs, and what so many steps of it are called."""

    job_file: str
    job: str
    package: str
    length: str
    steps: int = 64

    def run(self, project: Project, run_id: str, pause: float) -> Running:
        """Start it, *pause* seconds a step longer than its steps take."""
        if find_spec(self.package) is None:
            pytest.skip(f"{self.package} is not installed")
        args = f'script.args=["{self.length}", "--pause={pause}"]'
        return project.run(self.job_file, run_id, args, "snapshots.every=5 steps", job=self.job)

    def resume(self, project: Project, run_id: str, *sets: str) -> Running:
        """Continue with a run."""
        return project.start(
            "resume", run_id, *(f"--set={text}" for text in sets), run_id=run_id, job=self.job
        )


FOLDER = "examples/own_loop"
ACCELERATE = Example(f"{FOLDER}/accelerate.toml", "own-loop-accelerate", "accelerate", "--epochs=2")
FABRIC = Example(f"{FOLDER}/fabric.toml", "own-loop-fabric", "lightning_fabric", "--epochs=2")
TRAINER = Example(f"{FOLDER}/hf_trainer.toml", "own-loop-hf-trainer", "transformers", "--steps=64")
SHARDED = Example(f"{FOLDER}/sharded.toml", "own-loop-sharded", "torch", "--epochs=2")
ONE_EPOCH = replace(SHARDED, length="--epochs=1", steps=32)
OTHERS = [
    pytest.param(each, marks=pytest.mark.campaign, id=each.job) for each in (ACCELERATE, FABRIC, TRAINER)
]


@pytest.mark.parametrize(
    "example",
    # tests/runtime/loop/test_own_sharded.py kills and drains such a loop, test_own_loop.py launches of another one.
    [pytest.param(ONE_EPOCH, marks=pytest.mark.nightly, id=SHARDED.job), *OTHERS],
)
def test_a_library_s_loop_is_killed_and_drained_and_ends_with_the_same_bits(
    project: Project, example: Example
) -> None:
    """With as many workers throughout: DistributedDataParallel adds up the same numbers in the same order."""
    alone, run = example.run(project, "alone", 0), example.run(project, "disturbed", 0.2)
    run.wait_for("a snapshot", lambda: named(run.events(), events.SNAPSHOT_COMMITTED))
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.wait_for_step(10, generation=1)
    run.process.send_signal(signal.SIGTERM)
    assert (run.end(), alone.end()) == (75, 0), run.told() + alone.told()
    last = example.resume(project, "disturbed")
    assert last.end() == 0, last.told()
    told = last.events()
    assert ["crash", "drained"] == [event["class"] for event in named(told, events.GENERATION_ENDED)][:2]
    assert steps_of(last.run) == steps_of(alone.run) == list(range(1, example.steps + 1))
    expected, got = tensors(alone.run), tensors(last.run)
    assert expected.keys() == got.keys()
    assert [key for key in expected if expected[key] != got[key]] == []
    assert [] == wait_gone("disturbed")


@pytest.mark.parametrize(
    "example",
    # The test below resizes a shared model, too.
    [pytest.param(SHARDED, marks=pytest.mark.nightly, id=SHARDED.job), *OTHERS],
)
def test_a_library_s_loop_goes_on_with_other_numbers_of_workers(project: Project, example: Example) -> None:
    """Two, one and two again: no step is missing, and the losses are those of two but for what rounding makes of them."""
    alone, run = example.run(project, "alone", 0), example.run(project, "resized", 0.1)
    run.wait_for_step(12)
    run.process.send_signal(signal.SIGTERM)
    assert (run.end(), alone.end()) == (75, 0), run.told() + alone.told()
    one = example.resume(project, "resized", "nodes.nproc_per_node=1")
    one.wait_for_step(24, generation=1)
    one.process.send_signal(signal.SIGTERM)
    assert one.end() == 75, one.told()
    last = example.resume(project, "resized", "nodes.nproc_per_node=2")
    assert last.end() == 0, last.told()
    assert steps_of(last.run) == list(range(1, 65))
    assert {1, 2} == {line["world_size"] for line in read_lines(last.run.metrics)}
    assert _losses(last) == pytest.approx(_losses(alone), rel=0.15)


@pytest.mark.nightly
def test_a_shared_model_is_resumed_from_memory_and_exported_whole(project: Project) -> None:
    """Four workers, two copies: one is killed, and the state comes from memory. Then three workers share one copy."""
    sets = ("nodes.nproc_per_node=4", 'script.args=["--epochs=2", "--replicas=2", "--pause=0.05"]')
    run = project.run(SHARDED.job_file, "held", *sets, "snapshots.memory=1 step", job=SHARDED.job)
    reached = run.wait_for_step(12)
    os.kill(run.pid_of(2), signal.SIGKILL)
    run.wait_for_step(reached + 1, generation=1)
    again = named(run.events(), events.TRAINING_STARTED)[1]
    assert again["from_memory"]
    assert again["step"] >= reached - 1
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.told()
    last = SHARDED.resume(project, "held", "nodes.nproc_per_node=3", 'script.args=["--epochs=2"]')
    assert last.end() == 0, last.told()
    assert steps_of(last.run) == list(range(1, 65))
    assert [] == named(last.events(), events.SNAPSHOT_REJECTED)

    for command, said in (
        (("show", "held"), "in pieces, up to 3 each"),
        (("verify", "held"), "whole"),
        (("export", "held", "--format=safetensors", "--output=weights.safetensors"), "weights.safetensors"),
    ):
        asked = project.start("snapshots", *command, run_id="held", job=SHARDED.job)
        assert asked.end() == 0, asked.told()
        assert said in asked.output.read_text(), asked.output.read_text()
    weights = load_file(project.root / "weights.safetensors")
    assert (128, 32) == weights["blocks.3.layers.1.weight"].shape
    assert {f"model/{name}" for name in weights} == {
        key for key in tensors(last.run) if key.startswith("model/")
    }


def _losses(running: Running) -> list[float]:
    return [line["loss"] for line in read_lines(running.run.metrics) if "loss" in line]
