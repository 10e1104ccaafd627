"""Which generation may commit: restarts on one node, several nodes at one URI, launches that should be dead."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from elasticflow.snapshots.client.messages import GiveUp
from elasticflow.snapshots.read import verify

if TYPE_CHECKING:
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.client.writer_process import WriterProcess
    from tests.snapshots.conftest import Bench


def test_whole_snapshot_of_a_dead_generation_is_kept(bench: Bench) -> None:
    """Workers die right after staging: their successors are answered after the commit and restore from it."""
    writer = bench.writer(limits={"fence_grace_s": 20.0})
    bench.catalog.claim_generation({})
    client = bench.connect(writer)
    assert bench.catalog.claim_generation({}) == 2  # the launcher is quick: it is fenced before it is written
    bench.share(client, 7)
    client.close()
    bench.connect(writer, generation=2)
    newest = bench.catalog.newest()
    assert newest is not None
    assert (newest.step, newest.generation) == (7, 1)


def test_a_launch_that_ends_does_not_wait_for_workers_that_never_came(bench: Bench) -> None:
    """Its next generation failed before a worker greeted: nobody can say whose it was, and nobody will."""
    writer = bench.writer(limits={"fence_grace_s": 600.0})
    bench.catalog.claim_generation({})
    client = bench.connect(writer)
    bench.catalog.claim_generation({})
    bench.share(client, 2)
    client.close()
    writer.finish(patience_s=60)
    assert writer.exit_code() == 0
    assert [("snapshot.failed", 2)] == bench.outcomes(writer.reports())
    assert bench.catalog.committed() == []


def test_incomplete_snapshot_of_a_dead_generation_is_given_up(bench: Bench) -> None:
    """One rank staged, the other died before: the next generation finds neither snapshot nor leftovers."""
    writer = bench.writer()
    first = bench.connect(writer, 0, 2)
    bench.share(first, 3)
    first.close()
    successor = bench.connect(writer, 0, 1, generation=2)
    assert bench.catalog.committed() == []
    (report,) = [r for r in _reports(writer, 1) if r["event"] == "snapshot.failed"]
    assert report["name"] == bench.name_of(3)
    assert report["reason"] == "the generation ended before all shares were staged"
    bench.share(successor, 3, generation=2)
    assert bench.outcomes(successor.flush(20)) == [("snapshot.committed", 3)]
    assert bench.catalog.storage.list("snapshots") == [bench.name_of(3, 2)]


def test_another_launch_fences_this_one(bench: Bench) -> None:
    """A generation claimed elsewhere keeps a writer that knows nothing of it from committing."""
    writer = bench.writer()
    bench.catalog.claim_generation({})
    client = bench.connect(writer)
    bench.share(client, 1)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 1)]
    bench.catalog.claim_generation({})
    bench.share(client, 2)
    (report,) = bench.flushed(client, 20)
    assert (report.event, report.reason) == ("snapshot.failed", "fenced")
    assert [s.step for s in bench.catalog.committed()] == [1]
    assert bench.catalog.storage.list("snapshots") == [bench.name_of(1)]


def test_all_that_a_fenced_writer_has_staged_is_cleared_away_at_once(bench: Bench) -> None:
    """It is told of one snapshot and ended, before it comes to the next one, which is written already."""
    writer = bench.writer(limits={"fence_grace_s": 1.0})
    bench.catalog.claim_generation({})
    client = bench.connect(writer)
    bench.catalog.claim_generation({})
    for step in (2, 3):
        bench.share(client, step)
    (report,) = _reports(writer, 1)
    writer.process.kill()
    assert ("fenced", bench.name_of(2)) == (report["reason"], report["name"])
    assert [] == bench.catalog.storage.list("snapshots")


def test_zombie_of_an_older_generation_cannot_commit(bench: Bench) -> None:
    """A worker that outlived its generation stages after its successors were answered: fenced, without delay."""
    writer = bench.writer(limits={"fence_grace_s": 30.0})
    bench.catalog.claim_generation({})
    zombie = bench.connect(writer)
    bench.catalog.claim_generation({})
    bench.connect(writer, generation=2)
    began = time.monotonic()
    bench.share(zombie, 9)
    (report,) = bench.flushed(zombie, 20)
    assert (report.event, report.reason) == ("snapshot.failed", "fenced")
    assert time.monotonic() - began < 10
    assert bench.catalog.committed() == []


def test_successor_that_is_fenced_itself_saves_nothing(bench: Bench) -> None:
    """Both generations of this node are fenced by a third elsewhere: nothing is committed."""
    writer = bench.writer(limits={"fence_grace_s": 5.0, "settle_s": 10.0})
    bench.catalog.claim_generation({})
    client = bench.connect(writer)
    for _ in range(2):
        bench.catalog.claim_generation({})
    bench.share(client, 2)
    client.close()
    bench.connect(writer, generation=2)
    assert bench.catalog.committed() == []


def test_two_nodes_make_one_snapshot(bench: Bench) -> None:
    """Two writers at one URI: the node of rank 0 commits, every rank hears of it, one parent reports it."""
    head, other = bench.writer(), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate((head, other))]
    for step in (1, 2):
        for rank, client in enumerate(clients):
            bench.share(client, step, rank=rank)
    for client in clients:
        assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 1), ("snapshot.committed", 2)]
    catalog = bench.catalog
    for found in catalog.committed():
        assert set(found.tensors) == {"a0", "b0", "a1", "b1"}
        assert verify.verify(catalog, found) == []
        assert set(catalog.storage.list(f"snapshots/{found.name}")) == {*found.files, "MANIFEST.json"}
    assert bench.outcomes(_reports(head, 2)) == [("snapshot.committed", 1), ("snapshot.committed", 2)]
    assert other.reports() == []


def test_failure_on_one_node_fails_the_snapshot_on_all(bench: Bench) -> None:
    """Rank 1's node cannot write: every rank learns why, nothing is committed."""
    other, clients = two_nodes(bench, 300_000)
    with bench.small_files(other, 100_000):
        for rank, client in enumerate(clients):
            bench.share(client, 1, rank=rank, size=300_000)
        reasons = [bench.flushed(client, 20)[0].reason for client in clients]
    assert reasons == ["rank 1: OSError: [Errno 27] File too large", "OSError: [Errno 27] File too large"]
    assert bench.catalog.committed() == []


def two_nodes(bench: Bench, size: int, **head_limits: float) -> tuple[WriterProcess, list[StagingClient]]:
    """Return rank 1's writer, and the clients of two ranks on nodes of their own, each with room for shards of *size* bytes."""
    writers = bench.writer(limits=head_limits), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate(writers)]
    for client in clients:
        client.buffer(size)
    return writers[1], clients


def test_failure_that_could_not_be_announced_is_announced_later(bench: Bench) -> None:
    """Rank 1's node cannot write at all for a while: the node that commits does not wait for its limit."""
    other, clients = two_nodes(bench, 1000, shares_s=10.0)
    with bench.small_files(other, 0):
        for rank, client in enumerate(clients):
            bench.share(client, 1, rank=rank)
        assert bench.outcomes(clients[1].flush(20)) == [("snapshot.failed", 1)]
    (report,) = bench.flushed(clients[0], 20)
    assert report.reason == "rank 1: OSError: [Errno 27] File too large"


def test_shards_that_a_worker_says_do_not_come_are_not_waited_for(bench: Bench) -> None:
    """Rank 1's node cannot write at all: training would wait for ten minutes for each snapshot, once eight are open."""
    other, clients = two_nodes(bench, 1000)
    with bench.small_files(other, 0):
        for rank, client in enumerate(clients):
            bench.share(client, 1, rank=rank)
        (failed,) = bench.flushed(clients[1], 20)
        clients[0].send(GiveUp("another", "no snapshot of this name is open"))
        clients[0].send(GiveUp(failed.name, "File too large"))
        (report,) = bench.flushed(clients[0], 20)
    assert ("snapshot.failed", "File too large") == (report.event, report.reason)


def test_failure_on_the_node_of_rank_0_is_heard_elsewhere(bench: Bench) -> None:
    """The node that commits cannot write: the other node does not wait for ever, and takes its share back."""
    head, other = bench.writer(), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate((head, other))]
    clients[0].buffer(300_000)
    with bench.small_files(head, 100_000):
        for rank, client in enumerate(clients):
            bench.share(client, 1, rank=rank, size=300_000)
        reasons = [bench.flushed(client, 20)[0].reason for client in clients]
    assert reasons == [
        "OSError: [Errno 27] File too large",
        "the node of rank 0: OSError: [Errno 27] File too large",
    ]
    (left,) = bench.catalog.storage.list(bench.catalog.folder())
    assert ["shard-00000.json"] == bench.catalog.storage.list(f"{bench.catalog.folder()}/{left}")


def test_lost_node_fails_the_snapshot_after_the_limit(bench: Bench) -> None:
    """The other node's writer was killed before it wrote: the snapshot fails, the writer lives on."""
    head, other = bench.writer(limits={"shares_s": 0.5}), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate((head, other))]
    other.process.kill()
    other.process.wait()
    bench.share(clients[0], 1)
    (report,) = bench.flushed(clients[0], 20)
    assert report.reason == "the shares of ranks [1] did not come within 0.5 s"
    alone = bench.connect(head, 0, 1, generation=2)
    bench.share(alone, 1, generation=2)
    assert bench.outcomes(alone.flush(20)) == [("snapshot.committed", 1)]


def test_new_generation_ends_the_wait_for_a_lost_node(bench: Bench) -> None:
    """A resize after a lost node is not held up by the share that will never come."""
    head, other = bench.writer(), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate((head, other))]
    other.close()
    bench.share(clients[0], 1)
    time.sleep(0.2)
    began = time.monotonic()
    bench.connect(head, 0, 1, generation=2)
    assert time.monotonic() - began < 3
    assert _reports(head, 1)[0]["reason"] == "the generation ended before all shares were staged"


def test_claims_from_many_threads_are_distinct(bench: Bench) -> None:
    """Ten launches at once get ten numbers without gaps."""
    numbers: list[int] = []
    start = threading.Barrier(10)

    def claim() -> None:
        catalog = bench.catalog
        start.wait()
        numbers.append(catalog.claim_generation({"host": "here"}))

    threads = [threading.Thread(target=claim) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 11))
    assert bench.catalog.newest_generation() == 10
    assert bench.catalog.is_fenced(9)
    assert not bench.catalog.is_fenced(10)


def _reports(writer: object, number: int) -> list[dict[str, object]]:
    """Wait for that many reports of the writer's parent."""
    found: list[dict[str, object]] = []
    deadline = time.monotonic() + 60
    while len(found) < number and time.monotonic() < deadline:
        found += writer.reports()  # type: ignore[attr-defined]
        time.sleep(0.01)
    return found
