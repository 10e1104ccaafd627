"""The process that follows a run for others."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.supervisor.follower import Follower
from elasticflow.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("real_processes")
LIMIT_S = 60.0  # a guard alone

SAYS = """
import json, os, sys
print("not for the journal", flush=True)
print(json.dumps({"event": "no.such", "sink": "x"}), flush=True)
print(json.dumps({"event": "sink.failed", "sink": sys.argv[2], "error": "down"}), flush=True)
"""
WAITS_FOR_THE_END = """
sys.stdin.read()
print(json.dumps({"event": "sink.unsent", "sink": "mine", "points": 3, "error": "slow"}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder."""
    return RunFolder(tmp_path / "runs" / "job" / "run")


class Story:
    """A follower that runs a program, and what it has the journal write."""

    def __init__(self, folder: RunFolder, program: str) -> None:
        self.records: list[dict[str, Any]] = []
        self.journal = Journal(folder, 1, self.records.append)
        self.follower = Follower((sys.executable, "-c", program), folder, self.journal)

    def names(self) -> list[str]:
        """Return the names of the events so far."""
        return [record["event"] for record in self.records]

    def turn_until(self, count: int) -> None:
        """Have the supervisor's loop turn until there are *count* events."""
        deadline = time.monotonic() + LIMIT_S
        while len(self.records) < count:
            assert time.monotonic() < deadline, self.records
            self.follower.turn(time.monotonic())
            time.sleep(0.01)


def test_what_it_says_becomes_events_and_its_end_is_awaited(folder: RunFolder) -> None:
    """Known events only; what it says after it was asked to finish is taken in, too."""
    story = Story(folder, SAYS + WAITS_FOR_THE_END)
    story.turn_until(1)

    story.follower.finish(lambda: False)

    assert ["sink.failed", "sink.unsent"] == story.names()
    assert str(folder.path) == story.records[0]["sink"]


def test_one_that_dies_is_started_again_after_a_pause_that_grows(folder: RunFolder) -> None:
    """By the clock that the supervisor gives: not before the pause is over; the second one is twice as long."""
    story = Story(folder, "import os; os.kill(os.getpid(), 9)")
    now = 0.0
    for _ in range(2):
        deadline = time.monotonic() + LIMIT_S
        before = len(story.records)
        while len(story.records) == before:
            assert time.monotonic() < deadline
            now += 1.0  # it looks a few times a second
            story.follower.turn(now)
            time.sleep(0.01)
        pause_s = story.records[-1]["pause_s"]
        story.follower.turn(now + pause_s - 0.1)
        assert story.follower._process is None
        now += pause_s
    story.follower.end()

    assert ["follower.lost"] * 2 == story.names()
    assert [("killed by SIGKILL", 1.0), ("killed by SIGKILL", 2.0)] == [
        (record["reason"], record["pause_s"]) for record in story.records
    ]


def test_one_that_cannot_be_started_is_tried_again_and_ends_nothing(folder: RunFolder) -> None:
    """The machine may have no room for another process: the training is worth more than its sinks."""
    story = Story(folder, "")
    story.follower._command = ("/absent/python",)
    story.follower.turn(10.0)
    story.follower.turn(10.9)
    story.follower.finish(lambda: False)

    reason = "could not be started: No such file or directory"
    assert [(reason, 1.0), (reason, 2.0)] == [(each["reason"], each["pause_s"]) for each in story.records]


def test_a_person_need_not_wait_for_it(folder: RunFolder) -> None:
    """A signal while it finishes ends it, and that is told."""
    story = Story(folder, SAYS + "import time; time.sleep(1000)")
    story.turn_until(1)

    story.follower.finish(lambda: True)

    assert ["sink.failed", "follower.lost"] == story.names()
    assert story.follower._process is None


def test_without_a_command_nothing_is_started(folder: RunFolder) -> None:
    """A job without sinks has no such process."""
    records: list[dict[str, Any]] = []
    follower = Follower((), folder, Journal(folder, 1, records.append))
    follower.turn(0.0)
    follower.finish(lambda: False)
    follower.end()

    assert (follower._process, records) == (None, [])
