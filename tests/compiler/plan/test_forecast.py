"""What a run would come to, against a run played step by step."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.compiler.plan.forecast import Forecast, Knowledge, Known, forecast
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.snapshots.format.policy import Due
from tests.compiler.jobs import make_job

if TYPE_CHECKING:
    from elasticflow.runtime.process.position import Position


def _ahead(
    step_s: float | None, samples: int | None = 100, size: float | None = 1000, **changes: Any
) -> Forecast:
    facts = {"samples": samples, "step_s": step_s, "snapshot_bytes": size}
    known = {name: Known(value, "a test") for name, value in facts.items() if value is not None}
    job = make_job(dataset__global_batch_size=10, evaluation__entry="pieces:digits", **changes)
    return forecast(job, Knowledge(**known))


def _places(schedule: IndexSchedule) -> list[Position]:
    found = [schedule.start]
    while not schedule.is_end(found[-1]):
        found.append(schedule.batch(found[-1])[2])
    return found


COUNTED = st.builds("{} {}".format, st.integers(1, 40), st.sampled_from(["steps", "epochs", "samples"]))


@given(COUNTED, st.integers(10, 90), st.integers(1, 6), st.sampled_from(["spill", "short"]))
def test_evaluations_are_as_many_as_a_run_has(every: str, samples: int, epochs: int, tail: Any) -> None:
    """One where each multiple is reached, and one at the end."""
    schedule = IndexSchedule(samples, 10, epochs=epochs, tail=tail, seed=0)
    places = _places(schedule)
    due = Due((every,))
    pairs = itertools.pairwise(places)
    number = sum(due.is_due(before, now) or schedule.is_end(now) for before, now in pairs)

    ahead = _ahead(None, samples, train__epochs=epochs, dataset__tail=tail, evaluation__every=every)

    assert len(places) - 1 == ahead.steps
    assert isinstance(ahead.evaluations, int)
    # Two multiples of samples within one step are one evaluation.
    assert number <= ahead.evaluations if every.endswith("samples") else number == ahead.evaluations


@given(
    st.lists(COUNTED, max_size=2), st.none() | st.integers(1, 400), st.floats(0.1, 20), st.integers(20, 90)
)
def test_snapshots_per_hour_are_about_as_many_as_a_run_takes(
    counted: list[str], timed: int | None, step_s: float, samples: int
) -> None:
    """Counted intervals and the clock together, over a run played with its clock; never too few by much."""
    every = (*counted, *([] if timed is None else [f"{timed} s"])) or ("1 epoch",)
    steps = 200
    taken = _played(Due(every), steps, step_s, samples)

    ahead = _ahead(step_s, samples, train__epochs=None, train__steps=steps, snapshots__every=list(every))

    assert ahead.snapshots_per_hour is not None
    assert ahead.duration_s == pytest.approx(steps * step_s)
    told = ahead.snapshots_per_hour * steps * step_s / 3600
    assert told >= 0.8 * taken - 2
    if len(every) == 1:  # else some meet at one step
        assert told <= 1.3 * taken + 2 or step_s > (timed or math.inf) / 4


@given(
    st.lists(COUNTED, min_size=1, max_size=2),
    st.none() | st.integers(1, 400),
    st.sampled_from([0.25, 1.0, 16.0]),
    st.integers(10, 90),
    st.integers(1, 6),
    st.sampled_from(["spill", "short", "drop"]),
)
def test_snapshots_are_as_many_as_a_run_takes(
    counted: list[str], timed: int | None, step_s: float, samples: int, epochs: int, tail: Any
) -> None:
    """Intervals that meet at one step, and the end, make one snapshot; the clock begins anew at each."""
    every = [*counted, *([] if timed is None else [f"{timed} s"])]
    schedule = IndexSchedule(samples, 10, epochs=epochs, tail=tail, seed=0)
    due, places = Due(tuple(every)), _places(schedule)
    last, number = places[0], 0
    for place in places[1:]:
        if due.is_due(last, place, (place.step - last.step) * step_s) or schedule.is_end(place):
            last, number = place, number + 1

    ahead = _ahead(step_s, samples, train__epochs=epochs, dataset__tail=tail, snapshots__every=every)

    assert number == ahead.snapshots


def test_snapshots_of_a_run_without_end_in_sight_are_estimated() -> None:
    """They are not counted one by one: the plan of a billion epochs would take hours."""
    ahead = _ahead(1.0, train__epochs=10**9, snapshots__every=["20 steps", "1 epoch"])
    assert ahead.snapshots is not None
    assert ahead.snapshots == pytest.approx(10**9, rel=0.01), "each epoch has 10 steps"


def _played(due: Due, steps: int, step_s: float, samples: int) -> int:
    """Return how many snapshots a run of so many steps takes."""
    places = _places(IndexSchedule(samples, 10, steps=steps, tail="spill", seed=0))
    last, taken_at, number = places[0], 0.0, 0
    for place in places[1:]:
        now = place.step * step_s
        if due.is_due(last, place, now - taken_at):
            last, taken_at, number = place, now, number + 1
    return number


def test_bytes_follow_from_the_rate_and_from_what_stays() -> None:
    """An hour of 0.5 s a step, a snapshot every 720 steps: ten; the last three and the best two stay."""
    ahead = _ahead(
        0.5,
        100,
        train__epochs=None,
        train__steps=14_400,
        snapshots__every="720 steps",
        snapshots__keep={"last": 3, "best": 2},
    )
    assert (10, 10_000, 7200, 20) == (
        ahead.snapshots_per_hour,
        ahead.bytes_per_hour,
        ahead.duration_s,
        ahead.snapshots,
    )
    assert (5, 5000) == (ahead.kept, ahead.kept_bytes)


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ({"last": 1, "every": "7200 steps"}, 3),
        ({"last": 1, "within": "1 h"}, 11),
        ({"last": 500}, 20),
    ],
)
def test_what_stays_is_counted(keep: dict[str, Any], kept: int) -> None:
    """Milestones over the whole run, those of the last hour, and never more than there are."""
    changes: dict[str, Any] = {"train__epochs": None, "train__steps": 14_400, "snapshots__every": "720 steps"}
    assert kept == _ahead(0.5, 100, **changes, snapshots__keep=keep).kept


def test_nothing_follows_from_nothing() -> None:
    """Without samples and speed the clock alone tells a rate, and it is the least."""
    ahead = _ahead(None, None, None, train__epochs=3)
    assert (6.0, True) == (ahead.snapshots_per_hour, ahead.is_least)
    assert (None, None, None, None) == (
        ahead.steps,
        ahead.duration_s,
        ahead.evaluations,
        ahead.bytes_per_hour,
    )
    ahead = _ahead(None, None, None, train__epochs=3, snapshots__every="5 steps")
    assert (None, None) == (ahead.snapshots_per_hour, ahead.snapshots)
