"""Workers that stand still, as their heartbeats tell, and no false alarm."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.agent import worker_heartbeats as heartbeats_module
from elasticflow.launcher.agent.worker_heartbeats import (
    MIN_LIMIT_S,
    MOST_WORKERS,
    STALL_FACTOR,
    STALLS_TO_LEARN,
    HangTimeouts,
    WorkerHeartbeats,
)
from elasticflow.protocol.messages import RankFigures
from elasticflow.protocol.worker_environment import (
    FIGURES,
    HEARTBEAT,
    HEARTBEAT_SLOT,
    HELD,
    PROFILE,
    DeviceUsage,
)
from elasticflow.runtime.measuring.own_time import StepTimes
from elasticflow.runtime.process.step_log import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator

CEILING_S = 10.0
LOOK_S = 0.5


class Clock:
    """A clock the test turns, and the heartbeats that are looked at as it does."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Return the time that was set."""
        return self.now

    def look(self, watched: WorkerHeartbeats, seconds: float, gone: tuple[int, ...] = ()) -> bool:
        """Let so much time pass, looking all the while; return what the last look found."""
        found = watched.look(gone)
        for _ in range(int(seconds / LOOK_S)):
            self.now += LOOK_S
            found = watched.look(gone)
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the agent's side looks at."""
    made = Clock()
    monkeypatch.setattr(heartbeats_module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def watched(clock: Clock) -> Iterator[WorkerHeartbeats]:
    """Yield the agent's side for two workers."""
    made = WorkerHeartbeats(CEILING_S)
    made.reset(2)
    yield made
    made._memory.close()
    os.close(made.fd)


def test_slot_holds_a_heartbeat() -> None:
    """No rank writes into its neighbour's slot."""
    assert HEARTBEAT.size + HELD.size + PROFILE.size + FIGURES.size <= HEARTBEAT_SLOT


def test_figures_of_the_workers(watched: WorkerHeartbeats) -> None:
    """They have global ranks, and stand apart from all else in the slot; a worker that has written none has none."""
    first, second = Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)
    second.beat(7)
    second.hold(6)
    watched.request_profile(1, 3)
    second.figures(StepTimes(0.25, 0.5), "cuda:1", DeviceUsage(700, 2000, 900, 87))
    ranks = {0: 4, 1: 5}
    assert watched.figures(ranks) == (
        RankFigures(5, 1, 0.25, 0.5, "cuda:1", DeviceUsage(700, 2000, 900, 87)),
    )
    first.figures(StepTimes(1.0, 2.0), "cpu", None)
    second.figures(StepTimes(0.25, 0.5), "cuda:1", DeviceUsage(700, 2000, 900))
    assert watched.figures(ranks) == (
        RankFigures(4, 1, 1.0, 2.0, "cpu"),
        RankFigures(5, 2, 0.25, 0.5, "cuda:1", DeviceUsage(700, 2000, 900)),
    )
    assert second.requested_profile() == 3
    assert watched.progress()[1].step == 7
    watched.reset(2)
    assert watched.figures(ranks) == ()


def test_newest_step_that_all_hold(watched: WorkerHeartbeats) -> None:
    """What one rank does not hold yet is not held; beats leave it as it is, and the next generation begins anew."""
    ranks = [Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)]
    ranks[0].hold(8)
    assert watched.held() is None
    ranks[1].hold(7)
    for rank in ranks:
        rank.beat(9)
    assert 7 == watched.held()
    watched.reset(2)
    assert watched.held() is None


def test_all_ranks_standing_are_found(watched: WorkerHeartbeats, clock: Clock) -> None:
    """Each is told with its phase, step and time."""
    ranks = [Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)]
    ranks[1].phase("evaluate")
    ranks[1].beat(7)
    assert not clock.look(watched, 4)
    ranks[0].beat(8)
    assert not clock.look(watched, CEILING_S)
    assert clock.look(watched, 2 * LOOK_S)

    assert [(0, "start", 8), (1, "evaluate", 7)] == [stand[:3] for stand in watched.progress()]
    assert [CEILING_S + 2 * LOOK_S, CEILING_S + 4 + 2 * LOOK_S] == [s.seconds for s in watched.progress()]


def test_one_that_moves_is_what_the_others_wait_for(watched: WorkerHeartbeats, clock: Clock) -> None:
    """A long evaluation on rank 0, batch by batch: rank 1, which has had its part, waits for as long as it takes."""
    rank0, rank1 = Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)
    rank1.phase("evaluate")
    for _ in range(10):
        rank0.phase("evaluate")
        assert not clock.look(watched, CEILING_S - LOOK_S)


def test_ranks_that_have_left_count_no_more(watched: WorkerHeartbeats, clock: Clock) -> None:
    """The last one that stands is found; when all have left there is none."""
    Heartbeat(watched.fd, 1).phase("leave")

    assert clock.look(watched, CEILING_S + LOOK_S, gone=(0,))
    assert not watched.look((0, 1))


def test_beats_between_two_looks_count_though_the_looks_are_late(
    watched: WorkerHeartbeats, clock: Clock
) -> None:
    """The agent itself was held up for minutes: workers that continued meanwhile are not killed."""
    clock.now += 600
    Heartbeat(watched.fd, 0).beat(1)
    Heartbeat(watched.fd, 1).beat(1)

    assert not watched.look(())


def test_machine_that_slept_is_no_hang(watched: WorkerHeartbeats, clock: Clock) -> None:
    """Neither agent nor workers ran for an hour: the workers have all their time once both do."""
    clock.look(watched, 5)
    clock.now += 3600

    assert not clock.look(watched, CEILING_S - 5)
    assert clock.look(watched, 2 * LOOK_S)


def test_silent_ranks_are_those_of_the_last_look(watched: WorkerHeartbeats, clock: Clock) -> None:
    """A rank that beats is none of them, and the time in which the agent was paused counts for nobody."""
    moves = Heartbeat(watched.fd, 1)
    clock.look(watched, 3)
    moves.beat(2)
    clock.look(watched, 0.5)
    assert ([0], [0, 1]) == (watched.silent(3), watched.silent(0.5))
    clock.now += 3600
    watched.look(())
    assert [] == watched.silent(4)


def test_next_generation_starts_anew_with_what_was_learned(watched: WorkerHeartbeats, clock: Clock) -> None:
    """The standstill of a generation that is gone is not counted against the next; its limits are kept."""
    rank = Heartbeat(watched.fd, 1)
    rank.phase("step")
    clock.look(watched, 3)
    rank.beat(5)
    clock.look(watched, CEILING_S + LOOK_S)
    watched.reset(1)

    assert not clock.look(watched, CEILING_S)
    assert watched.hang_timeouts._seen["step"] == (1, 3.0)


def test_memory_holds_the_most_workers_a_node_may_have(watched: WorkerHeartbeats) -> None:
    """The last slot is inside, and reaches a forked process by its descriptor."""
    assert os.get_inheritable(watched.fd)
    with mmap.mmap(watched.fd, 0) as memory:
        assert MOST_WORKERS * HEARTBEAT_SLOT == len(memory)
    Heartbeat(watched.fd, MOST_WORKERS - 1).beat(1)


@pytest.mark.parametrize(
    ("ceiling_s", "longest_s", "limit_s"),
    [
        (600, 0.02, MIN_LIMIT_S),
        (600, 20, 20 * STALL_FACTOR),
        (600, 100, 600),  # never more than the job allows,
        (600, 700, 1400),  # unless the run has stood longer and continued
        (5, 0.02, 5),
    ],
)
def test_limit_follows_the_run(ceiling_s: float, longest_s: float, limit_s: float) -> None:
    """Once a phase was seen often enough, it is a multiple of the longest; of other phases nothing is known."""
    limits = HangTimeouts(ceiling_s)
    limits.note("step", longest_s)
    assert max(ceiling_s, 2 * longest_s * (longest_s > ceiling_s)) == limits.of("step")
    for _ in range(STALLS_TO_LEARN - 1):
        limits.note("step", longest_s / 2)

    assert limit_s == limits.of("step")
    assert ceiling_s == limits.of("evaluate")


def test_slowing_down_raises_the_limit() -> None:
    """Each step takes half as long again as the one before: none is taken for a hang."""
    limits, seconds = HangTimeouts(3600), 0.1
    while seconds < 2000:
        for _ in range(STALLS_TO_LEARN):
            limits.note("step", seconds)
        seconds *= 1.5
        assert seconds < limits.of("step")


def test_nothing_is_learned_of_a_compiler() -> None:
    """Ten graphs in an instant, then one that takes minutes: that is no hang."""
    limits = HangTimeouts(600)
    for _ in range(10 * STALLS_TO_LEARN):
        limits.note("compile", 0.01)
    assert 600 == limits.of("compile")
    limits.note("compile", 700)
    assert 1400 == limits.of("compile")


def test_alarm_is_not_raised_twice_for_the_same_thing() -> None:
    """Quick steps, and at each epoch's end a pause beyond the limit: the next one may last as long, up to the ceiling."""
    limits = HangTimeouts(600)
    for _ in range(STALLS_TO_LEARN):
        limits.note("step", 0.01)
    limits.allow_as_long("step", 61)
    assert 600 == limits.of("step")
    limits.allow_as_long("step", 601)
    assert 600 == limits.of("step")


def test_worker_that_the_others_wait_for(clock: Clock, watched: WorkerHeartbeats) -> None:
    """Beats within a phase are progress, and do not begin it anew; who stands in a step waits for the others."""
    first, second = (Heartbeat(os.dup(watched.fd), rank) for rank in range(2))
    assert ("start", 0, 0.0) == watched.awaited()
    first.phase("step")
    second.phase("evaluate")
    clock.look(watched, LOOK_S)
    for _ in range(4):
        second.beat()
        clock.look(watched, 1.0)
    assert ("evaluate", 0, 4.5) == watched.awaited()

    second.phase("step")
    second.beat(1)
    clock.look(watched, LOOK_S)
    assert ("step", 0, 5.0) == watched.awaited(), "the first worker has stood in its step for longer"
    first.beat(1)
    second.phase("data")
    clock.look(watched, LOOK_S)
    assert ("data", 1, 0.5) == watched.awaited()


@pytest.mark.parametrize("silence_s", [None, 30.0])
def test_a_script_stands_still_by_its_silence_alone(clock: Clock, silence_s: float | None) -> None:
    """Without a limit never; with one after that, since the last line of any worker. Once one beats, as all others."""
    watched = WorkerHeartbeats(CEILING_S, beats_late=True, silence_s=silence_s)
    watched.reset(2)
    try:
        assert not clock.look(watched, 29)
        watched.heard(1, 100)
        assert not clock.look(watched, 29)
        assert clock.look(watched, 2) is (silence_s is not None)
        assert [each.phase for each in watched.progress()] == ["script"] * 2
        memory = mmap.mmap(watched.fd, HEARTBEAT_SLOT * 2)
        for rank in range(2):
            HEARTBEAT.pack_into(memory, HEARTBEAT_SLOT * rank, 1, 1, b"step")
        assert not clock.look(watched, CEILING_S - 1)
        watched.heard(0, 999)
        assert clock.look(watched, 2)
        memory.close()
    finally:
        watched._memory.close()
        os.close(watched.fd)
