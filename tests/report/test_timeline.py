"""When what happened: nodes that come and go, launches with pauses between them, clocks that jump."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from elasticflow.observe.history import RunHistory
from elasticflow.report.timeline import MOST_LANES, Timeline
from tests.observe.hand_made import event, story_of_a_kill

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.system.records import Record


def timeline_of(happened: Iterable[Record]) -> Timeline:
    """Return the timeline of these events."""
    return Timeline.of(RunHistory.of(happened))


def test_a_kill_is_two_generations_on_one_lane() -> None:
    """Each starts, then trains; the failure is a mark on its node."""
    timeline = timeline_of(record for record in story_of_a_kill() if "event" in record)
    (lane,) = timeline.lanes
    assert [(s.generation, s.is_training) for s in lane.spans] == [
        (1, False),
        (1, True),
        (2, False),
        (2, True),
    ]
    assert all(a.end <= b.begin for a, b in pairwise(lane.spans))
    assert [(m.tone, m.text) for m in lane.marks] == [
        ("good", "joined (h)"),
        ("bad", "rank 1: killed by SIGKILL"),
    ]
    assert [mark.text for mark in timeline.snapshots] == [
        "step 20, 291.2 kB, steps",
        "step 40, 291.2 kB, steps",
        "step 60, 291.2 kB, end",
    ]
    assert round(timeline.seconds, 3) == 6.6


def test_nodes_that_come_and_go_have_lanes_of_their_own() -> None:
    """A generation stands on the lanes of its members, by the event or by who was there."""
    timeline = timeline_of(
        [
            event(0, "run.started", 0, launch=1),
            event(1, "node.joined", 0, node="n0", host="a"),
            event(1, "node.joined", 0, node="n1", host="b"),
            event(2, "generation.started", 1, world_size=4, nodes=2, reason="start"),
            event(5, "node.lost", 1, node="n1", reason="no sign of life"),
            event(6, "generation.ended", 1, class_="node_lost", reason="n1"),
            event(7, "node.joined", 1, node="n2", host="c"),
            event(8, "generation.started", 2, members=["n2"], reason="node_lost"),
            event(9, "training.first_step", 2, step=1),
            event(12, "node.left", 2, node="n0"),
        ]
    )
    lanes = {lane.node: lane for lane in timeline.lanes}
    spans = {
        node: [(s.generation, s.begin, s.end, s.is_training) for s in lane.spans]
        for node, lane in lanes.items()
    }
    assert spans == {
        "n0": [(1, 2, 6, False)],
        "n1": [(1, 2, 6, False)],
        "n2": [(2, 8, 9, False), (2, 9, 12, True)],
    }
    assert [mark.text for mark in lanes["n1"].marks] == ["joined (b)", "lost: no sign of life"]
    assert [mark.text for mark in lanes["n0"].marks] == ["joined (a)", "left"]


def test_pauses_between_launches_take_no_room() -> None:
    """A night between two launches is a mark, not most of the picture."""
    timeline = timeline_of(
        [
            event(0, "run.started", 0, launch=1),
            event(0, "node.joined", 0, node="n0", host="a"),
            event(1, "generation.started", 1, members=["n0"], reason="start"),
            event(10, "run.interrupted", 1, step=5),
            event(36_010, "run.started", 1, launch=2),
            event(36_011, "generation.started", 2, members=["n0"], reason="resume"),
            event(36_020, "run.finished", 2, step=9),
        ]
    )
    assert timeline.seconds == 20.0
    assert [(pause.at, pause.seconds) for pause in timeline.pauses] == [(10.0, 36_000.0)]
    assert [(s.generation, s.begin, s.end) for s in timeline.lanes[0].spans] == [
        (1, 1.0, 10.0),
        (2, 11.0, 20.0),
    ]


def test_a_clock_that_is_set_back_stands_still() -> None:
    """Nothing lies before what happened before it; an event without a time is left out."""
    timeline = timeline_of(
        [
            event(0, "run.started", 0, launch=1),
            event(9, "generation.started", 1, members=["n0"], reason="start"),
            event(3, "training.first_step", 1),
            event(4, "generation.ended", 1, class_="crash", reason="x"),
            {"event": "node.joined", "node": "n5", "timestamp": "yesterday"},
        ]
    )
    assert [(s.begin, s.end) for s in timeline.lanes[0].spans] == [(9, 9), (9, 9)]
    assert len(timeline.lanes) == 1
    assert timeline_of([]).lanes == []


def test_of_a_thousand_nodes_those_have_lanes_to_which_something_happened() -> None:
    """One is lost, one comes later; of all others, to which the same happened, a few stand for the rest."""
    names = [f"n{number}" for number in range(1000)]
    story = [event(0, "node.joined", 0, node=name, host="h") for name in names]
    story += [
        event(1, "generation.started", 1, members=names, reason="start"),
        event(5, "node.lost", 1, node="n700", reason="no sign of life"),
        event(6, "generation.ended", 1, class_="node_lost", reason="no sign of life"),
        event(7, "node.joined", 1, node="late", host="h"),
        event(8, "generation.started", 2, members=[*names[:700], *names[701:], "late"], reason="node_lost"),
        event(9, "run.finished", 2, step=9),
    ]
    timeline = timeline_of(story)
    shown = [lane.node for lane in timeline.shown_lanes()]

    assert 1001 == len(timeline.lanes)
    assert MOST_LANES == len(shown) == len(set(shown))
    assert ["n700", "late"] == shown[-2:]
    assert timeline.lanes == timeline.shown_lanes(2000)


def test_a_script_without_steps_runs_and_does_not_start_for_ever() -> None:
    """From its start in all workers it works, though no step tells so."""
    timeline = timeline_of(
        [
            event(0, "run.started", 0, launch=1),
            event(1, "node.joined", 0, node="n0", host="a"),
            event(2, "generation.started", 1, world_size=2, nodes=1, reason="start"),
            event(3, "script.started", 1, script="train.py"),
            event(9, "generation.ended", 1, class_="crash", reason="killed by SIGKILL", step=0),
        ]
    )
    (lane,) = timeline.lanes
    assert [(span.is_training, span.begin, span.end) for span in lane.spans] == [(False, 2, 3), (True, 3, 9)]
    assert timeline.seconds == 9
    assert lane.spans[1].text == "generation 1, start: the script runs for 6.0 s; crash: killed by SIGKILL"


def test_a_silent_run_goes_on_after_its_last_event() -> None:
    """The newest generation lasts as long as the run does."""
    started = event(2, "generation.started", 1, world_size=2, nodes=1, reason="start", members=["n0"])
    history = RunHistory.of(
        [event(0, "run.started", 0, launch=1), started, event(3, "script.started", 1, script="s")]
    )
    timeline = Timeline.of(history, 60.0)
    assert (60.0, 60.0) == (timeline.seconds, timeline.lanes[0].spans[-1].end)
