"""Hangs found by heartbeats, and no false alarm."""

from __future__ import annotations

import mmap
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from elasticflow.environment import HEARTBEAT, HEARTBEAT_SLOT, HELD
from elasticflow.launcher import heartbeats as heartbeats_module
from elasticflow.launcher.heartbeats import MOST_WORKERS, Heartbeats
from elasticflow.runtime.progress import Heartbeat

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 10.0


class Clock:
    """A clock the test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """Return the time that was set."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock that the agent's side looks at."""
    made = Clock()
    monkeypatch.setattr(heartbeats_module, "time", SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.fixture
def watched(clock: Clock) -> Iterator[Heartbeats]:
    """Yield the agent's side for two workers."""
    made = Heartbeats(TIMEOUT_S)
    made.reset(2)
    yield made
    made._memory.close()
    os.close(made.fd)


def test_slot_holds_a_heartbeat() -> None:
    """No rank writes into its neighbour's slot."""
    assert HEARTBEAT.size + HELD.size <= HEARTBEAT_SLOT


def test_newest_step_that_all_hold(watched: Heartbeats) -> None:
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


def test_rank_that_stands_still_is_found(watched: Heartbeats, clock: Clock) -> None:
    """Rank 1 stops in its evaluation while rank 0 goes on: it is named, with its phase and step."""
    ranks = [Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)]
    ranks[1].beat(7)
    ranks[1].phase("evaluating")
    assert watched.hung() is None
    for step in range(8, 18):
        clock.now += 1.0
        ranks[0].beat(step)
        assert watched.hung() is None
    clock.now += 1.0
    ranks[0].beat(18)

    assert {"local_rank": 1, "step": 7, "phase": "evaluating", "seconds": 11.0} == watched.hung()


def test_ranks_that_move_are_never_taken_for_hung(watched: Heartbeats, clock: Clock) -> None:
    """Slow but moving: a beat just inside the limit, again and again, looked at as rarely or as often as it comes."""
    ranks = [Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)]
    for step in range(50):
        for rank in ranks:
            rank.beat(step)
        assert watched.hung() is None
        clock.now += TIMEOUT_S - 0.1
        assert watched.hung() is None


def test_beats_between_two_looks_count_though_the_looks_are_late(watched: Heartbeats, clock: Clock) -> None:
    """The agent itself was held up for minutes: workers that went on meanwhile are not killed."""
    rank0, rank1 = Heartbeat(watched.fd, 0), Heartbeat(watched.fd, 1)
    clock.now += 600
    rank0.beat(1)
    rank1.beat(1)

    assert watched.hung() is None


def test_worker_that_never_moves_hangs_in_its_start(watched: Heartbeats, clock: Clock) -> None:
    """No beat at all since the fork is a hang too, and the longest standstill is named."""
    clock.now += 5
    Heartbeat(watched.fd, 0).beat(1)
    assert watched.hung() is None
    clock.now += TIMEOUT_S - 2
    hang = watched.hung()

    assert hang is not None
    assert (1, "start") == (hang["local_rank"], hang["phase"])


def test_next_generation_starts_anew(watched: Heartbeats, clock: Clock) -> None:
    """The standstill of a generation that is gone is not counted against the next."""
    Heartbeat(watched.fd, 1).beat(5)
    clock.now += TIMEOUT_S + 1
    assert watched.hung() is not None
    watched.reset(1)

    assert watched.hung() is None
    clock.now += TIMEOUT_S - 1
    assert watched.hung() is None


def test_memory_holds_the_most_workers_a_node_may_have(watched: Heartbeats) -> None:
    """The last slot is inside, and reaches a forked process by its descriptor."""
    assert os.get_inheritable(watched.fd)
    with mmap.mmap(watched.fd, 0) as memory:
        assert MOST_WORKERS * HEARTBEAT_SLOT == len(memory)
    Heartbeat(watched.fd, MOST_WORKERS - 1).beat(1)
