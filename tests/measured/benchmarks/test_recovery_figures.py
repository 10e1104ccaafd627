"""What the recovery benchmark makes of its tries; how long anything took is not looked at here."""

from __future__ import annotations

import json

import pytest

from elasticflow import events
from tests.measured.benchmarks import recovery_figures as figures
from tests.measured.benchmarks.recovery import WAYS
from tests.measured.benchmarks.recovery_figures import Figures, Try
from tests.measured.benchmarks.recovery_ours import Ours

LATE = Try(None, "not within 60 s: 4 groups formed")


def made(seconds: list[float | None], name: str = "worker") -> figures.Tries:
    """Return tries of one part that took so many seconds; None: training did not continue."""
    return {name: [LATE if each is None else Try(each) for each in seconds]}


def test_median_is_of_those_that_went_on() -> None:
    """A try after which training did not continue is counted and told, and is no time."""
    found = Figures.of([Try(3.0), LATE, Try(1.0), Try(2.0, "2 groups formed"), LATE])

    assert (5, 3, 2.0, 1.0, 3.0) == (found.tries, found.went_on, found.median, found.least, found.most)
    assert "2.00 (1.00 to 3.00)" == found.seconds_text()
    expected = "3 of 5 (2 x not within 60 s: 4 groups formed; 1 x 2 groups formed)"
    assert expected == found.outcomes_text()


def test_nothing_that_went_on_has_no_median() -> None:
    """The table says so in a word."""
    line = figures.table(made([None, None])).splitlines()[2]
    assert "| never | 0 of 2 (2 x" in line


@pytest.mark.parametrize(
    ("seconds", "name", "kept"),
    [
        ([0.35, 0.35], "worker", {"worker: 0.35 s, at most 0.35 s": True}),
        ([0.36, None], "worker", {"worker: 0.36 s, at most 0.35 s": False}),
        ([0.45], "worker-timm", {"worker-timm: 0.45 s, at most 0.5 s": True}),
        ([None], "worker", {}),
    ],
)
def test_bounds(seconds: list[float | None], name: str, kept: dict[str, bool]) -> None:
    """A bound in seconds, another where the model's module imports more than torch."""
    assert kept == figures.bounds(made(seconds, name))


def test_tries_are_read_as_they_were_written() -> None:
    """Several short pieces make one table."""
    before = made([0.2, None], "join-slow")

    assert before == figures.from_json(json.loads(json.dumps(figures.to_json(before))))


def test_way_has_the_medians_of_what_happened() -> None:
    """In the order of the events; what a part never sees stays empty."""
    seen: dict[str, float] = {events.NODE_LOST: 2.5, events.TRAINING_FIRST_STEP: 2.6}
    tries = {
        "worker": [Try(0.2, marks={events.TRAINING_FIRST_STEP: at}) for at in (0.1, 0.3, 0.2)],
        "node": [Try(2.6, marks=seen)],
    }

    lines = figures.way(tries).splitlines()
    assert f"| ms | {events.NODE_LOST} | {events.TRAINING_FIRST_STEP} |" == lines[0]
    assert [["", "200"], ["2500", "2600"]] == [
        [c.strip() for c in line.split("|")[2:4]] for line in lines[2:]
    ]


def test_everything_can_be_tried() -> None:
    """Each way has a method."""
    assert [True] * 4 == [hasattr(Ours, way) for way in WAYS]
