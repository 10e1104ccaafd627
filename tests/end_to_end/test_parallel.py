"""`[parallel]`: the GPT example sharded, with the bits of one that is not; killed, resumed at another degree, on nodes that are too many."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from elasticflow import events
from elasticflow.scaffold import gallery
from tests.end_to_end.by_hand import undisturbed
from tests.end_to_end.harness import Project, named, steps_of, tensors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.forked import ForkedPrograms

STEPS = 8
SETS = (
    f"train.steps={STEPS}",
    "train.consistency=exact",
    "train.virtual_shards=4",
    "model.args.config.args.n_layer=2",
    "model.args.config.args.n_embd=32",
    "dataset.global_batch_size=8",
    'snapshots.every="3 steps"',
    'evaluation.every="4 steps"',
    "evaluation.samples=16",
    "hooks=",
)
WRAP = 'parallel.wrap=["gpt:Block"]'


@pytest.fixture
def gpt(tmp_path: Path) -> Project:
    """Return a project that is the GPT example."""
    for file, content in gallery.files_of("gpt").items():
        (tmp_path / file).write_bytes(content)
    return Project(tmp_path)


def flags(*sets: str) -> list[str]:
    """Return the options that set these keys, after those of every test."""
    return [f"--set={each}" for each in (*SETS, *sets)]


@pytest.mark.nightly
def test_gpt_has_the_same_bits_at_every_degree(gpt: Project) -> None:
    """Workers with a copy each, and with one among them, through a kill and a restart, and from one degree to the other."""
    options = ("--worlds=2,4", "--shards=1,2,4", f"--steps={STEPS}", "--format=json")
    sets = flags(WRAP, "parallel.shard=1")
    running = gpt.start("verify", "job.toml", *options, *sets, run_id="none")
    assert running.end() == 0, running.told()
    facts = json.loads(running.output.read_text())
    assert [each["shards"] for each in facts["trials"]] == [[1], [2], [1], [2], [4], [1, 1], [4, 1]]
    assert {"bits"} == {each["compared"] for each in facts["trials"]}
    assert facts["same"]


def test_gpt_that_is_killed_and_cut_anew_has_the_bits_of_one_that_is_whole(
    gpt: Project, forked: ForkedPrograms
) -> None:
    """Two workers hold a copy, which neither has built whole; one is killed; the run is drained, and resumed whole, unasked."""
    sets = [*SETS, "nodes.nproc_per_node=2", WRAP, 'parallel.init="meta"', 'snapshots.memory="1 step"']
    faults = "training.step=kill@4 rank=1 generation=1, training.step=stop@3 rank=0 generation=2"
    drained = gpt.run("job.toml", "cut", *sets, "parallel.shard=2", job="gpt", ELASTICFLOW_FAULTS=faults)
    drained.leave_from_halt(0, generation=2)
    assert named(drained.events(), events.TRAINING_STARTED)[1]["from_memory"]
    resumed = gpt.start("resume", "cut", "--set=parallel.shard=1", run_id="cut", job="gpt")
    assert resumed.end() == 0, resumed.told()
    assert sorted(set(steps_of(resumed.run))) == list(range(1, STEPS + 1))
    assert tensors(resumed.run) == undisturbed(
        gpt.root / "job.toml", forked, workers=1, sets=[*SETS, "parallel.shard=1"]
    )


def test_a_model_without_initial_values_is_trained_only_from_a_snapshot(
    gpt: Project, forked: ForkedPrograms
) -> None:
    """The only snapshot is damaged: the generation that counted on it ends by name, and the next one begins anew."""
    sets = [*SETS, "nodes.nproc_per_node=2", WRAP, 'parallel.init="meta"', 'snapshots.memory="off"']
    drained = gpt.run(
        "job.toml",
        "anew",
        *sets,
        "parallel.shard=2",
        job="gpt",
        ELASTICFLOW_FAULTS="training.step=stop@2 rank=0 generation=1",
    )
    drained.leave_from_halt(0, generation=1)
    for file in drained.run.path.glob("snapshots/*/shard-*.safetensors"):
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    resumed = gpt.start("resume", "anew", run_id="anew", job="gpt")
    assert resumed.end() == 0, resumed.told()
    failed = named(resumed.events(), events.WORKER_FAILED)
    assert any("without initial values" in each["error"] for each in failed)
    assert tensors(resumed.run) == undisturbed(
        gpt.root / "job.toml", forked, workers=1, sets=[*SETS, "parallel.shard=1"]
    )


@pytest.mark.nightly
def test_batch_mode_repeats_its_bits_at_each_number_of_workers(gpt: Project, forked: ForkedPrograms) -> None:
    """Killed or not, and at any degree. A model that is not shared is the same but for the rounding of sums."""
    exact = ("train.consistency", "train.virtual_shards")
    sets = [each for each in SETS if not each.startswith(exact)]
    sets += ["dataset.micro_batch_size=1", "model.args.config.args.dropout=0.0"]

    def come_to(workers: int, *more: str) -> dict[str, bytes]:
        return undisturbed(gpt.root / "job.toml", forked, workers=workers, sets=[*sets, *more])

    shared = come_to(2, "parallel.shard=2", WRAP)
    cut = [*sets, "nodes.nproc_per_node=2", "parallel.shard=2", WRAP]
    fault = "training.step=kill@5 rank=1 generation=1"
    killed = gpt.run("job.toml", "cut", *cut, job="gpt", ELASTICFLOW_FAULTS=fault)
    assert killed.end() == 0, killed.told()
    assert tensors(killed.run) == shared
    assert come_to(4, "parallel.shard=2", WRAP) == come_to(4, "parallel.shard=4", WRAP)
    whole = come_to(2)
    assert whole.keys() == shared.keys()
    for key in whole:
        if key.startswith("model/"):
            expected, found = (np.frombuffer(each[key], np.float32) for each in (whole, shared))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [2, 1])
def test_node_that_has_a_copy_holds_it_and_one_that_has_a_part_says_why_not(
    gpt: Project, workers: int
) -> None:
    """Two nodes. Each has a copy on two workers: the node of rank 0 is lost, and receives it. Or both have one copy: nothing is held."""
    sets = (
        f"nodes.nproc_per_node={workers}",
        "nodes.min=2",
        "nodes.max=2",
        "parallel.shard=2",
        "train.steps=100000",
        'snapshots.every="100000 steps"',
        WRAP,
    )
    running = gpt.start(
        "run", "job.toml", "--run-id=held", "--simulate-nodes=2", *flags(*sets), run_id="held", job="gpt"
    )
    if workers == 1:
        (off,) = running.wait_for("a reason", lambda: named(running.events(), events.HELD_OFF))
        assert off["reason"] == "the parts of the model are on several nodes, and no node has all of them"
    else:
        held = int(running.wait_for("a held state", lambda: running.state().get("held")))
        above = psutil.Process(running.pid_of(0)).parents()
        next(process for process in above if "elasticflow.launcher.agent.main" in process.cmdline()).kill()
        running.wait_for_group(4, 1)
        started = named(running.events(), events.TRAINING_STARTED)[-1]
        assert started["from_memory"]
        assert started["step"] >= held
        assert named(running.events(), events.HELD_RECEIVED)
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end() == 75, running.told()


@pytest.mark.nightly
def test_nodes_that_fill_no_copy_wait_and_step_in(gpt: Project) -> None:
    """Three nodes of one worker, two workers to a copy: the third steps in for a node that is lost."""
    sets = ("nodes.nproc_per_node=1", "nodes.max=4", "parallel.shard=2", "train.steps=100000", WRAP)
    running = gpt.start(
        "run", "job.toml", "--run-id=spare", "--simulate-nodes=3", *flags(*sets), run_id="spare", job="gpt"
    )
    first = running.wait_for_group(2, 0)
    above = psutil.Process(running.pid_of(1)).parents()
    next(each for each in above if "elasticflow.launcher.agent.main" in each.cmdline()).kill()
    running.wait_for_group(2, first)
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end() == 75, running.told()
    started = named(running.events(), events.GENERATION_STARTED)
    assert {2} == {each["world_size"] for each in started}
    assert started[0]["members"] != started[1]["members"]


@pytest.mark.nightly
def test_replicas_join_and_leave_in_one_launch(gpt: Project, forked: ForkedPrograms) -> None:
    """Two nodes hold one copy, four hold two, and one of these is lost with half a copy: the bits of one undisturbed worker."""
    sets = [*SETS, "parallel.shard=2", WRAP, 'evaluation.every="1000 steps"', 'snapshots.every="20 steps"']
    more = ("nodes.nproc_per_node=1", "nodes.max=4", "train.steps=100000")
    running = gpt.start(
        "run", "job.toml", "--run-id=grows", "--scale=2@0s 4@20s", *(f"--set={each}" for each in (*sets, *more)),
        run_id="grows", job="gpt",
    )  # fmt: skip
    both = running.wait_for_group(4, 0)
    above = psutil.Process(running.pid_of(3)).parents()
    next(each for each in above if "elasticflow.launcher.agent.main" in each.cmdline()).kill()
    running.wait_for_group(2, both)
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end() == 75, running.told()
    last = max(steps_of(running.run))
    assert sorted(set(steps_of(running.run))) == list(range(1, last + 1))
    whole = [each for each in sets if not each.startswith("parallel.shard")]
    assert tensors(running.run) == undisturbed(
        gpt.root / "job.toml", forked, workers=1, sets=[*whole, "parallel.shard=1", f"train.steps={last}"]
    )
