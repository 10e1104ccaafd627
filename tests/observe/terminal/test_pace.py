from __future__ import annotations

import pytest

from elasticflow.observe.terminal.pace import Pace
from tests.observe.hand_made import evaluation, step

STEP_S, EVALUATION_S = 0.05, 20.0
STEPS, EVERY = 1000, 100


def of_training(steps: int, *, first_s: float = 9.0) -> Pace:
    """Return what is known after so many steps, with an evaluation at each EVERY; the first step takes long."""
    pace, now = Pace(), 0.0
    for number in range(1, steps + 1):
        seconds = first_s if number == 1 else STEP_S
        now += seconds
        pace.add(step(now, number) | {"seconds": seconds})
        if number % EVERY == 0:
            now += EVALUATION_S
            pace.add(evaluation(now, number, 0.9, 0.9) | {"seconds": EVALUATION_S})
    return pace


@pytest.mark.parametrize("number", [EVERY, EVERY + 1, 2 * EVERY - 1, 5 * EVERY, 9 * EVERY + 1, STEPS - 1])
def test_time_left_is_that_of_the_steps_and_of_the_evaluations(number: int) -> None:
    """Whenever one asks, so it does not swing around an evaluation, each of which takes as long as 400 steps."""
    evaluations = STEPS // EVERY - number // EVERY
    expected = (STEPS - number) * STEP_S + evaluations * EVALUATION_S
    assert of_training(number).seconds_left(number, STEPS) == pytest.approx(expected)


def test_speed_is_of_training_alone() -> None:
    """Evaluations do not slow it, nor does the first step of a group, in which much happens once."""
    pace = of_training(2 * EVERY + 1)
    assert pace.step_s == pytest.approx(STEP_S)
    assert pace.samples_per_s == pytest.approx(64 / STEP_S)


def test_speed_follows_a_change_within_seconds() -> None:
    """A mean over a few seconds of training: steps that took half as long count no more."""
    pace = of_training(400)
    for number in range(401, 601):
        pace.add(step(number, number) | {"seconds": 2 * STEP_S})
    assert pace.step_s == pytest.approx(2 * STEP_S)


def test_lines_of_every_tenth_step_tell_the_same() -> None:
    """A line's seconds are those of one step, whatever logging.every is."""
    pace = Pace()
    for number in range(10, 60, 10):
        pace.add(step(number, number) | {"seconds": STEP_S})
    assert pace.step_s == pytest.approx(STEP_S)
    assert pace.samples_per_s == pytest.approx(64 / STEP_S)
    assert pace.seconds_left(50, 60) == pytest.approx(10 * STEP_S)


def test_nothing_is_said_before_it_is_known() -> None:
    """Neither with one step, nor with the first of another group."""
    pace = of_training(1)
    assert (pace.step_s, pace.samples_per_s, pace.seconds_left(1, 10)) == (None, None, None)
    pace = of_training(2)
    assert pace.step_s == pytest.approx(STEP_S)
    assert pace.seconds_left(2, STEPS) is None, "it may be warming up"
    pace = of_training(50)
    pace.add(step(51, 41, 2))
    assert pace.seconds_left(41, STEPS) is None
