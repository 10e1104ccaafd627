from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.compiler.plan import LaunchPlan, plan_job
from elasticflow.compiler.split import num_steps, world_row
from elasticflow.runtime.order import Schedule
from tests.compiler.jobs import make_job

ROOT = Path("/project")


def _planned(**changes: Any) -> LaunchPlan:
    return plan_job(
        make_job(**changes), project_root=ROOT, job_files=[ROOT / "jobs" / "small.toml", Path("/base.toml")]
    )


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
    assert plan.snapshots.best_mode == mode


def test_worlds_from_the_smallest_to_the_largest() -> None:
    """Every number of nodes of a short range has a row."""
    rows = _planned(nodes__min=1, nodes__max=3, dataset__micro_batch_size=10).worlds
    assert [(r.nodes, r.world_size, r.samples_per_rank, r.micro_batches) for r in rows] == [
        (1, 2, (32, 32), 4),
        (2, 4, (16, 16), 2),
        (3, 6, (10, 11), 2),
    ]


def test_long_ranges_are_shown_by_doublings() -> None:
    """A range up to the greatest number of nodes takes a handful of rows, and no time."""
    rows = _planned(nodes__min=3, nodes__max=65_536, dataset__global_batch_size=10**9).worlds
    assert [row.nodes for row in rows] == [3, 6, 12, 24, 48, 96, 192, 384, 768, 1536, 3072, 65_536]


def test_workers_counted_on_the_machine_are_unknown() -> None:
    """nproc_per_node = "gpu" leaves the split open."""
    row = _planned(nodes__nproc_per_node="gpu").worlds[0]
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
    assert num_steps(job, samples) == Schedule(samples, batch, epochs=epochs, tail=tail).steps


def test_declared_steps_need_no_dataset() -> None:
    """train.steps is the number of steps."""
    assert num_steps(make_job(train__epochs=None, train__steps=17), 0) == 17
