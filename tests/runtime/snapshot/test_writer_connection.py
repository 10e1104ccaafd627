"""What ranks tell one another and their writers about snapshots that have failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elasticflow import events
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.snapshot.writer_connection import WriterReports
from elasticflow.snapshots.client.messages import GiveUp, SnapshotReport


def test_writer_that_commits_hears_which_snapshots_failed_on_other_nodes() -> None:
    """Rank 0 waits until one of its snapshots has an outcome; the store of the snapshots cannot tell what became of the others' shards."""
    store, sent = HashStore(), list[GiveUp]()

    def reports_of(rank: int, local_rank: int) -> WriterReports:
        identity = SimpleNamespace(started_by="launcher")
        heartbeat = SimpleNamespace(beat=lambda: None)
        me: Any = SimpleNamespace(
            rank=rank, local_rank=local_rank, store=store, identity=identity, heartbeat=heartbeat
        )
        client: Any = SimpleNamespace(fileno=lambda: 0, open_names={"a", "b", "c"}, send=sent.append)
        return WriterReports(me, client, SimpleNamespace())  # type: ignore[arg-type]

    head, *others = (reports_of(*ranks) for ranks in ((0, 0), (1, 1), (2, 0)))
    for name, each in zip("ab", others, strict=True):
        each.log([SnapshotReport(events.SNAPSHOT_FAILED, name, 1, 1, reason="read-only")])
        each.wait()
    assert [] == sent
    head.wait()
    assert [GiveUp("b", "read-only")] == sent
