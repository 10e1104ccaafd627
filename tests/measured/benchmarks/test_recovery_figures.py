"""What the recovery benchmark makes of its tries; how long anything took is not looked at here."""

from __future__ import annotations

import json

import pytest

from elasticflow import events
from tests.measured.benchmarks import recovery_figures as figures
from tests.measured.benchmarks.recovery import WAYS
from tests.measured.benchmarks.recovery_figures import OURS, THEIRS, Figures, Try
from tests.measured.benchmarks.recovery_ours import Ours
from tests.measured.benchmarks.recovery_torchrun import Torchrun

LATE = Try(None, "not within 60 s: 4 groups formed")


def made(ours: list[float], theirs: list[float | None], name: str = "worker") -> figures.Tries:
    """Return tries of one part that took so many seconds; None: training did not continue."""
    rival = [LATE if seconds is None else Try(seconds) for seconds in theirs]
    return {name: {OURS: [Try(seconds) for seconds in ours], THEIRS: rival}}


def test_median_is_of_those_that_went_on() -> None:
    """A try after which training did not continue is counted and told, and is no time."""
    found = Figures.of([Try(3.0), LATE, Try(1.0), Try(2.0, "2 groups formed"), LATE])

    assert (5, 3, 2.0, 1.0, 3.0) == (found.tries, found.went_on, found.median, found.least, found.most)
    assert "2.00 (1.00 to 3.00)" == found.seconds_text()
    expected = "3 of 5 (2 x not within 60 s: 4 groups formed; 1 x 2 groups formed)"
    assert expected == found.outcomes_text()


def test_nothing_that_went_on_has_no_median() -> None:
    """The table says so in a word, and no ratio is made of it."""
    found = made([0.2], [None, None])

    line = figures.table(found).splitlines()[2]
    assert "| 0.20 (0.20 to 0.20) | 1 of 1 | never | 0 of 2 (2 x" in line
    assert line.endswith("|  |")


@pytest.mark.parametrize(
    ("ours", "theirs", "broken"),
    [
        ([0.35, 0.35], [1.75], []),
        ([0.36], [2.0], ["worker: 0.36 s, at most 0.35 s"]),
        ([0.3], [1.4, None], ["worker: 0.214 of torchrun's where it continued, at most 0.2"]),
        ([0.3], [None], []),
        ([], [2.0], []),
    ],
)
def test_bounds(ours: list[float], theirs: list[float | None], broken: list[str]) -> None:
    """A bound in seconds, and a share of what torchrun takes where it continues at all."""
    kept = figures.bounds(made(ours, theirs))

    assert broken == [words for words, is_kept in kept.items() if not is_kept]


def test_tries_are_read_as_they_were_written() -> None:
    """Several short pieces make one table."""
    before = made([0.2, 0.3], [None, 2.0], "join-slow")

    assert before == figures.from_json(json.loads(json.dumps(figures.to_json(before))))


def test_way_has_the_medians_of_what_happened() -> None:
    """In the order of the events; what a part never sees stays empty."""
    seen: dict[str, float] = {events.NODE_LOST: 2.5, events.TRAINING_FIRST_STEP: 2.6}
    tries = {
        "worker": {OURS: [Try(0.2, marks={events.TRAINING_FIRST_STEP: at}) for at in (0.1, 0.3, 0.2)]},
        "node": {OURS: [Try(2.6, marks=seen)]},
    }

    lines = figures.way(tries).splitlines()
    assert f"| ms | {events.NODE_LOST} | {events.TRAINING_FIRST_STEP} |" == lines[0]
    assert [["", "200"], ["2500", "2600"]] == [
        [c.strip() for c in line.split("|")[2:4]] for line in lines[2:]
    ]


def test_everything_can_be_tried_with_elasticflow() -> None:
    """Each way has a method, and torchrun has one for all but the kill of an agent alone."""
    assert [True] * 4 == [hasattr(Ours, way) for way in WAYS]
    assert [True, True, True, False] == [hasattr(Torchrun, way) for way in WAYS]


def test_bounds_with_a_model_that_imports_more() -> None:
    """They are others than those of bare torch."""
    kept = figures.bounds(made([0.45], [5.0], "worker-timm"))
    assert {
        "worker-timm: 0.45 s, at most 0.5 s": True,
        "worker-timm: 0.090 of torchrun's where it continued, at most 0.2": True,
    } == kept
    assert [False, False] == list(figures.bounds(made([3.0], [3.5], "start-timm")).values())[1:] * 2
