"""When a snapshot is due and which stay, as properties."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.protocol.snapshot_settings import BestMode, Keep
from elasticflow.snapshots.format import policy
from elasticflow.snapshots.format.manifest import Manifest, measure_of


@dataclass(frozen=True)
class Place:
    """A position, and a snapshot for retention."""

    step: int
    epoch: int = 0
    samples: int = 0
    generation: int = 1
    metric: float | None = None
    created: float = 0.0
    parent: str | None = None
    borrowed_from: frozenset[str] = frozenset()
    measured_by: tuple[str | None, ...] = (None, None, None)

    @property
    def name(self) -> str:
        """Unique for each (step, generation)."""
        return f"{self.step:012d}-{self.generation:04d}"


def reasons_of(found: list[Place], rules: Keep, **names: Any) -> dict[str, set[str]]:
    """Return why each of these snapshots stays."""
    return policy.reasons(cast("list[Manifest]", found), rules, **names)


metrics = st.none() | st.floats(allow_nan=True, allow_infinity=True)
snapshot_sets = st.lists(
    st.builds(
        Place,
        step=st.integers(1, 300),
        epoch=st.integers(0, 9),
        samples=st.integers(0, 9000),
        generation=st.integers(1, 3),
        metric=metrics,
    ),
    unique_by=lambda s: s.name,
    max_size=30,
)


@pytest.mark.parametrize(
    ("every", "previous", "now", "seconds", "expected"),
    [
        (("20 steps",), Place(19), Place(20), 0, True),
        (("20 steps",), Place(20), Place(21), 0, False),
        (("20 steps",), Place(20), Place(39), 0, False),
        (("20 steps",), Place(20), Place(40), 0, True),
        (("1 epoch",), Place(9, 0), Place(10, 1), 0, True),
        (("2 epochs",), Place(9, 0), Place(10, 1), 0, False),
        (("1000 samples",), Place(1, 0, 990), Place(2, 0, 1010), 0, True),
        (("10 min",), Place(1), Place(2), 599.9, False),
        (("10 min",), Place(1), Place(2), 600.0, True),
        (("10 min", "1 epoch"), Place(1, 0), Place(2, 1), 3.0, True),
        ((), Place(1), Place(2), 1e9, False),
        (("1 step",), Place(5), Place(5), 0, False),
    ],
)
def test_due(every: tuple[str, ...], previous: Place, now: Place, seconds: float, expected: bool) -> None:
    """Counted intervals are due at their multiples, times by the clock, and never twice at a step."""
    assert policy.Due(every).is_due(previous, now, seconds) is expected


@pytest.mark.parametrize(
    ("every", "expected"),
    [
        (("10 samples", "1 step", "1 epoch", "1 s"), "epoch"),
        (("10 samples", "1 step", "2 epochs"), "steps"),
        (("10 samples", "7 steps"), "samples"),
        (("1 s", "7 steps", "1000 samples"), "time"),
    ],
)
def test_trigger(every: tuple[str, ...], expected: str) -> None:
    """The manifest says why: the rarest of the counted intervals that are due, else it was the clock."""
    assert expected == policy.Due(every).trigger(Place(5, 0, 95), Place(6, 1, 101))


@given(st.integers(1, 50), st.integers(1, 400), st.sets(st.integers(1, 399)))
def test_steps_due_do_not_depend_on_restarts(amount: int, end: int, restarts: set[int]) -> None:
    """Walking step by step from any restored position gives the multiples of the interval and nothing else."""
    due, last, taken = policy.Due((f"{amount} steps",)), Place(0), []
    for step in range(1, end + 1):
        if step in restarts:
            last = Place(step - 1)
        if due.is_due(last, Place(step)):
            taken.append(step)
            last = Place(step)
    assert taken == [step for step in range(1, end + 1) if step % amount == 0]


def test_time_is_asked_of_one_rank() -> None:
    """The shortest time counts, and only where there is one."""
    assert policy.Due(("10 min", "1 h", "5 steps")).seconds == 600
    assert policy.Due(("10 min",)).is_due_by_time(600)
    assert not policy.Due(("10 min",)).is_due_by_time(599)
    assert not policy.Due(("5 steps",)).is_due_by_time(1e9)


def test_bad_interval_is_refused_at_once() -> None:
    """A wrong text fails when the policy is made, not at the first step."""
    with pytest.raises(ValueError, match="units"):
        policy.Due(("5 parsecs",))


@given(snapshot_sets, st.integers(1, 5), st.none() | st.integers(1, 5), st.sampled_from(["max", "min", None]))
def test_newest_always_stay(found: list[Place], last: int, best: int | None, mode: BestMode | None) -> None:
    """The newest by (generation, step) stay, whatever else is asked; nothing is invented."""
    kept = reasons_of(found, Keep(last=last, best=best, best_mode=mode)).keys()
    newest = sorted(found, key=lambda s: (s.generation, s.step), reverse=True)[:last]
    assert {s.name for s in newest} <= kept <= {s.name for s in found}
    assert len(kept) <= last + (best or 0)


@given(snapshot_sets, st.integers(1, 5), st.sampled_from(["max", "min"]))
def test_the_best_stay(found: list[Place], best: int, mode: BestMode) -> None:
    """No removed snapshot is better than the best that stay; one without a metric, or with nan, never counts."""
    kept = reasons_of(found, Keep(last=1, best=best, best_mode=mode)).keys()
    sign = 1 if mode == "max" else -1
    measured = [s for s in found if s.metric is not None and not math.isnan(s.metric)]
    ranks = sorted((sign * s.metric for s in measured if s.metric is not None), reverse=True)
    for snapshot in measured:
        if snapshot.metric is not None and best < len(ranks) and sign * snapshot.metric > ranks[best]:
            assert snapshot.name in kept


@given(snapshot_sets, st.integers(1, 100))
def test_milestones_stay(found: list[Place], amount: int) -> None:
    """For each multiple of the interval that was reached, its first snapshot stays."""
    kept = reasons_of(found, Keep(last=1, every=f"{amount} steps")).keys()
    for multiple in {s.step // amount for s in found} - {0}:
        first = min((s for s in found if s.step // amount == multiple), key=lambda s: (s.step, s.generation))
        assert first.name in kept


@given(snapshot_sets, st.integers(1, 4), st.integers(1, 4), st.integers(1, 50))
def test_keeping_is_stable(found: list[Place], last: int, best: int, amount: int) -> None:
    """What stays would stay again: removing the others removes nothing more the next time."""
    rules = Keep(last=last, best=best, every=f"{amount} steps", best_mode="min")
    kept = reasons_of(found, rules).keys()
    left = [s for s in found if s.name in kept]
    assert reasons_of(left, rules).keys() == kept


def test_a_clock_set_back_keeps_nothing_for_ever() -> None:
    """Taken by a clock a year ahead, then set right: within keeps it as long as its successor, not for a year."""
    early, ahead = Place(1, created=0.0), Place(2, created=365 * 86400.0)
    rules = Keep(last=1, within="1 h")
    soon = [early, ahead, Place(3, created=600.0)]
    assert {s.name for s in soon} == reasons_of(soon, rules).keys()
    later = [*soon, Place(4, created=4800.0)]
    assert {later[-1].name} == reasons_of(later, rules).keys()


def test_order_is_that_of_the_generations_not_of_the_clock() -> None:
    """A clock that jumps back between snapshots changes nothing about which are the newest."""
    found = [Place(step, generation=1 + step // 4, created=1000.0 - step) for step in range(1, 8)]
    assert {s.name for s in found[-3:]} == reasons_of(found, Keep(last=3)).keys()


DAY = 86400.0
rules = st.builds(
    Keep,
    last=st.integers(1, 4),
    best=st.none() | st.integers(1, 3),
    every=st.none() | st.sampled_from(["7 steps", "2 epochs", "500 samples", "1 h"]),
    within=st.none() | st.sampled_from(["10 min", "3 h"]),
    best_mode=st.sampled_from(["max", "min", None]),
)


@st.composite
def histories(draw: st.DrawFn) -> list[Place]:
    """What a run may have committed, oldest first: generations begin where one before was left, and borrow from any."""
    found: list[Place] = []
    step, generation, clock, parent = 0, 1, 0.0, None
    for _ in range(draw(st.integers(1, 20))):
        if found and draw(st.integers(0, 4)) == 0:
            begin = draw(st.sampled_from(found))
            generation, step, parent = generation + 1, begin.step, begin.name
        step += draw(st.integers(1, 9))
        clock += draw(st.sampled_from([-DAY, 1.0, 60.0, 1000.0, 1e4]))
        borrowed_from = (
            draw(st.frozensets(st.sampled_from([s.name for s in found]), max_size=2)) if found else ()
        )
        metric = draw(metrics)
        place = Place(
            step, step // 20, step * 10, generation, metric, clock, parent, frozenset(borrowed_from)
        )
        found.append(place)
    return found


@settings(max_examples=50, deadline=None)
@given(histories(), rules, st.data())
def test_what_never_goes(found: list[Place], asked: Keep, data: st.DataObject) -> None:
    """Whatever the policy and the history: the newest, its parent, the pinned, the used and the borrowed-from stay."""
    names = st.sets(st.sampled_from([s.name for s in found]), max_size=3)
    pinned, in_use = data.draw(names), data.draw(names)
    reasons = reasons_of(found, asked, pinned=pinned | {"gone"}, in_use=in_use)
    assert set().union(*reasons.values()) <= set(policy.REASONS)  # all of them are shown
    newest = found[-1]  # of the last generation
    expected = {newest.name, *({newest.parent} if newest.parent else ()), *pinned, *in_use}
    assert expected <= reasons.keys() <= {s.name for s in found}
    for snapshot in found:
        if snapshot.name in reasons:
            assert snapshot.borrowed_from <= reasons.keys()
    assert all(reasons.values())
    assert reasons == reasons_of(found, asked, pinned=pinned, in_use=in_use)


@settings(max_examples=50, deadline=None)
@given(histories(), rules)
def test_what_stays_for_good_stays_whatever_follows(found: list[Place], asked: Keep) -> None:
    """One that stays for its milestone is kept after every later commit and removal as well."""
    left: list[Place] = []
    milestones: set[str] = set()
    for place in found:
        left.append(place)
        reasons = reasons_of(left, asked)
        left = [s for s in left if s.name in reasons]
        if place.parent is None:  # without going back, which makes an earlier first of a multiple
            milestones |= {name for name, why in reasons.items() if "every" in why}
            assert milestones <= reasons.keys()


def test_reasons() -> None:
    """Each snapshot is told with all that keeps it; one that only lends is told as borrowed from."""
    first, second, third, fourth, fifth = found = [
        Place(1, metric=0.9),
        Place(2, metric=0.1),
        Place(10, metric=0.5),
        Place(11, created=3000.0),
        Place(12, created=5000.0, borrowed_from=frozenset({"000000000002-0001"}), parent="000000000010-0001"),
    ]
    asked = Keep(last=1, best=1, every="10 steps", within="1 h", best_mode="max")
    expected = {
        fifth.name: {"newest", "last", "within"},
        fourth.name: {"within", "pinned"},
        third.name: {"parent", "every"},
        second.name: {"borrowed"},
        first.name: {"best"},
    }
    assert expected == reasons_of(found, asked, pinned={fourth.name: "for the paper"})
    assert {"best", "every", "pinned"} == set(policy.PERMANENT)
    assert {} == reasons_of([], asked)


def test_within_is_measured_from_the_newest() -> None:
    """A job that rested for a week loses nothing by it; what falls out of the time goes."""
    found = [Place(step, created=step * 600.0) for step in range(1, 13)]
    kept = reasons_of(found, Keep(last=1, within="30 min")).keys()
    assert {s.name for s in found[-4:]} == kept


def test_a_milestone_may_be_a_time() -> None:
    """One an hour: the first one committed in each."""
    found = [Place(step, created=step * 1200.0 + 600.0) for step in range(1, 10)]
    kept = reasons_of(found, Keep(last=1, every="1 h")).keys()
    assert {"3", "6", "9"} == {str(s.step) for s in found if s.name in kept}


def test_values_of_another_evaluation_are_no_better_or_worse() -> None:
    """The best is looked for among those measured like the newest: the same measure, by the same code, on the same data."""
    other_metric, other_data, other_source, newest = (
        Manifest(
            run_id="r",
            name="s",
            step=1,
            generation=1,
            world_size=1,
            trigger="steps",
            created=0.0,
            files={},
            tensors={},
            ranked_by=name,
            fingerprints={"evaluation": data},
        ).measured_by
        for name, data in (
            (measure_of("max f1 by m:f1", "s"), "a"),
            (measure_of("max acc by m:acc", "s"), "b"),
            (measure_of("max acc by m:acc", "t"), "a"),
            (measure_of("max acc by m:acc", "s"), "a"),
        )
    )
    found = [
        Place(1, metric=0.7, measured_by=(None, None, None)),  # of an older version
        Place(2, metric=0.99, measured_by=other_metric),
        Place(3, metric=0.98, measured_by=other_data),
        Place(4, metric=0.6, measured_by=newest),
        Place(5, metric=0.97, measured_by=other_source),
        Place(6, metric=0.5, measured_by=newest),
        Place(7),
    ]
    rules = Keep(last=0, best=2, best_mode="max")
    best = {name for name, why in reasons_of(found, rules).items() if "best" in why}
    assert {found[0].name, found[3].name} == best
