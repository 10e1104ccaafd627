from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.observe.terminal.formats import elapsed, local_time, number, plural, size, span
from elasticflow.system.records import unix_time


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00.0"),
        (5.34, "0:05.3"),
        (59.96, "1:00.0"),
        (760, "12:40.0"),
        (3599.99, "1:00:00"),
        (10807, "3:00:07"),
    ],
)
def test_elapsed(seconds: float, text: str) -> None:
    """Tenths matter in the first hour and not after it; rounding never gives 60 seconds."""
    assert elapsed(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0042, "4 ms"),
        (0.28, "0.28 s"),
        (2.26, "2.3 s"),
        (12.14, "12.1 s"),
        (59.97, "1 min 0 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (356_400, "4 d 3 h"),
    ],
)
def test_span(seconds: float, text: str) -> None:
    """A span has the unit a person would choose."""
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (1, "1 byte"),
        (812, "812 bytes"),
        (64_100, "64.1 kB"),
        (999_960, "1.0 MB"),
        (1.2e9, "1.2 GB"),
        (2e18, "2,000.0 PB"),
    ],
)
def test_size(num_bytes: float, text: str) -> None:
    """Sizes are in powers of 1000."""
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.23139, "0.2314"),
        (12.3, "12.30"),
        (3e-5, "3.00e-05"),
        (123_456.0, "1.23e+05"),
        (math.inf, "inf"),
        ("nan", "nan"),
        ("many", "many"),
    ],
)
def test_number(value: float | str | None, text: str) -> None:
    """Losses of any size stay short; infinities written as words are shown as such."""
    assert number(value) == text


def test_plural() -> None:
    """One is not many."""
    assert [plural(n, "step") for n in (0, 1, 2, 1437)] == ["0 steps", "1 step", "2 steps", "1,437 steps"]


def test_moment_reads_every_way_a_time_is_written() -> None:
    """RFC 3339 with Z, with an offset, without a zone (UTC), and Unix time mean the same."""
    texts = [
        "2026-11-20T10:00:00Z",
        "2026-11-20T11:00:00+01:00",
        "2026-11-20T10:00:00.000",
        1795168800,
        1795168800.0,
    ]
    assert {unix_time(text) for text in texts} == {1795168800.0}
    assert [unix_time(x) for x in ("soon", None, True, [1])] == [None] * 4
    assert local_time(None) == "-"


@given(st.floats(0, 1e12))
def test_no_time_breaks_a_format(seconds: float) -> None:
    """Any span has a text without line breaks."""
    assert "\n" not in elapsed(seconds) + span(seconds) + size(seconds) + number(seconds)
