"""What a plot shows: places in it, axes, words for those who do not see it."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.observe.curves import Curve, Segment
from elasticflow.report.chart import HEIGHT, Labelled, chart_of, round_values


def one(*points: tuple[int, float], generation: int = 1) -> Curve:
    """Return a curve of one generation."""
    return Curve("loss", (Segment(generation, points),), last=points[-1][1])


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e9))
def test_round_values_lie_on_the_axis(low: float, size: float) -> None:
    """A few, in order, equally far apart."""
    values = round_values(low, low + size, 5)
    assert all(low - 1e-6 * size <= value <= low + size * (1 + 1e-9) for value in values)
    assert len(values) <= 11
    steps = [b - a for a, b in pairwise(values)]
    assert all(math.isclose(step, steps[0], rel_tol=1e-3, abs_tol=1e-6) for step in steps)


def test_wide_positive_values_get_a_logarithmic_axis() -> None:
    """Else the end of a loss curve is a flat line."""
    wide = chart_of("loss", [Labelled(one((1, 100.0), (2, 1.0), (3, 0.01)))])
    narrow = chart_of("loss", [Labelled(one((1, 2.0), (2, 1.0)))])
    assert wide is not None
    assert narrow is not None
    assert (wide.is_log, narrow.is_log) == (True, False)
    ys = [point[1] for point in json.loads(wide.data)["points"]]
    assert ys == [0.0, HEIGHT / 2, HEIGHT]
    assert {"1", "0.01", "100"} <= {tick.text for tick in wide.y_ticks}
    assert all(0 <= tick.at <= 100 for tick in (*wide.y_ticks, *narrow.y_ticks, *narrow.x_ticks))


@pytest.mark.parametrize("values", [(0.0, 0.0), (5.0,), (-1.0, -1.0), (1e-300, 1e300)])
def test_odd_values_have_a_place(values: tuple[float, ...]) -> None:
    """A constant, a single value, a range without end."""
    chart = chart_of("loss", [Labelled(one(*enumerate(values, 1)))])
    assert chart is not None
    assert all(0 <= point[1] <= HEIGHT for point in json.loads(chart.data)["points"])


def test_generations_follow_each_other_in_one_line() -> None:
    """Each in its colour, from the last point of the one before; where one began is marked; what was lost stands apart."""
    curve = Curve(
        "loss",
        (Segment(1, ((1, 3.0), (2, 2.0))), Segment(2, ((3, 1.0), (4, 0.5)))),
        redone=(Segment(1, ((3, 1.1),)),),
        odd=(4,),
        last=0.5,
    )
    chart = chart_of("loss", [Labelled(curve)], {1: 1, 2: 3})
    assert chart is not None
    lost, first, second = chart.lines
    assert (lost.is_lost, lost.colour, lost.text) == (True, 0, "generation 1, lost and done again")
    assert (first.colour, second.colour) == (0, 1)
    assert first.path.rpartition("L")[2] == second.path.removeprefix("M").partition("L")[0]
    assert [mark.text for mark in chart.marks] == ["generation 2 from step 3"]
    assert chart.odd == [100.0]
    assert "lowest 0.5000, highest 3.0000" in chart.title
    assert ("4", "2", "0.5000") in chart.rows


def test_several_runs_have_a_colour_each() -> None:
    """And no generations."""
    chart = chart_of("loss", [Labelled(one((1, 1.0)), "a", 0), Labelled(one((1, 2.0), generation=7), "b", 1)])
    assert chart is not None
    assert [(line.text, line.colour) for line in chart.lines] == [("a", 0), ("b", 1)]
    assert chart_of("loss", [Labelled(Curve("loss", ()))]) is None


def test_data_cannot_end_the_script_that_holds_it() -> None:
    """A label is somebody's text."""
    chart = chart_of("loss", [Labelled(one((1, 1.0)), "</script><script>alert(1)</script>")])
    assert chart is not None
    assert "<" not in chart.data
    assert json.loads(chart.data)["labels"] == ["</script><script>alert(1)</script>"]


def test_words_for_those_who_do_not_see_it_leave_out_what_was_done_again() -> None:
    """Lost values are in the picture, and are neither first, lowest nor last; several runs have their own words."""
    curve = Curve(
        "loss",
        (Segment(1, ((1, 3.0), (2, 2.0))), Segment(2, ((3, 1.0),))),
        redone=(Segment(1, ((3, 0.1), (4, 9.0))),),
    )
    alone = chart_of("loss", [Labelled(curve)])
    both = chart_of("loss", [Labelled(curve, "a"), Labelled(one((1, 5.0)), "b", 1)])
    assert alone is not None
    assert both is not None
    told = "first 3.0000, lowest 1.0000, highest 3.0000, last 1.0000"
    assert alone.title == f"loss over 4 steps: {told}"
    assert f"a: {told}; b: first 5.0000" in both.title
