"""What trials are made of a job, and which are refused."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.errors import TrialRefusedError
from elasticflow.jobfile.tables.job import Job
from elasticflow.launcher.supervisor.launch_record import Request
from elasticflow.run_folder import RunFolder
from elasticflow.trials import trial as trials


def job(**tables: dict[str, object]) -> Job:
    """Return a small job; *tables* are merged into it."""
    content: dict[str, dict[str, object]] = {
        "job": {"name": "small"},
        "model": {"entry": "torch.nn:Identity", "loss": "torch.nn.functional:mse_loss"},
        "optimizer": {"entry": "torch.optim:SGD"},
        "dataset": {"entry": "torch.nn:Identity", "global_batch_size": 8},
        "train": {"epochs": 3},
    }
    for name, table in tables.items():
        content[name] = {**content.get(name, {}), **table}
    return Job.model_validate(content)


@pytest.mark.parametrize("steps", [*range(trials.FEWEST_STEPS, 70), 1000])
def test_a_disturbed_trial_has_room_for_all_that_is_done_to_it(steps: int) -> None:
    """Killed, then drained, then ended, in this order, each held at a step that its launch finishes."""
    trial = trials.disturbed(3, trials.World(4), trials.World(2), steps)
    first, second = trial.launches
    kill, drain = first.acts
    [end] = second.acts

    assert (trials.World(4), trials.World(2)) == trial.worlds
    assert 0 < kill.step < drain.step < end.step == steps - 1
    assert (kill.step, drain.step + 1) == (trial.killed_after, trial.drained_after)
    assert drain.step + 1 < end.step  # the second launch resumes from there and has a step of its own before
    assert trial.snapshot_every is not None
    assert kill.step % trial.snapshot_every == 0  # the whole interval is lost and redone


def test_nothing_of_a_trial_lies_outside_its_run_folder() -> None:
    """Not its snapshots, not torch's logs; secrets and options for the job's own store go nowhere."""
    given = job(
        snapshots={"uri": "s3://mine", "options": {"key": "k"}, "memory": "1 step", "keep": {"last": 7}},
        torchrun={"log_dir": "mine", "start_method": "spawn", "tee": "0:3,5:1"},
        nodes={"min": 2, "max": 4, "nproc_per_node": 4, "endpoint": "head:29400", "interface": "eth9"},
        restarts={"budget": 0},
        lr_scheduler={"entry": "torch.optim.lr_scheduler:StepLR", "args": {"step_size": 7}},
    )
    trial = trials.disturbed(1, trials.World(3), trials.World(2), 12)

    made = trials.job_of(trial, trial.launches[0], given)

    assert (None, {}, "1 steps", "1 step", 7) == (
        made.snapshots.uri, made.snapshots.options, made.snapshots.every, made.snapshots.memory, made.snapshots.keep.last
    )  # fmt: skip
    assert (1, 1, 3, None, None) == (
        made.nodes.min, made.nodes.max, made.nodes.nproc_per_node, made.nodes.endpoint, made.nodes.interface
    )  # fmt: skip
    assert ("spawn", None, None) == (made.torchrun.start_method, made.torchrun.log_dir, made.torchrun.tee)
    assert 1 == made.restarts.budget
    assert (given.train, given.dataset, given.lr_scheduler, given.optimizer) == (
        made.train, made.dataset, made.lr_scheduler, made.optimizer
    )  # fmt: skip
    assert ("s3://mine", "1 h") == (given.snapshots.uri, made.snapshots.grace)
    plan_job(made, project_root=Path("/project"), job_files=[Path("/project/job.toml")])


def test_a_trial_has_the_secret_variables_of_the_job(tmp_path: Path) -> None:
    """Its process gets them by a pipe, where no record is: the job's code needs them as in a run."""
    given = job(env={"PLACE": "/data", "HUB": {"value": "hush"}, "API_KEY": "psst"})
    request = Request(given, (), (), tmp_path, RunFolder.of(tmp_path, "small", "1"))
    made = pickle.loads(pickle.dumps(request)).job
    assert made.env is not None
    assert {"PLACE": "/data", "HUB": "hush", "API_KEY": "psst"} == made.env.values()
    assert {"HUB", "API_KEY"} == made.env.secrets()
    assert "hush" not in json.dumps(job_to_json(made))


def test_an_undisturbed_trial_takes_no_snapshot_before_it_leaves() -> None:
    """So what snapshots do to training shows as a difference of the disturbed one."""
    trial = trials.undisturbed(1, trials.World(2), 50)

    made = trials.job_of(
        trial, trial.launches[0], job(snapshots={"memory": "1 step"}, nodes={"device": "cpu"})
    )
    assert made.nodes.device == "cpu"

    assert ("999999999 steps", "off") == (made.snapshots.every, made.snapshots.memory)
    assert [trials.TrialAct(49, "drain")] == list(trial.launches[0].acts)


REFUSED: dict[str, tuple[dict[str, dict[str, object]], tuple[int, ...], int, int, str]] = {
    "virtual shards": (
        {"train": {"consistency": "exact", "virtual_shards": 4}},
        (1, 5), 50, 0, r"5 workers cannot share 4 virtual shards .* leave out world sizes above 4",
    ),
    "batch": ({}, (1, 9), 50, 0, r"9 workers cannot share a batch of 8 .* leave out world sizes above 8"),
    "GPUs": ({}, (1, 3), 50, 2, r"GPUs for 2 of 3 workers.*nodes.device=cpu"),
    "shards": ({"parallel": {"shard": 2}}, (2, 3), 50, 0, r"3 workers are no multiple of 2 \(parallel.shard\)"),
    "steps": ({}, (1, 2), 5, 0, "5 steps are too few .* 6 are the fewest"),
    "a short job": ({"train": {"epochs": None, "steps": 4}}, (1, 2), 50, 0, "4 steps are too few"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_tried_is_refused(name: str) -> None:
    """Before anything starts; the message says why and the remedy what to do."""
    tables, worlds, steps, gpus, text = REFUSED[name]
    with pytest.raises(TrialRefusedError) as refused:
        trials.check(job(**tables), [*map(trials.World, worlds)], steps, gpus)

    assert 2 == refused.value.exit_code
    assert refused.match(f"(?s){text}")


def test_what_can_be_tried_is_not_refused() -> None:
    """At the bounds; a machine without GPUs has no bound of its own."""
    assert 6 == trials.check(job(), [trials.World(8), trials.World(1)], 6, 0)
    assert 6 == trials.check(job(nodes={"device": "cpu"}), [trials.World(3)], 6, 2)
    assert 50 == trials.check(
        job(train={"consistency": "exact", "virtual_shards": 4}), [trials.World(4)], 50, 4
    )
    assert 7 == trials.check(job(train={"epochs": None, "steps": 7}), [trials.World(1)], 50, 0)


def test_worlds_are_tried_with_each_degree_that_divides_them() -> None:
    """Without degrees the job's own; a degree or a size that would never be tried is refused."""
    assert [str(world) for world in trials.worlds_of((2, 4), (1, 2, 4))] == [
        "2/1",
        "2/2",
        "4/1",
        "4/2",
        "4/4",
    ]
    assert trials.worlds_of((2, 3), ()) == (trials.World(2), trials.World(3))
    with pytest.raises(TrialRefusedError, match="--shards 3 does not divide 2 or 4 workers"):
        trials.worlds_of((2, 4), (1, 3))
    with pytest.raises(TrialRefusedError, match="3 workers are no multiple of --shards 2"):
        trials.worlds_of((2, 3), (2,))


def test_a_trial_has_its_own_degree_and_the_rest_of_the_jobs_table() -> None:
    """A job without [parallel] gets one."""
    trial = trials.disturbed(1, trials.World(4, 2), trials.World(2, 1), 12)
    assert trial.name == "1-disturbed-4x2-2x1"
    made = [trials.job_of(trial, launch, job()).parallel for launch in trial.launches]
    assert [table and table.shard for table in made] == [2, 1]
    given = job(parallel={"shard": "all", "wrap": ["m:Block"]})
    table = trials.job_of(trial, trial.launches[0], given).parallel
    assert table == given.parallel.model_copy(update={"shard": 2}) if given.parallel else False
    own = trials.undisturbed(1, trials.World(4), 12)
    assert trials.job_of(own, own.launches[0], given).parallel == given.parallel
