"""How many questions a commit asks of the store, whatever the number of ranks: counted, on a folder that says it is elsewhere."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.snapshots.format.manifest import FileEntry
from elasticflow.snapshots.format.shard_file import WrittenFile
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.store.publish import CommitRefusedError, Publisher
from elasticflow.storage.storage import Storage, several_at_a_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NAME = "000000000010-0001-0123abcd"
RANKS = 300


class Counted(Storage):
    """Counts what is asked of it."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.asked: list[str] = []

    def _do(self, what: str, path: str, action: Callable[[Any], Any], patience: Any = None) -> Any:
        self.asked.append(what)
        return super()._do(what, path, action, patience)


@pytest.fixture(name="storage")
def _storage(tmp_path: Path) -> Counted:
    return Counted(str(tmp_path))


def announce(publisher: Publisher, rank: int) -> None:
    """Announce a shard as *rank* does."""
    file = WrittenFile(f"shard-{rank}", FileEntry(8, (0,)), {})
    publisher.announce(NAME, rank, {"files": [file]})


def test_shards_that_are_awaited_cost_one_question_each(
    storage: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are not there yet cost nothing, however often is looked: a look is one listing."""
    publisher = Publisher(Catalog(storage))
    left = list(range(1, RANKS))

    def sleep(seconds: float) -> None:
        for _ in range(30):
            announce(publisher, left.pop()) if left else None

    monkeypatch.setattr(time, "sleep", sleep)
    looks = -(-(RANKS - 1) // 30) + 1
    files = publisher.await_shards(NAME, range(1, RANKS), 600.0, lambda: True)

    assert {f"shard-{rank}" for rank in range(1, RANKS)} == {file.name for file in files}
    assert looks == storage.asked.count("list")
    assert RANKS - 1 == storage.asked.count("read")


def test_shard_that_failed_elsewhere_ends_the_wait(storage: Counted) -> None:
    """With its rank and its reason."""
    publisher = Publisher(Catalog(storage))
    announce(publisher, 1)
    publisher.announce(NAME, 2, {"failed": "no space"})
    with pytest.raises(CommitRefusedError, match="rank 2: no space"):
        publisher.await_shards(NAME, [1, 2, 3], 600.0, lambda: True)


@pytest.mark.parametrize("nodes", [1, 64, 1024, 8192])
def test_nodes_that_wait_for_a_commit_ask_together_no_more_often(
    storage: Counted, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    """Each looks less often where they are many."""
    now, pauses = 0.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    publisher = Publisher(Catalog(storage))
    announce(publisher, 5)
    with pytest.raises(CommitRefusedError, match="did not commit within"):
        publisher.await_commit(NAME, 5, 600.0, lambda: True, nodes)

    assert max(1.0, nodes / 256) == max(pauses)
    assert nodes / max(pauses) <= 256
    assert 0.02 == pauses[0]


def test_several_are_asked_at_a_time_and_answered_in_order() -> None:
    """As many as there are threads, which wait for one another here; what one raises is raised."""
    together = threading.Barrier(16)

    def act(number: int) -> int:
        together.wait(60)
        if number == 40:
            raise FileNotFoundError(number)
        return 2 * number

    assert [2 * number for number in range(32)] == several_at_a_time(act, range(32))
    with pytest.raises(FileNotFoundError):
        several_at_a_time(act, range(32, 48))
