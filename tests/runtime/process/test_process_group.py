"""Ranks that find one another in a store which groups before them have used."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from elasticflow.runtime.process import process_group
from elasticflow.runtime.process.torch_private import HashStore


def _group(store: HashStore, world_size: int) -> list[str]:
    """Return what each rank of a new group reads, once rank 0 has written its own word."""

    def rank(number: int) -> str:
        part = process_group.own_part(store, number, world_size)
        if number == 0:
            part.set("generation", f"{id(part)}")
        return str(part.get("generation").decode())

    with ThreadPoolExecutor(world_size) as ranks:
        return list(ranks.map(rank, range(world_size)))


def test_a_group_does_not_read_what_the_group_before_it_wrote() -> None:
    """The store of torchrun outlives its restarts; a rank that was killed while it came has left its question there, too."""
    store = HashStore()
    first = _group(store, 3)
    store.set("came//2", "of a rank that was killed before it was answered")
    second = _group(store, 3)

    assert len({*first}) == len({*second}) == 1
    assert first[0] != second[0]


def test_a_rank_of_a_killed_torchrun_is_not_taken_for_the_new_one_s() -> None:
    """It imported while its torchrun was killed, and finds the store of the next one at the same port; ranks of other nodes are taken."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))  # a guard alone
    with ThreadPoolExecutor(4) as ranks:
        orphan = ranks.submit(process_group.own_part, store, 1, 3, "killed")
        while not orphan.done() and not store.num_keys():
            time.sleep(0.001)
        group = [
            ranks.submit(process_group.own_part, store, rank, 3, start, 2)
            for rank, start in enumerate(("new", "new", ""))
        ]
        parts = [rank.result() for rank in group]
        parts[0].set("generation", "7")
        assert [b"7", b"7"] == [part.get("generation") for part in parts[1:]]
        assert not orphan.done()
        process_group.own_part(store, 0, 2, "killed", 2)  # which ends its wait


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 does not wait for ever."""
    monkeypatch.setattr(process_group, "_STORE_TIMEOUT", timedelta(seconds=0))
    with pytest.raises(TimeoutError, match=r"ranks \[1\] did not come"):
        process_group.own_part(HashStore(), 0, 2)
