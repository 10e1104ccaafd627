"""What happened to a run, its events read once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import given
from hypothesis import strategies as st

from elasticflow import events
from elasticflow.observe.history import SUPERVISOR_LOST, RunHistory, state_of
from elasticflow.observe.standbys import NodeStandbys
from elasticflow.run_folder import RunFolder
from tests.observe.hand_made import SIGKILLED, START, event, story_of_a_kill

if TYPE_CHECKING:
    from pathlib import Path

STORY = [record for record in story_of_a_kill() if "event" in record]


def test_a_killed_worker_is_a_stop_with_what_followed() -> None:
    """One launch, two generations, one failure, three snapshots; the stop knows its charge and its cost."""
    history = RunHistory.of(STORY)

    (launch,) = history.launches
    assert (1, START, 1, "run.finished") == (launch.number, launch.started, launch.pid, launch.end and launch.end["event"])  # fmt: skip
    first, second = history.generations.values()
    assert ("start", 2, None, START + 2.5, 1) == (first.reason, first.world_size, first.parent, first.first_step_at, first.failed_rank)  # fmt: skip
    assert ("crash", "s", None) == (second.reason, second.parent, second.stop)
    assert second.run_end is launch.end
    (stop,) = history.stops
    assert stop is first.stop
    assert stop.is_failure
    assert (1, START + 5, "crash", 47, 4, 0.27, 7, None) == (
        *(stop.generation, stop.at, stop.kind, stop.step),
        *(stop.left, stop.back_s, stop.redone, stop.verdict),
    )
    failure = history.last[events.WORKER_FAILED]
    assert (4711, 1, 4711, SIGKILLED) == (failure["pid"], stop.rank, stop.pid, stop.error)
    snapshot = history.snapshots[0]
    assert ("s", 1, "committed", START + 3.6, 3.6, 291_234) == (
        *(snapshot.name, snapshot.generation, snapshot.state, snapshot.at),
        *(round(snapshot.at_s, 3), snapshot.num_bytes),
    )
    assert history.snapshot is history.snapshots[-1]
    assert (3, 1437, 23466, 2, 60) == (len(history.snapshots), history.samples, history.parameters, second.world_size, history.step)  # fmt: skip


def test_a_run_that_fails_ends_with_the_stop_that_nothing_came_back_from() -> None:
    """Its verdict stands at that stop; after a step since, a stop that was wanted, or in a later launch, it is one of its own."""
    ended = event(5, events.GENERATION_ENDED, class_="crash", reason="r", step=4)
    failed = event(6, events.RUN_FAILED, class_="crash", error="e", why="budget", step=4)
    back = event(5.5, events.TRAINING_FIRST_STEP, 2, step=5, seconds_since_failure=0.5)
    drained = {**ended, "class": "drained"}
    launched = event(5.2, events.RUN_STARTED, launch=2)
    assert [("r", "budget")] == [(stop.reason, stop.verdict) for stop in RunHistory.of([ended, failed]).stops]
    assert [("r", None), ("e", "budget")] == [
        (stop.reason, stop.verdict) for stop in RunHistory.of([ended, launched, failed]).stops
    ]
    assert [("r", None), ("e", "budget")] == [
        (stop.reason, stop.verdict) for stop in RunHistory.of([ended, back, failed]).stops
    ]
    assert [False, True] == [stop.is_failure for stop in RunHistory.of([drained, failed]).stops]


def test_a_failure_before_a_group_is_a_stop_of_its_own() -> None:
    """A charge stands at it, not at the end before; so does the verdict, and a node that was lost is not told again."""
    ended = event(3, events.GENERATION_ENDED, class_="crash", reason="r", step=4)
    lost = event(4, events.NODE_LOST, node="n0", reason="the agent of n0 was killed")
    failed = event(4.1, events.START_FAILED, class_="agent_lost", error="killed", node="n0", step=4)
    charged = event(4.2, events.BUDGET_CHARGED, class_="agent_lost", left=2)
    later = event(6, events.GENERATION_ENDED, 2, class_="crash", reason="later", step=4)
    history = RunHistory.of([ended, lost, failed, charged, later])
    assert [("r", None), ("node n0: killed", 2), ("later", None)] == [
        (stop.headline, stop.left) for stop in history.stops
    ]
    assert 3 == history.failed
    over = event(5, events.RUN_FAILED, class_="agent_lost", error="killed", why="each time")
    assert [None, "each time"] == [stop.verdict for stop in RunHistory.of([ended, failed, over]).stops]


def test_a_script_that_runs_again_has_not_trained_again() -> None:
    """Its start counts apart from its first step, which takes the word away that it began anew."""
    ended = event(5, events.GENERATION_ENDED, class_="crash", reason="r", step=0)
    again = event(6, events.SCRIPT_STARTED, 2, script="s", seconds_since_failure=0.5)
    anew = event(6, events.SCRIPT_BEGAN_ANEW, 2, script="s")
    step = event(7, events.TRAINING_FIRST_STEP, 2, step=5, seconds_since_failure=1.5)
    history = RunHistory.of([ended, again, anew])
    assert (history.stops[0].back_s, history.stops[0].script_again_s) == (None, 0.5)
    assert history.began_anew == anew
    history = RunHistory.of([ended, again, anew, step])
    assert (history.stops[0].back_s, history.began_anew) == (1.5, None)


def test_a_lost_supervisor_is_a_stop() -> None:
    """What is known of it, what is likely, and the steps that its successor does again."""
    lost = event(7, events.SUPERVISOR_LOST, 2, launch=1, step=9, kind="killed", known="k", likely="l")
    again = event(8, events.TRAINING_STARTED, 3, step=5, steps=60)
    (stop,) = RunHistory.of([lost, again]).stops
    assert (SUPERVISOR_LOST, 2, 9, "l", 4) == (
        stop.kind,
        stop.generation,
        stop.step,
        stop.likely,
        stop.redone,
    )
    assert stop.reason.endswith("after step 9: k")


def test_standbys_are_those_of_the_newest_generation() -> None:
    """A restart takes them; why a node has none stays true, and what they cost stays known."""
    ready = event(3, events.STANDBYS_READY, node="n0", pids=[7, 8], seconds=5.1, memory=33_000_000)
    off = event(4, events.STANDBYS_OFF, node="n1", reason="they may take 9 MB, and 3 MB of memory are free")
    again = event(5, events.GENERATION_STARTED, 2, world_size=2)
    assert ["n0", "n1"] == list(RunHistory.of([ready, off]).standbys)
    history = RunHistory.of([ready, off, again])
    assert [NodeStandbys("n1", reason=off["reason"])] == list(history.standbys.values())
    assert NodeStandbys("n0", (7, 8), 5.1, 33_000_000) == history.standbys_seen
    assert {} == RunHistory.of([ready, off, event(9, events.RUN_STARTED, launch=2)]).standbys


def test_a_launch_begins_without_what_the_one_before_left() -> None:
    """Its nodes are others, it does not train, and the pause before it is no time of the run."""
    history = RunHistory.of(
        [
            event(0, events.RUN_STARTED, 0, launch=1),
            event(1, events.NODE_JOINED, 0, node="n0", nproc=2, host="h"),
            event(2, events.GENERATION_STARTED, members=["n0"], world_size=2),
            event(3, events.TRAINING_FIRST_STEP, step=1),
        ]
    )
    assert (history.is_training, history.phase, history.nodes["n0"].first_rank) == (True, None, 0)
    history.take(event(103, events.RUN_STARTED, 1, launch=2))
    assert (history.is_training, dict(history.nodes), history.seconds) == (False, {}, 3.0)
    assert [(pause.at, pause.seconds) for pause in history.pauses] == [(3.0, 100.0)]
    assert (history.generations[1].first_step_s, history.generations[1].ended_s) == (3.0, 3.0)


def test_a_failure_whose_end_no_one_recorded_is_not_the_next_launch_s() -> None:
    """The supervisor was killed right behind it; in the next launch a node is lost."""
    history = RunHistory.of(
        [
            event(1, events.HANG_DETECTED, phase="data", stacks="logs/stacks"),
            event(2, events.WORKER_FAILED, rank=1, error="killed by SIGKILL"),
            event(3, events.RUN_STARTED, 1, launch=2),
            event(4, events.NODE_LOST, 2, node="n1", error="no word for 5 s"),
            event(5, events.GENERATION_ENDED, 2, class_="node_lost", reason="r", step=4),
        ]
    )
    (stop,) = history.stops
    assert ("node n1: no word for 5 s", None, None) == (stop.headline, stop.phase, stop.stacks)


def test_a_history_that_forgets_stays_small_and_knows_what_is_true_now() -> None:
    """A view of a run of weeks: thousands of restarts and snapshots leave the newest of each."""
    history = RunHistory()
    for number in range(1, 3001):
        for happened in (
            event(number, events.GENERATION_STARTED, number, members=["n0"], world_size=1),
            event(number, events.SNAPSHOT_COMMITTED, number, name=f"s{number}", step=number, bytes=1),
            event(number, events.WORKER_FAILED, number, rank=0, node="n0", error=f"e{number}"),
            event(number, events.GENERATION_ENDED, number, class_="crash", reason="", step=number),
        ):
            history.take(happened)
            history.forget()
    kept = (history.stops, history.snapshots, history.node_events, history.generations)
    assert {1} == {len(each) for each in kept}
    assert (history.failed, history.stops[0].error) == (3000, "e3000")
    assert history.snapshot is not None
    assert history.snapshot.name == "s3000"


def test_restarts_left_are_full_again_after_a_refill() -> None:
    """Charged, then refilled."""
    charged = event(1, events.BUDGET_CHARGED, left=1)
    assert RunHistory.of([charged]).budget_left == 1
    assert RunHistory.of([charged, event(2, events.BUDGET_REFILLED, budget=5)]).budget_left == 5


def test_state_where_state_json_is_damaged(run: Path) -> None:
    """Status, verdict and progress come from the events."""
    (run / "state.json").write_text("{")
    state = state_of(RunFolder(run))
    assert ("finished", 1, 2, 60, 60, START, START + 6.6) == tuple(
        getattr(state, name)
        for name in ("status", "launch", "generation", "step", "steps", "launched", "updated")
    )
    assert state.verdict is not None
    assert ("run.finished", 1) == (state.verdict["event"], state.verdict["restarts"])


odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())
fields = st.sampled_from(
    [
        *("timestamp", "generation", "step", "class", "rank", "name", "bytes", "left", "error"),
        *("node", "nproc", "members", "world_size", "durations", "seconds_since_failure", "budget"),
    ]
)


@given(st.lists(st.tuples(st.sampled_from(sorted(events.EVENTS)), st.dictionaries(fields, odd)), max_size=8))
def test_no_record_whatsoever_breaks_a_history(happened: list[tuple[str, dict[str, Any]]]) -> None:
    """A file that anybody wrote can be read."""
    RunHistory.of([{"event": name, **values} for name, values in happened]).state()


def test_a_state_in_memory_is_not_a_snapshot() -> None:
    """Its step is known; no snapshot of its name ever was on disk."""
    started = {"restored_from": "000000000404-0001-0123abcd", "step": 404, "steps": 900}
    held = event(8, events.TRAINING_STARTED, 2, **started, from_memory=True)
    read = event(8, events.TRAINING_STARTED, 2, **started, from_memory=False)
    assert (None, 404) == ((g := RunHistory.of([held]).generations[2]).parent, g.memory_step)
    assert ("000000000404-0001-0123abcd", None) == (
        (g := RunHistory.of([read]).generations[2]).parent,
        g.memory_step,
    )
