"""StopTraining raised on one rank, in real worker groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import StopTraining
from elasticflow.runtime.process import stopping
from elasticflow.runtime.process.context import Worker
from elasticflow.runtime.process.votes import Vote

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_first_reason_counts() -> None:
    """Of several reasons on one rank the first is told; one without a text gets one."""
    vote = Vote()
    with stopping.Stoppable(vote):
        raise StopTraining
    stopping.request_stop(vote, StopTraining("later"))
    assert vote.stop_wanted == "no reason given"


def test_snapshot_of_rank_0_records_what_another_rank_has_requested() -> None:
    """By a hook, after the step's vote: a run that is killed before the next vote ends at that step nevertheless."""
    votes = Vote(), Vote()
    stopping.request_stop(votes[1], StopTraining("enough"))
    ballots = [stopping.ballot(vote) for vote in votes]
    for vote in votes:
        me: Any = SimpleNamespace(
            vote=vote, all_true=lambda _: False, gather_text=lambda _: ballots, stopped=None
        )
        Worker.share_request(me)
        assert "enough" == Worker.own_reason_to_stop(me)
    assert ["", "!enough"] == [stopping.ballot(vote) for vote in votes]


def test_reason_of_a_loader_process_is_its_last_line() -> None:
    """Torch hands such an exception on with a traceback as its text."""
    vote = Vote()
    text = "Caught StopTraining in DataLoader worker process 0.\nOriginal Traceback ...\nelasticflow.StopTraining: enough: 3\n"
    stopping.request_stop(vote, StopTraining(text))
    assert vote.stop_wanted == "enough: 3"


def test_reason_that_cannot_travel_is_made_to() -> None:
    """Whatever it holds, all ranks and the run's files take it."""
    vote = Vote()
    stopping.request_stop(vote, StopTraining("caf\udce9 " + "x" * 5000))
    assert f"caf\\udce9 {'x' * 995}" == vote.stop_wanted


def test_other_errors_pass() -> None:
    """What is no StopTraining is an error like any other."""
    with pytest.raises(ValueError, match="label"), stopping.Stoppable(Vote()):
        raise ValueError("label 9 is out of range")


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("place", "step", "arguments"),
    [
        ("step", 4, ("--micro-batch-size", "3")),
        ("data", 4, ("--micro-batch-size", "3")),
        ("schedule", 5, ()),
        ("metric", 7, ()),
        ("loop", 5, ()),
        ("step", 4, ("--shards", "8")),
        ("schedule", 5, ("--shards", "8", "--processes", "1")),
    ],
)
def test_all_ranks_stop_after_the_same_step(
    groups: Callable[..., Any], place: str, step: int, arguments: tuple[str, ...]
) -> None:
    """Whatever raises it on rank 1 of 3: nobody hangs, the run is finished, its last snapshot that of the undisturbed run.

    What is raised in step 5, or by the schedule, evaluation or loop after it, ends training before the next vote.
    """
    group = groups("stopped")
    at = 7 if place == "metric" else 5
    stop = ("--stop-at", str(at), "--stop-in", place)
    assert group.run(3, *arguments, *stop).codes == [0, 0, 0]
    (stopped,) = group.lines("training.stopped")
    assert (stopped["step"], stopped["reason"], stopped["by_rank"]) == (step, "good enough", 1)
    (finished,) = group.lines("training.finished")
    assert finished["step"] == step
    newest = group.newest().manifest
    assert (newest.step, newest.trigger) == (step, "end")
    if place == "step":  # started again, on a machine that knows the snapshots alone: it is finished
        assert group.run(2, *arguments, "--stop-at", "1000").codes == [0, 0]
        (again,) = group.lines("training.stopped", generation=2)
        assert (again["step"], again["reason"]) == (step, "good enough")
        assert group.lines("step", generation=2) == []


@pytest.mark.e2e
def test_dataset_in_a_loader_process_may_raise_it(groups: Callable[..., Any]) -> None:
    """The step that would have trained on what it did not give changes nothing."""
    group = groups("read")
    assert group.run(2, "--processes", "1", "--stop-at", "5", "--stop-in", "sample").codes == [0, 0]
    (stopped,) = group.lines("training.stopped")
    assert (stopped["reason"], group.newest().manifest.step) == ("good enough", stopped["step"])
    assert 7 > stopped["step"]


@pytest.mark.e2e
def test_too_late_to_agree(groups: Callable[..., Any]) -> None:
    """Raised within the backward of one rank, it is refused by name, with what to do; nobody waits for ever."""
    group = groups("late")
    ended = group.run(2, "--stop-at", "3", "--stop-in", "backward", ends=False)
    assert ended.codes[1] == 1
    (raised,) = group.lines("worker.raised", rank=1)
    assert raised["class"] == "user_error"
    assert raised["error"].startswith(
        "StopTraining was raised where the ranks cannot agree on it: good enough"
    )
    assert "raise it from the training step" in raised["error"]
