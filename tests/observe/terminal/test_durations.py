from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.observe.terminal.durations import goodput, parts_of, percent, took

NAMES = ("starting", "training", "evaluating", "restarting", "ending")


@given(st.lists(st.floats(0, 11.9), min_size=5, max_size=5))
def test_parts_in_words_add_up(seconds: list[float]) -> None:
    """To the tenth of a second that is shown; and the sum is the rounded one."""
    head, _, rest = took(dict(zip(NAMES, seconds, strict=True))).partition(": ")
    shown = [round(10 * float(each)) for each in re.findall(r"([\d.]+) s", rest)]
    assert round(10 * float(head.removesuffix(" s"))) == sum(shown)
    assert float(head.removesuffix(" s")) == pytest.approx(sum(seconds), abs=0.0501)


def test_long_times_are_told_in_minutes() -> None:
    """And what is less than a second of them is left out."""
    text = took({"starting": 6.4, "training": 4000.0, "evaluating": 60.0, "restarting": 0.2, "ending": 2.0})
    assert text == "1 h 07 min: starting 6.40 s, training 1 h 06 min, evaluating 1 min 0 s, ending 2.00 s"


def test_goodput_is_the_share_of_training() -> None:
    """It is never rounded up: a run that lost a step has no 100 %."""
    assert percent(goodput({"training": 99.999, "redone": 0.001})) == "99.9 %"
    assert percent(goodput({"training": 3.0})) == "100.0 %"
    assert percent(goodput({})) == "-"


def test_odd_parts_are_left_out() -> None:
    """A view never fails."""
    assert parts_of({"training": 1.0, "ending": "x", "starting": None}) == {"training": 1.0}
    assert parts_of([1.0]) == {}
    assert took({}) == "0.0 s"
