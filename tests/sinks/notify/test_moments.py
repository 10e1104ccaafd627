from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.observe.history import RunHistory
from elasticflow.observe.records import read
from elasticflow.sinks.notify.moments import Moment, Moments
from tests.sinks.runs import Written, event_line, step_line

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.system.records import Record


class Story:
    """Events of a run, each a second after the one before, and the moments that they are."""

    def __init__(self, root: Path, budget: int = 3) -> None:
        self.written = Written.under(root)
        self.moments = Moments(self.written.folder, budget)
        self._second = 0

    def tell(self, name: str, generation: int = 1, **fields: Any) -> Moment | None:
        """Write an event, and return the moment that it is."""
        self._second += 1
        at = f"2026-11-23T03:{self._second // 60:02d}:{self._second % 60:02d}.000000Z"
        event = {"timestamp": at, "level": "info", "event": name, "job": "toy", "run_id": "r1"}
        record = {**event, "generation": generation, **fields}
        self.written.events(record)
        return self.moments.of(record)

    def fail(self, generation: int, left: int, kind: str = "crash") -> None:
        """Write the end of a generation whose rank 1 was killed after step 7."""
        error = "killed by SIGKILL"
        self.tell(events.WORKER_FAILED, generation, rank=1, node="n0", **{"class": kind}, error=error)
        assert not self.tell(
            events.GENERATION_ENDED, generation, step=7, reason=error, rank=1, **{"class": kind}
        )
        assert not self.tell(events.BUDGET_CHARGED, generation, left=left, **{"class": kind})

    def go_on(self, generation: int) -> tuple[Moment | None, Moment | None]:
        """Write that training continues; return the moments of the new group and of its first step."""
        low = self.tell(
            events.GENERATION_STARTED, generation, world_size=2, nodes={}, members=[], reason="crash"
        )
        self.tell(events.TRAINING_STARTED, generation, step=5, steps=20, restored_from="s")
        return low, self.tell(events.TRAINING_FIRST_STEP, generation, step=6, seconds_since_failure=0.25)

    def begin(self) -> None:
        """Write the start of a launch."""
        self.tell(events.RUN_STARTED, launch=1)
        self.tell(events.GENERATION_STARTED, world_size=2, nodes={}, members=[], reason="start")
        self.tell(events.TRAINING_STARTED, step=0, steps=20)
        assert self.tell(events.TRAINING_FIRST_STEP, step=1, seconds_since_failure=None) is None


@pytest.fixture
def story(tmp_path: Path) -> Story:
    """Return a story with a launch that trains."""
    made = Story(tmp_path)
    made.begin()
    return made


def test_the_first_restart_is_told_once(story: Story) -> None:
    """When training continues: with the root cause, and what is left."""
    story.fail(1, left=2)
    low, first = story.go_on(2)
    story.fail(2, left=2, kind="node_lost")
    _, second = story.go_on(3)

    assert (low, second) == (None, None)
    assert first is not None
    assert first.sentence == (
        "continues after its first failure (rank 1: killed by SIGKILL): step 6 was done 0.25 s later"
    )
    assert (first.name, first.step, first.steps, first.restarts_left) == ("first_restart", 6, 20, 2)
    assert (first.next, first.exit_code) == ("elasticflow why r1", None)
    assert first.error == "rank 1: killed by SIGKILL"


def test_a_resize_is_no_restart(story: Story) -> None:
    """Nothing went wrong."""
    story.tell(events.GENERATION_ENDED, 1, step=7, reason="2 nodes", **{"class": "resized"})
    assert (None, None) == story.go_on(2)


@pytest.mark.parametrize(
    ("budget", "told"), [(1, [0]), (2, [1, 0]), (3, [1, 0]), (10, [2, 0]), (100, [25, 0]), (0, [])]
)
def test_a_low_budget_is_told_at_a_quarter_or_one_and_when_none_is_left(
    tmp_path: Path, budget: int, told: list[int]
) -> None:
    """Each mark once on the way down; a failure that ends the run is told as such."""
    story = Story(tmp_path, budget)
    story.begin()
    found = []
    for generation, left in enumerate(range(budget - 1, -1, -1), 1):
        story.fail(generation, left)
        low, _ = story.go_on(generation + 1)
        found += [] if low is None else [low]
    assert told == [each.restarts_left for each in found]
    if budget == 3:
        assert [each.sentence for each in found] == [
            "has 1 restart left of 3. The last failure: rank 1: killed by SIGKILL",
            "has no restart left of 3: the next failure ends it. The last failure: rank 1: killed by SIGKILL",
        ]


def test_a_budget_that_is_full_again_may_be_low_again(story: Story) -> None:
    """Told twice, a refill lies between."""
    told = []
    for generation, left in enumerate([2, 1, 1, 0], 1):
        story.fail(generation, left)
        told.append(story.go_on(generation + 1)[0])
    story.tell(events.BUDGET_REFILLED, 5, budget=3)
    story.fail(5, 2)
    story.go_on(6)
    story.fail(6, 1)
    again, _ = story.go_on(7)
    assert [None, 1, None, 0] == [each and each.restarts_left for each in told]
    assert again is not None


def test_how_a_launch_ended(story: Story) -> None:
    """In one sentence, with exit code, newest measures and the command to type."""
    story.written.metrics([*(step_line(step) for step in range(1, 9)), {**step_line(7), "eval": {"f1": 0.5}}])
    stopped = story.tell(
        events.RUN_INTERRUPTED, step=7, reason="SIGTERM", goes_on_from=5, durations={"training": 3.0}
    )
    cut = story.tell(events.RUN_INTERRUPTED, step=0, reason="a second signal")
    story.fail(1, left=0)
    story.tell(events.BUDGET_SPENT, budget=3)
    spent = story.tell(events.RUN_FAILED, step=7, error="killed", why="4 failures")
    story.tell(events.RUN_STARTED, launch=2)
    failed = story.tell(events.RUN_FAILED, step=0, error="no store")
    done = story.tell(events.RUN_FINISHED, step=20, restarts=1, stopped=None, durations={"training": 90.0})

    told = [each for each in (stopped, cut, spent, failed, done) if each is not None]
    assert [each.sentence for each in told] == [
        "was interrupted after step 7 (SIGTERM); it can resume from step 5",
        "was interrupted before its first step (a second signal)",
        "failed after step 7: rank 1: killed by SIGKILL (4 failures)",
        "failed before its first step: no store",
        "finished with 20 steps and 1 restart, in 1 min 30 s",
    ]
    assert [75, 130, 3, 1, 0] == [each.exit_code for each in told]
    assert told[0].measured == {"loss": 7.001, "eval/f1": 0.5}
    assert [each.next for each in told] == [
        f"elasticflow {word} r1" for word in ("resume", "resume", "why", "why", "report")
    ]


def test_a_launch_that_another_one_has_taken_over_is_no_failed_run(story: Story) -> None:
    """The run goes on elsewhere: a machine that led it, and was halted for a while, has nothing to tell."""
    fields: dict[str, Any] = {"class": "taken_over", "error": "another launch of this run has it"}
    assert story.tell(events.RUN_FAILED, step=7, **fields) is None


def test_each_event_is_taken_once_whoever_asks(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run of weeks none is read again; what was a moment stays one, also for who is behind."""
    taken: list[str] = []

    def take(history: RunHistory, event: Record) -> None:
        taken.append(event["event"])
        before(history, event)

    before = RunHistory.take
    monkeypatch.setattr(RunHistory, "take", take)
    moments = Moments(story.written.folder, 3)
    ends = [event_line(events.RUN_INTERRUPTED, n, step=n) for n in range(1, 30)]
    story.written.events(*ends)
    told = [moments.of(record) for record in (*reversed(ends), *ends)]
    assert [each and each.step for each in told] == [*range(29, 0, -1), *range(1, 30)]
    assert taken == [*(record["event"] for record in read(story.written.folder.events))]


def test_what_continues_a_run_on_several_hosts(story: Story) -> None:
    """The command that its launch recorded, where `elasticflow resume` would start this machine alone."""
    command = "elasticflow run jobs/toy.toml --hosts hosts.txt --run-id r1"
    story.tell(events.RUN_STARTED, launch=2, resume_command=command)
    moment = story.tell(events.RUN_INTERRUPTED, step=9, goes_on_from=9, reason="SIGTERM")
    assert moment is not None
    assert moment.next == command
