"""What ends training by the metrics of evaluations."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.runtime.evaluation.stop_when import StopWhen

if TYPE_CHECKING:
    from collections.abc import Iterable


def stopped_at(rule: StopWhen, values: Iterable[float], *, name: str = "val.loss") -> int | None:
    """Return after which evaluation, from 1, training ends."""
    for step, value in enumerate(values, 1):
        rule.take({name: value, "other": 0.0}, step)
        if rule.reason is not None:
            return step
    return None


def test_training_ends_after_so_many_evaluations_in_a_row_that_were_not_better() -> None:
    """An equal value is not better; a better one begins the count anew."""
    rule = StopWhen("val.loss", "min", evaluations=3)
    assert stopped_at(rule, [3.0, 2.0, 2.0, 2.5, 1.9, 2.0, 1.9, 1.95]) == 8
    assert (
        rule.reason
        == "train.stop_when: val.loss was not better for 3 evaluations: the best is 1.9, of step 5"
    )


@pytest.mark.parametrize(
    ("better", "values", "end"),
    [("max", [0.1, 0.2, 0.15, 0.16], 4), ("min", [0.1, 0.2, 0.15, 0.16], 3), ("max", [0.1, 0.2, 0.3], None)],
)
def test_which_way_is_better_is_said(better: str, values: list[float], end: int | None) -> None:
    """Of an accuracy larger values are, of a loss smaller ones."""
    rule = StopWhen("val.loss", better, evaluations=2)  # type: ignore[arg-type]  # one of both words
    assert stopped_at(rule, values) == end


def test_by_how_much_it_is_to_be_better() -> None:
    """Crumbs do not count, also if they add up: the best is the last value that was better by enough."""
    rule = StopWhen("val.loss", "min", evaluations=2, by=0.5)
    assert stopped_at(rule, [2.0, 1.75, 1.25, 1.0, 0.9]) == 5


@pytest.mark.parametrize(("better", "end"), [("max", 3), ("min", 1)])
def test_a_bound(better: str, end: int) -> None:
    """Beyond it training ends; at it, it continues."""
    rule = StopWhen("val.loss", better, bound=0.5)  # type: ignore[arg-type]  # one of both words
    assert stopped_at(rule, [0.25, 0.5, 0.75]) == end


def test_what_is_no_number_is_not_better() -> None:
    """NaN counts as not better, and any number is better than it; a bound is never passed by it."""
    assert stopped_at(StopWhen("val.loss", "min", evaluations=2), [1.0, math.nan, math.nan]) == 3
    assert stopped_at(StopWhen("val.loss", "min", evaluations=2), [math.nan, 5.0, 6.0, 7.0]) == 4
    assert stopped_at(StopWhen("val.loss", "max", bound=0.0), [math.nan]) is None
    rule = StopWhen("val.loss", "min", evaluations=2)
    assert stopped_at(rule, [math.nan] * 4) == 3
    assert rule.reason == "train.stop_when: val.loss was not better for 2 evaluations: it was nan each time"


def test_evaluations_of_other_sets_do_not_count() -> None:
    """Where the set was not due, nothing was measured that could be better."""
    rule = StopWhen("val.loss", "min", evaluations=1)
    for step in range(3):
        rule.take({"train.loss": 1.0}, step)
    assert rule.reason is None


@given(st.lists(st.floats(0, 3, width=16), min_size=1, max_size=20), st.integers(1, 5), st.integers(0, 20))
def test_a_restart_counts_on(values: list[float], evaluations: int, cut: int) -> None:
    """Wherever it is cut, and through JSON's numbers, the end is that of one that was never cut."""
    whole = stopped_at(StopWhen("val.loss", "min", evaluations=evaluations), values)
    first, second = (StopWhen("val.loss", "min", evaluations=evaluations) for _ in range(2))
    end = stopped_at(first, values[:cut])
    if end is None:
        second.load_state_dict(first.state_dict())
        after = stopped_at(second, values[cut:])
        end = None if after is None else after + len(values[:cut])
    assert end == whole


def test_more_patience_goes_on_and_another_metric_begins_anew() -> None:
    """A run that has ended may be given more evaluations; what was counted of another metric means nothing."""
    rule = StopWhen("val.loss", "min", evaluations=2)
    assert stopped_at(rule, [1.0, 2.0, 2.0]) == 3
    patient, other = StopWhen("val.loss", "min", evaluations=4), StopWhen("loss", "min", evaluations=2)
    patient.load_state_dict(rule.state_dict())
    other.load_state_dict(rule.state_dict())
    assert (patient.reason, other.reason) == (None, None)
    assert stopped_at(patient, [2.0, 2.0]) == 2
