from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.observe.terminal.formats import goodput, parts_of, percent, span, took

NAMES = ("starting", "training", "evaluating", "restarting", "ending")


@given(st.lists(st.floats(0.1, 11.9), min_size=5, max_size=5))
def test_a_duration_is_rounded_in_one_way(seconds: list[float]) -> None:
    """The parts and the whole are as every other view shows them."""
    parts = dict(zip(NAMES, seconds, strict=True))
    told = ", ".join(f"{name} {span(amount)}" for name, amount in parts.items())
    assert f"{span(sum(seconds))}: {told}" == took(parts)


def test_a_script_that_reports_no_steps_is_not_said_to_train() -> None:
    """That it ran is known."""
    assert took({"starting": 1.0, "training": 2.0}, is_blind=True) == "3.0 s: starting 1.0 s, script 2.0 s"


def test_long_times_are_told_in_minutes() -> None:
    """And what is less than a second of them is left out."""
    text = took({"starting": 6.4, "training": 4000.0, "evaluating": 60.0, "restarting": 0.2, "ending": 2.0})
    assert text == "1 h 07 min: starting 6.4 s, training 1 h 06 min, evaluating 1 min 0 s, ending 2.0 s"


def test_goodput_is_the_share_of_training() -> None:
    """It is never rounded up: a run that lost a step has no 100 %."""
    assert percent(goodput({"training": 99.999, "redone": 0.001})) == "99.9 %"
    assert percent(goodput({"training": 3.0})) == "100.0 %"
    assert percent(goodput({})) == "-"


def test_odd_parts_are_left_out() -> None:
    """A view never fails."""
    assert parts_of({"training": 1.0, "ending": "x", "starting": None}) == {"training": 1.0}
    assert parts_of([1.0]) == {}
    assert took({}) == "0 ms"
