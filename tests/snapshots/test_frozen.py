"""Frozen tensors: written once, referred to from then on, and never let go while somebody refers to them."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.catalog import Catalog

FROZEN, OWN = 40_000, 1_000
FILE = "frozen-00000-of-00001.safetensors"


def share(client: StagingClient, step: int, *, rank: int = 0, frozen: int = 1, **about: Any) -> str:
    """Stage a share: a tensor that changes at each step, between two frozen ones that say *frozen*."""
    name = Bench.name_of(step, about.pop("generation", 1))
    size = FROZEN + OWN
    buffer = client.buffer(size, timeout_s=100)
    buffer[:] = bytes([frozen + rank]) * (FROZEN // 2) + bytes([step]) * OWN + bytes([frozen]) * (FROZEN // 2)
    half = FROZEN // 2
    entries = [
        TensorEntry(f"first{rank}", "U8", (half,), 0, half, frozen=True),
        TensorEntry(f"own{rank}", "U8", (OWN,), half, OWN),
        TensorEntry(f"second{rank}", "U8", (half,), half + OWN, half, frozen=True),
    ]
    facts = ManifestFacts(trigger="steps", **about)
    record = SnapshotRecord({"position": {"step": step}, "state": {}}, facts)
    client.stage(name=name, step=step, tensors=entries, nbytes=size, record=record if rank == 0 else None)
    return name


def commit(client: StagingClient, step: int, **options: Any) -> list[tuple[str, int]]:
    """Stage a share; return the outcome."""
    share(client, step, **options)
    return Bench.outcomes(client.flush(20))


def content_of(catalog: Catalog, found: Manifest, key: str) -> bytes:
    """A tensor's bytes on the store."""
    place = found.tensors[key]
    data = catalog.storage.read(f"{catalog.folder()}/{found.location(place.file)}")
    return data[place.offset : place.offset + place.nbytes]


def newest(bench: Bench) -> Manifest:
    """The newest snapshot, every byte of it checked."""
    found = bench.catalog.newest()
    assert found is not None
    assert verify.verify(bench.catalog, found) == []
    return found


def test_frozen_tensors_are_written_once(bench: Bench) -> None:
    """All later snapshots refer to the first one's file, never to each other, and hold the others' bytes alone."""
    client = bench.connect(bench.writer(keep_last=2))
    for step in (1, 2, 3, 4):
        assert commit(client, step) == [("snapshot.committed", step)]
    origin = bench.name_of(1)
    assert {m.step for m in bench.catalog.committed()} == {1, 3, 4}  # 2 lends nothing
    for found in bench.catalog.committed()[:2]:
        assert {f"{origin}/{FILE}"} == set(found.borrowed)
        assert {"shard-00000-of-00001.safetensors", "state.json"} == set(found.files)
        assert found.size < FROZEN
        assert verify.verify(bench.catalog, found) == []
        assert bytes([1]) * (FROZEN // 2) == content_of(bench.catalog, found, "second0")
        assert bytes([found.step]) * OWN == content_of(bench.catalog, found, "own0")


def test_changed_bytes_are_written_whole(bench: Bench) -> None:
    """Content decides: a tensor written past the gradient makes its file new, and the old lender may go."""
    client = bench.connect(bench.writer(keep_last=1))
    for step, frozen in ((1, 1), (2, 1), (3, 9)):
        commit(client, step, frozen=frozen)
    found = newest(bench)
    assert (3, {}) == (found.step, found.borrowed)
    assert bytes([9]) * (FROZEN // 2) == content_of(bench.catalog, found, "first0")
    assert [3] == [m.step for m in bench.catalog.committed()]


def test_a_new_writer_refers_to_what_it_finds(bench: Bench) -> None:
    """After a restart the parent's file is found by its bytes alone."""
    commit(bench.connect(bench.writer()), 1)
    bench.catalog.claim_generation({})
    commit(bench.connect(bench.writer(), generation=2), 2, generation=2, parent=bench.name_of(1))
    assert {f"{bench.name_of(1)}/{FILE}"} == set(newest(bench).borrowed)


def test_every_rank_borrows_its_own_file(bench: Bench) -> None:
    """Two nodes: the node of rank 0 commits what both refer to."""
    writers = bench.writer(), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate(writers)]
    for step in (1, 2):
        for rank, client in enumerate(clients):
            share(client, step, rank=rank)
        for client in clients:
            assert bench.outcomes(client.flush(20)) == [("snapshot.committed", step)]
    found = newest(bench)
    files = {f"{bench.name_of(1)}/frozen-0000{rank}-of-00002.safetensors" for rank in range(2)}
    assert files == set(found.borrowed)
    assert bytes([2]) * (FROZEN // 2) == content_of(bench.catalog, found, "first1")


@pytest.mark.parametrize("loss", ["set aside", "file cut", "file gone", "snapshot gone"])
def test_a_lender_that_is_lost_is_not_borrowed_from(bench: Bench, loss: str) -> None:
    """What was written once is written again when its place is not to be relied on."""
    client = bench.connect(bench.writer())
    commit(client, 1)
    catalog, lender = bench.catalog, bench.name_of(1)
    file = catalog.storage.local_path(f"{catalog.folder(lender)}/{FILE}")
    match loss:
        case "set aside":
            catalog.quarantine(lender, "for the test")
        case "file cut":
            file.write_bytes(file.read_bytes()[:-1])
        case "file gone":
            file.unlink()
        case _:
            shutil.rmtree(file.parent)
    assert commit(client, 2) == [("snapshot.committed", 2)]
    found = newest(bench)
    assert {} == found.borrowed
    assert FILE in found.files


def test_lender_lost_before_the_commit_fails_the_snapshot_and_not_the_next(bench: Bench) -> None:
    """A reference that cannot be kept is told as a failure; the snapshot after it holds the bytes itself."""
    head, other = bench.writer(), bench.writer()
    clients = [bench.connect(w, rank, 2, local_world_size=1) for rank, w in enumerate((head, other))]
    for rank, client in enumerate(clients):
        share(client, 1, rank=rank)
    for client in clients:
        client.flush(20)
    share(clients[0], 2, rank=0)  # written at once, committed when the other node's share is in
    place = bench.catalog.storage.local_path(f"{bench.catalog.folder()}/.tmp-{bench.name_of(2)}/state.json")
    while not place.exists():
        time.sleep(0.01)
    bench.catalog.quarantine(bench.name_of(1), "for the test")
    share(clients[1], 2, rank=1)
    for client in clients:
        (report,) = bench.flushed(client, 20)
        assert "snapshot.failed" == report.event
        assert "is no longer there or was set aside" in str(report.reason)
    for rank, client in enumerate(clients):
        share(client, 3, rank=rank)
    for client in clients:
        assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 3)]
    assert {} == newest(bench).borrowed


def test_damage_of_a_borrowed_file_is_damage_of_all_that_borrow_it(bench: Bench) -> None:
    """The snapshot's own files are good, and it cannot be loaded: `verify` names the other snapshot's file."""
    client = bench.connect(bench.writer())
    commit(client, 1)
    commit(client, 2)
    found = newest(bench)
    file = bench.catalog.storage.local_path(f"{bench.catalog.folder(bench.name_of(1))}/{FILE}")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (problem,) = verify.verify(bench.catalog, found)
    assert problem == (
        f"{bench.name_of(1)}/{FILE}: block 0 (from byte 0) is not what was written"
        "; it is borrowed, and no snapshot that borrows it can be loaded"
    )


def test_frozen_files_have_a_sha256_with_any_integrity(bench: Bench) -> None:
    """Frozen files are compared by SHA-256; the others get it when it is asked for."""
    commit(bench.connect(bench.writer()), 1)
    assert {FILE} == {name for name, entry in newest(bench).files.items() if entry.sha256}
    bench.catalog.claim_generation({})
    commit(bench.connect(bench.writer(integrity="sha256"), generation=2), 2, generation=2, frozen=3)
    entries = newest(bench).files.values()
    assert 3 == len(entries)
    assert all(entry.sha256 for entry in entries)


def test_a_store_that_does_not_answer_lends_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether something can be borrowed is never a reason to fail."""
    commit(bench.connect(bench.writer()), 1)
    catalog, entry = bench.catalog, newest(bench).files[FILE]
    assert entry.sha256 is not None
    assert (f"{bench.name_of(1)}/{FILE}", entry) == ShardWriter(WriterStart("", "r"), catalog).reusable(
        entry.sha256
    )

    def refuse(*_: object) -> bool:
        raise OSError("no answer")

    monkeypatch.setattr(catalog.storage, "exists", refuse)
    assert ShardWriter(WriterStart("", "r"), catalog).reusable(entry.sha256) is None
