from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.compiler.plan.batch_split import WorldRow, exact_cost, world_row, worlds
from elasticflow.compiler.plan.launch_plan import LaunchPlan, plan_job
from elasticflow.jobfile.checks.training_length import num_steps, steps_per_epoch
from elasticflow.jobfile.tables.job import Job
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.training.fixed_order_sum import TreeSum
from tests.compiler.jobs import make_job

ROOT = Path("/project")


def _planned(**changes: Any) -> LaunchPlan:
    return plan_job(
        make_job(**changes), project_root=ROOT, job_files=[ROOT / "jobs" / "small.toml", Path("/base.toml")]
    )


def _worlds(**changes: Any) -> tuple[WorldRow, ...]:
    return tuple(worlds(make_job(**changes)))


def test_files_are_relative_to_the_project() -> None:
    """Job files are named from the project root, also those outside of it."""
    assert _planned().job_files == ("jobs/small.toml", "../base.toml")


def test_a_plan_goes_to_json_and_back() -> None:
    """A plan read back from JSON is the same plan."""
    plan = _planned(nodes__max=3, restarts__refill="1 h", snapshots__options={"a": {"b": [1, 2]}})
    assert LaunchPlan.model_validate_json(plan.model_dump_json()) == plan


def test_modules_are_what_the_fork_server_imports() -> None:
    """The modules of all factories, each once."""
    plan = _planned(evaluation__entry="pieces:digits", evaluation__metrics={"accuracy": "measures:accuracy"})
    assert plan.modules == ("pieces", "torch.nn.functional", "torch.optim", "measures")


def test_the_compiler_is_imported_once_for_a_script_that_shards() -> None:
    """`fully_shard` would have each worker import it, at each restart."""
    script = {"entry": "train.py", "preload": ["torch.distributed.fsdp"]}
    job = Job.model_validate({"job": {"name": "sharded"}, "script": script})
    plan = plan_job(job, project_root=ROOT, job_files=[])
    assert plan.modules == ("torch.distributed.fsdp", "torch._dynamo.config")


@pytest.mark.parametrize(
    ("refill", "expected"),
    [
        (None, (None, None, None)),
        ("2 h", (7200.0, None, None)),
        ("1000 steps", (None, 1000, None)),
        ("3 epochs", (None, None, 3)),
    ],
)
def test_refill_by_time_or_progress(
    refill: str | None, expected: tuple[float | None, int | None, int | None]
) -> None:
    """The budget is filled again by time, steps or epochs."""
    restarts = _planned(restarts__refill=refill).restarts
    assert (restarts.refill_s, restarts.refill_steps, restarts.refill_epochs) == expected


def test_times_become_seconds() -> None:
    """Durations of the job file are seconds in the plan."""
    restarts = _planned(restarts__hang_timeout="5 min", snapshots__grace="1 min").restarts
    assert (restarts.hang_timeout_s, restarts.grace_s) == (300.0, 60.0)


@pytest.mark.parametrize(("best", "mode"), [(None, None), ("max accuracy", "max"), ("min loss", "min")])
def test_what_best_means(best: str | None, mode: str | None) -> None:
    """keep.best keeps the greatest or the least of evaluation.best's metric."""
    metrics = {"accuracy": "pieces:accuracy"}
    plan = _planned(evaluation__entry="pieces:digits", evaluation__metrics=metrics, evaluation__best=best)
    assert plan.snapshots.keep.best_mode == mode


def test_worlds_from_the_smallest_to_the_largest() -> None:
    """Every number of nodes of a short range has a row."""
    rows = _worlds(nodes__min=1, nodes__max=3, dataset__micro_batch_size=10)
    assert [
        (r.nodes, r.world_size, r.samples_per_rank, r.micro_batches, r.micro_batch_size) for r in rows
    ] == [
        (1, 2, (32, 32), 4, (8, 8)),
        (2, 4, (16, 16), 2, (8, 8)),
        (3, 6, (10, 11), 2, (5, 10)),
    ]
    assert {row.exact for row in rows} == {None}


def test_exact_mode_costs_forwards_memory_and_traffic() -> None:
    """Of 8 shards on 1 to 4 workers: forwards instead of one, sums held, bytes against a ring all-reduce."""
    exact = {"train__consistency": "exact", "train__virtual_shards": 8, "nodes__nproc_per_node": 1}
    rows = _worlds(nodes__max=4, **exact)
    costs = [row.exact for row in rows if row.exact is not None]
    assert [
        (r.samples_per_rank, r.micro_batches, r.micro_batch_size, c.batch_micro_batches)
        for r, c in zip(rows, costs, strict=True)
    ] == [
        ((64, 64), 8, (8, 8), 1),
        ((32, 32), 4, (8, 8), 1),
        ((16, 24), 3, (8, 8), 1),
        ((16, 16), 2, (8, 8), 1),
    ]
    assert [(c.gradient_copies, c.traffic) for c in costs] == [(4, None), (3, 1.0), (3, 1.5), (2, 1.0)]


def test_workers_share_whole_data_shards() -> None:
    """Sixteen shards and three workers: each reads five or six of them, and so many samples of a batch."""
    job = make_job(dataset__shards=16, dataset__global_batch_size=64, dataset__micro_batch_size=8)
    row = world_row(job, 3, 3)
    assert (row.samples_per_rank, row.micro_batches, row.micro_batch_size) == ((20, 24), 3, (6, 8))


@given(st.integers(1, 300), st.integers(1, 300))
def test_cost_of_exact_mode_is_that_of_its_sums(shards: int, world_size: int) -> None:
    """What the closed form says of memory and traffic, the runtime's tree does."""
    world_size = min(world_size, shards)
    copies, sums = 0, []
    for rank in range(world_size):
        tree: TreeSum[None] = TreeSum(shards, lambda *_: None)
        for shard in range(*even_split(shards, world_size, rank)):
            copies = max(copies, len(tree.nodes) + 1)
            tree.push(0, shard, None)
        sums.append(len(tree.nodes))
    cost = exact_cost(shards, world_size, 1)
    traffic = None if world_size == 1 else (max(sums) + 1) / 2
    assert (cost.gradient_copies, cost.traffic) == (copies, traffic)


def test_long_ranges_show_what_divides_evenly() -> None:
    """A range up to the greatest number of nodes takes a handful of rows, and no time."""
    rows = _worlds(nodes__min=3, nodes__max=65_536, dataset__global_batch_size=10**9)
    assert [row.nodes for row in rows] == [3, 4, 20, 64, 200, 500, 1250, 3200, 8000, 20_000, 62_500, 65_536]
    even = [row for row in rows[1:-1] if row.samples_per_rank]
    assert all(row.samples_per_rank[0] == row.samples_per_rank[1] for row in even if row.samples_per_rank)


def test_long_ranges_that_nothing_divides_show_doublings() -> None:
    """Also where a machine tells how many workers a node has."""
    for changes in ({"dataset__global_batch_size": 999_983}, {"nodes__nproc_per_node": "gpu"}):
        rows = _worlds(nodes__min=3, nodes__max=60, **changes)
        assert [row.nodes for row in rows] == [3, 6, 12, 24, 48, 60]


def test_workers_counted_on_the_machine_are_unknown() -> None:
    """nproc_per_node = "gpu" leaves the split open."""
    row = _worlds(nodes__nproc_per_node="gpu")[0]
    assert (row.world_size, row.samples_per_rank, row.micro_batches) == (None, None, None)


@given(st.integers(1, 10**6), st.integers(1, 1000), st.integers(1, 10**6))
def test_shares_add_up_to_the_batch(batch: int, world_size: int, micro: int) -> None:
    """Fewest and most samples differ by one at most, bracket the mean, and fit in the forwards counted."""
    row = world_row(
        make_job(dataset__global_batch_size=batch, dataset__micro_batch_size=micro), 1, world_size
    )
    assert row.samples_per_rank is not None
    assert row.micro_batches is not None
    fewest, most = row.samples_per_rank
    assert fewest * world_size <= batch <= most * world_size
    assert most - fewest <= 1
    assert (row.micro_batches - 1) * micro < most <= row.micro_batches * micro


@given(
    st.integers(1, 500), st.integers(1, 60), st.integers(1, 5), st.sampled_from(["spill", "short", "drop"])
)
def test_steps_are_those_of_the_schedule(samples: int, batch: int, epochs: int, tail: str) -> None:
    """`plan` counts as many steps as the runtime's schedule takes."""
    if tail == "drop" and samples < batch:
        return
    job = make_job(train__epochs=epochs, dataset__global_batch_size=batch, dataset__tail=tail)
    schedule = IndexSchedule(samples, batch, epochs=epochs, tail=tail)
    assert num_steps(job.train, job.dataset, samples) == schedule.remaining(schedule.start)


@given(st.integers(1, 500), st.integers(1, 60), st.sampled_from(["spill", "short", "drop"]))
def test_steps_of_an_epoch_are_those_of_the_schedule(samples: int, batch: int, tail: str) -> None:
    """Over twenty epochs of the runtime's schedule, each ends as many steps as `plan` says."""
    if tail == "drop" and samples < batch:
        return
    schedule = IndexSchedule(samples, batch, epochs=20, tail=tail)
    position, ended = schedule.start, [0] * 21
    while not schedule.is_end(position) and position.epoch < 19:  # the last epoch's last batch is short
        position = schedule.batch(position)[2]
        ended[(position.offset - 1) // samples] += 1
    job = make_job(dataset__global_batch_size=batch, dataset__tail=tail)
    fewest, most = steps_per_epoch(job.dataset, samples)
    assert {fewest, most} >= set(ended[:18])


def test_declared_steps_need_no_dataset() -> None:
    """train.steps is the number of steps."""
    job = make_job(train__epochs=None, train__steps=17)
    assert num_steps(job.train, job.dataset, 0) == 17
