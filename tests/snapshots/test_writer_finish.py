"""A writer whose launch is over ends what it was handed, and only that."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.snapshots.conftest import Bench


def test_finish_commits_what_dead_workers_staged(bench: Bench) -> None:
    """Workers stage and are gone: the writer commits before it leaves, and what it says is still heard."""
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for step in (1, 2):
        for rank, client in enumerate(clients):
            bench.share(client, step, rank=rank, size=4_000_000)
    for client in clients:
        client.close()
    writer.finish(20)
    assert writer.process.poll() == 0
    assert bench.outcomes(writer.reports()) == [("snapshot.committed", 1), ("snapshot.committed", 2)]
    assert [found.step for found in bench.catalog.committed()] == [2, 1]


def test_finish_gives_up_what_can_never_be_whole(bench: Bench) -> None:
    """One of two shares was staged: there is no snapshot, and the writer leaves at once."""
    writer = bench.writer()
    first, second = (bench.connect(writer, rank, 2) for rank in range(2))
    bench.share(first, 1)
    began = time.monotonic()
    writer.finish(20)
    assert time.monotonic() - began < 5
    second.close()
    (report,) = writer.reports()
    assert report["event"] == "snapshot.failed"
    assert report["reason"] == "the generation ended before all shares were staged"
    assert bench.catalog.committed() == []


def test_a_shard_that_its_rank_refuses_fails_the_snapshot(bench: Bench) -> None:
    """One of two ranks says that its buffer does not hold its shard: all are told why, and its buffer is free again."""
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for step in range(1, 5):
        bench.share(clients[0], step)
        bench.share(clients[1], step, rank=1, refusal="model/w was written" if step == 2 else None)
    expected = [(1, None), (2, "model/w was written"), (3, None), (4, None)]
    for client in clients:
        assert [(report.step, report.reason) for report in bench.flushed(client, 100)] == expected
    assert [found.step for found in bench.catalog.committed()] == [4, 3, 1]
    writer.finish(20)


def test_finish_of_an_idle_writer_returns_at_once(bench: Bench) -> None:
    """Nothing was handed over: the writer leaves within a moment; a dead one is no reason to wait either."""
    writer = bench.writer()
    bench.connect(writer)
    began = time.monotonic()
    writer.finish(20)
    writer.finish(20)
    assert time.monotonic() - began < 2
    assert writer.process.poll() == 0
    assert writer.reports() == []


def test_finish_is_cut_short_by_its_patience(bench: Bench) -> None:
    """A writer that cannot finish in time is closed, and nothing half written is a snapshot."""
    writer = bench.writer(limits={"shares_s": 60.0})
    client = bench.connect(writer, 0, 2, local_world_size=1)  # the other node's share never comes
    bench.share(client, 1)
    began = time.monotonic()
    writer.finish(0.5)
    assert 0.4 < time.monotonic() - began < 3
    assert writer.process.poll() is None
    writer.close()
    assert bench.catalog.committed() == []
