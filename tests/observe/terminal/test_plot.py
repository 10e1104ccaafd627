"""Curves in characters: as wide and high as asked, the extremes at the edges."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.observe.terminal.plot import plot


@given(
    st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=60),
    st.integers(20, 200),
    st.integers(2, 40),
    st.booleans(),
)
def test_it_keeps_to_its_room(
    values: list[float], width: int, height: int, pretty: bool
) -> None:  # drawn by hypothesis
    """Whatever the values: no line is wider, and there are as many as asked and one for the steps."""
    lines = plot(list(enumerate(values, 1)), width, height, pretty=pretty)
    assert len(lines) == height + 1
    assert max(map(len, lines[:-1])) <= max(width, 24)


def test_a_line_that_rises() -> None:
    """From the lower left to the upper right."""
    lines = plot([(n, float(n)) for n in range(1, 11)], 20, 10, pretty=False)
    rows = [line.partition("|")[2] for line in lines[:-1]]
    assert [row.find("*") for row in rows] == sorted((row.find("*") for row in rows), reverse=True)
    assert (lines[0].split()[0], lines[9].split()[0]) == ("10.00", "1.0000")
    assert lines[-1].split() == ["1", "step", "10"]


def test_a_wide_range_is_logarithmic() -> None:
    """And that is said."""
    assert plot([(1, 1000.0), (2, 1.0)], 60, 4, pretty=True)[-1].endswith("step 2, logarithmic")
    assert "logarithmic" not in plot([(1, 1000.0), (2, 0.0)], 60, 4, pretty=True)[-1]
