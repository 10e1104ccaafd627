"""Requests of all ranks in one exchange: those of one rank suffice, or all ranks have to make them."""

from __future__ import annotations

from itertools import product

import pytest

from elasticflow.runtime.process.votes import Vote


@pytest.mark.parametrize("divisor", ["sum", "mean"])
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_request_that_all_ranks_have_to_make(world: int, divisor: str) -> None:
    """It is granted if and only if none holds back, be it by the sum over the ranks or by their mean."""
    for wants in product((True, False), repeat=world):
        ranks = [Vote() for _ in wants]
        for rank, does_want in zip(ranks, wants, strict=True):
            rank.when("memory", lambda does_want=does_want: 1 if does_want else -world)  # type: ignore[misc]
        sums = [sum(numbers) for numbers in zip(*(rank.requests() for rank in ranks), strict=True)]
        ranks[0].resolve([total / (world if divisor == "mean" else 1) for total in sums])
        assert ranks[0].memory == all(wants)
        assert not ranks[0].snapshot


def test_request_of_one_rank_suffices() -> None:
    """By the mean of two."""
    vote = Vote()
    vote.when("snapshot", lambda: True)
    vote.resolve([number / 2 for number in vote.requests()])
    assert vote.snapshot
    assert not vote.memory
