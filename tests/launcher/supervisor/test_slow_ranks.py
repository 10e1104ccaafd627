"""Ranks that are slow for a while are named once; noise is not."""

from __future__ import annotations

import random
from statistics import median

import pytest

from elasticflow.launcher.supervisor.slow_ranks import FACTOR, WINDOWS, SlowRank, SlowRanks
from elasticflow.protocol.messages import NodeFigures, RankFigures


def figures(
    window: int, own: dict[int, float], step_s: float = 0.2, generation: int = 1
) -> list[NodeFigures]:
    """Return what the nodes report, each with one worker."""
    return [
        NodeFigures(generation, f"n{rank}", (RankFigures(rank, window, own_s, step_s, f"cuda:{rank}"),))
        for rank, own_s in own.items()
    ]


def named(judge: SlowRanks, reports: list[NodeFigures]) -> list[SlowRank]:
    """Return the ranks that are named."""
    return [slow for report in reports for slow in judge.hear(report)]


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_slow_rank_is_named_once(ranks: int) -> None:
    """With its node, its device and the factor, after some windows; nobody else is."""
    judge = SlowRanks()
    found = []
    for window in range(1, 20):
        own = dict.fromkeys(range(ranks), 0.05) | {1: 0.12}
        new = named(judge, figures(window, own))
        assert not new or window == WINDOWS
        found += new
    assert found == [SlowRank(1, "n1", "cuda:1", 2.4, 0.12, 0.05, 0.2)]


def test_rank_that_is_slow_now_and_then_is_not_named() -> None:
    """One window as the others' begins the count anew."""
    judge = SlowRanks()
    for window in range(1, 60):
        own = {0: 0.05, 1: 0.05 if window % WINDOWS == 0 else 0.5}
        assert named(judge, figures(window, own, step_s=0.6)) == []


def test_noise_names_nobody() -> None:
    """Windows whose medians vary by as much as the factor, on any rank."""
    draw = random.Random(1)
    for ranks in (2, 4):
        judge = SlowRanks()
        for window in range(1, 2000):
            own = {rank: 0.05 * draw.uniform(1, FACTOR) for rank in range(ranks)}
            assert named(judge, figures(window, own)) == []


def test_difference_that_costs_nothing_is_not_named() -> None:
    """Rank 0 writes the log: some microseconds more in steps of 20 ms."""
    judge = SlowRanks()
    for window in range(1, 20):
        assert named(judge, figures(window, {0: 0.0004, 1: 0.0001}, step_s=0.02)) == []


def test_next_generation_begins_anew() -> None:
    """Its ranks are other workers, and late reports of the one before count no more."""
    judge = SlowRanks()
    slow = {0: 0.05, 1: 0.5}
    for window in range(1, WINDOWS):
        assert named(judge, figures(window, slow)) == []
    assert named(judge, figures(1, slow, generation=2)) == []
    assert named(judge, figures(WINDOWS, slow)) == []
    for window in range(2, WINDOWS):
        assert named(judge, figures(window, slow, generation=2)) == []
    assert [slow.rank for slow in named(judge, figures(WINDOWS, slow, generation=2))] == [1]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 9])
def test_rank_is_compared_with_the_median_of_the_others(ranks: int) -> None:
    """Whatever its place among them, and if some are equal."""
    draw = random.Random(ranks)
    for _ in range(50):
        own = {rank: round(draw.uniform(0.01, 0.05), 2) for rank in range(ranks)}
        slow = draw.randrange(ranks)
        own[slow] = 0.2
        judge = SlowRanks()
        found = [each for window in range(1, WINDOWS + 2) for each in named(judge, figures(window, own))]
        others = median(time for rank, time in own.items() if rank != slow)
        assert others == pytest.approx(next(each.others_s for each in found if each.rank == slow))


def test_single_rank_is_never_slow() -> None:
    """There is nothing to compare it with."""
    judge = SlowRanks()
    for window in range(1, 20):
        assert named(judge, figures(window, {0: 0.5})) == []
