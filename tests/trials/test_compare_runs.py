"""The comparer: what is equal, and where it finds a difference."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.protocol.trajectory_record import Record
from elasticflow.trials import compare_runs

NAMES = ("model/a", "model/b", "optimizer/a/momentum_buffer")


def trained(steps: int, seed: int = 0, generation: int = 1, begin: int = 0) -> list[Record]:
    """Return the records of a generation that continues at *begin*."""

    def record(step: int, *, is_start: bool = False) -> Record:
        digests = {name: f"{seed}-{step}-{name}" for name in NAMES}
        return Record(step, 8 * step, None if is_start else 2.0 / step, generation, 2, digests)

    return [record(begin, is_start=True), *map(record, range(begin + 1, steps + 1))]


def disturbed(steps: int, cuts: list[tuple[int, int]]) -> list[Record]:
    """Return a run with a kill at each cut: (how far it got, where the next generation continues)."""
    records, begin, number = [], 0, 1
    for number, (reached, resumed) in enumerate(cuts, 1):
        records += trained(max(begin, reached), generation=number, begin=begin)
        begin = min(resumed, max(begin, reached))
    return records + trained(steps, generation=number + 1, begin=begin)


CUTS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=4)


@given(cuts=CUTS)
def test_a_run_that_is_killed_and_redoes_its_steps_alike_is_the_same(cuts: list[tuple[int, int]]) -> None:
    """However often it is killed and wherever it continues; every record is compared."""
    other = disturbed(20, cuts)

    found = compare_runs.compare_bits(trained(20), other)

    assert (None, 20, 3) == (found.difference, found.steps, found.values)
    assert sum(r.loss is not None for r in other) - 20 == found.redone


@given(cuts=CUTS, data=st.data())
def test_a_single_bit_anywhere_is_found_and_named(cuts: list[tuple[int, int]], data: st.DataObject) -> None:
    """In the first or a later generation, in a step done once or again, in a state that was restored."""
    other = disturbed(20, cuts)
    place = data.draw(st.integers(0, len(other) - 1))
    name = data.draw(st.sampled_from(NAMES))
    record = other[place]
    other[place] = replace(record, digests={**record.digests, name: "other"})

    difference = compare_runs.compare_bits(trained(20), other).difference

    assert difference is not None
    assert (record.step, name, record.generation) == (difference.step, difference.name, difference.generation)
    assert (f"0-{record.step}-{name}", "other", 0) == (
        difference.expected,
        difference.found,
        difference.others,
    )
    assert (record.loss is None) == difference.is_start
    before = [r for r in other if r.step == record.step and r.generation < record.generation and r.loss]
    assert bool(before) == difference.is_redone


@given(steps=st.lists(st.integers(1, 20), min_size=1, max_size=5))
def test_the_first_of_several_differences_is_named(steps: list[int]) -> None:
    """By step, and within a step in the order of the model; the others are counted."""
    other = [replace(r, digests=dict.fromkeys(NAMES, "x")) if r.step in steps else r for r in trained(20)]

    difference = compare_runs.compare_bits(trained(20), other).difference

    assert difference is not None
    assert (min(steps), NAMES[0], 2) == (difference.step, difference.name, difference.others)


def test_what_only_one_run_has_is_a_difference() -> None:
    """A tensor, a step, all steps."""
    reference = trained(5)
    fewer = [replace(r, digests={NAMES[0]: r.digests[NAMES[0]]}) for r in reference]
    found = [
        compare_runs.compare_bits(*pair).difference
        for pair in ((reference, fewer), (fewer, reference), (reference, reference[:4]), (reference, []))
    ]

    assert [(0, NAMES[1], "0-0-model/b", None), (0, NAMES[1], None, "0-0-model/b"), (4, "step", "done", None), (1, "step", "done", None)] == [
        (d.step, d.name, d.expected, d.found) for d in found if d is not None
    ]  # fmt: skip


def test_losses_are_compared_to_the_last_bit() -> None:
    """One unit in the last place is a difference, of the loss alone; NaN is equal to NaN."""
    reference = trained(3)
    other = [*reference[:-1], replace(reference[-1], loss=math.nextafter(2 / 3, 1))]

    difference = compare_runs.compare_bits(reference, other).difference

    assert difference is not None
    assert ("loss", "0.6666666666666666", "0.6666666666666667") == (
        difference.name,
        difference.expected,
        difference.found,
    )
    nan = [replace(r, loss=r.loss and math.nan) for r in reference]
    assert None is compare_runs.compare_bits(nan, nan).difference


def curve(losses: list[float]) -> list[Record]:
    """Return a run with these losses."""
    return [Record(i, 8 * i, loss, 1, 2, {}) for i, loss in enumerate(losses, 1)]


@given(
    losses=st.lists(st.floats(0.1, 10), min_size=1, max_size=60),
    tolerance=st.floats(0.001, 1),
    share=st.floats(-0.99, 0.99),
)
def test_curves_within_the_bound_are_the_same(losses: list[float], tolerance: float, share: float) -> None:
    """Every loss moved by less than the tolerance of the largest smoothed one: no more than that apart."""
    window = max(1, len(losses) // 10)
    smoothed = [sum(p) / len(p) for e in range(1, len(losses) + 1) if (p := losses[max(0, e - window) : e])]
    moved = [loss + share * tolerance * max(smoothed) for loss in losses]

    found = compare_runs.compare_losses(curve(losses), curve(moved), tolerance)

    assert None is found.difference
    assert found.distance is not None
    assert math.isclose(abs(share) * tolerance, found.distance, rel_tol=1e-6, abs_tol=1e-9)


@given(losses=st.lists(st.floats(0.1, 10), min_size=1, max_size=60), tolerance=st.floats(0.001, 1))
def test_curves_beyond_the_bound_differ_at_the_first_step_that_is(
    losses: list[float], tolerance: float
) -> None:
    """Also where they come together again."""
    moved = [loss + 1.01 * tolerance * max(losses) for loss in losses]

    difference = compare_runs.compare_losses(curve(losses), curve(moved), tolerance).difference

    assert difference is not None
    assert (1, "loss") == (difference.step, difference.name)


def test_curves_need_the_same_number_of_samples_in_each_step() -> None:
    """An equal loss does not excuse a sample left out."""
    other = curve([1.0, 1.0, 1.0])
    other[1] = replace(other[1], samples=15)

    difference = compare_runs.compare_losses(curve([1.0, 1.0, 1.0]), other, 0.1).difference

    assert difference is not None
    assert (2, "samples", "16", "15") == (
        difference.step,
        difference.name,
        difference.expected,
        difference.found,
    )


def test_curves_that_blow_up_together_are_the_same_and_alone_are_not() -> None:
    """NaN and infinity equal themselves alone, and have no distance."""
    up, up_too = curve([1.0, math.inf, math.nan]), curve([1.0, math.inf, math.nan])

    assert (None, 0.0) == ((found := compare_runs.compare_losses(up, up_too, 0.1)).difference, found.distance)
    found = compare_runs.compare_losses(curve([1.0, 1.0, 1.0]), up, 0.1)
    assert found.difference is not None
    assert (2, None) == (found.difference.step, found.distance)


def test_curves_take_the_last_of_steps_that_were_redone() -> None:
    """The run resumed from those; the loss of a step that was lost may be anything."""
    first, again = curve([1.0, 5.0]), [replace(r, generation=2) for r in curve([1.0, 1.0, 1.0])[1:]]

    found = compare_runs.compare_losses(curve([1.0, 1.0, 1.0]), first + again, 0.1)

    assert (None, 3, 1) == (found.difference, found.steps, found.redone)


def test_what_evaluations_measured_is_compared_with_the_bits() -> None:
    """The earlier difference is named; NaN is equal to NaN, and a step that only one run evaluated says nothing."""
    same = compare_runs.RunComparison(9, 0, None)
    reference: compare_runs.Evaluated = {5: {"val.loss": math.nan, "val.f1": 0.5}, 10: {"val.loss": 1.0}}
    assert compare_runs.with_evaluations(same, reference, {5: dict(reference[5]), 7: {"x": 1.0}}) is same
    other: compare_runs.Evaluated = {5: {"val.loss": math.nan, "val.f1": 0.25}, 10: {"val.loss": 2.0}}
    found = compare_runs.with_evaluations(same, reference, other).difference
    assert found == compare_runs.Divergence(5, "evaluation: val.f1", "0.5", "0.25")
    earlier = replace(same, difference=compare_runs.Divergence(3, "model.weight", "a", "b"))
    assert compare_runs.with_evaluations(earlier, reference, other).difference == earlier.difference


def test_all_evaluations_of_a_step_are_compared() -> None:
    """A script may evaluate on several sets after one step, each with a line of its own."""
    lines: list[dict[str, Any]] = [
        {"step": 5, "loss": 1.0},
        {"step": 5, "eval": {"val.loss": 0.5}},
        {"step": 5, "eval": {"test.loss": 0.25}},
    ]
    assert {5: {"val.loss": 0.5, "test.loss": 0.25}} == compare_runs.evaluated_in(lines)
