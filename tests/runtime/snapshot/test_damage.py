"""Every file of a real snapshot harmed in turn: it is never loaded, nothing crashes, the older one is restored."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.runtime.snapshot import restore
from elasticflow.snapshots.client.loading import NodeLoader
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.client.writer_process import WriterProcess, WriterStart, start_writer
from elasticflow.snapshots.format.manifest import BLOCK, ManifestFacts
from elasticflow.snapshots.format.pieces import Piece
from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.command_line import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

FROZEN = 4096
ROWS = [2 * BLOCK + FROZEN, FROZEN]  # of one tensor, which the ranks share: three blocks, and one
SIZES = [rows + FROZEN for rows in ROWS]
SHARDS = [f"shard-0000{rank}-of-00002.safetensors" for rank in range(2)]
FILES = [*SHARDS, *(name.replace("shard", "frozen") for name in SHARDS), "state.json", "MANIFEST.json"]


def at(place: float) -> Callable[[bytes], bytes]:
    """Flip a bit at that part of the file."""

    def flip(data: bytes) -> bytes:
        number = min(int(len(data) * place), len(data) - 1)
        return data[:number] + bytes([data[number] ^ 4]) + data[number + 1 :]

    return flip


HARMS: dict[str, Callable[[bytes], bytes] | None] = {
    "first byte flipped": at(0),
    "byte in the middle flipped": at(0.5),
    "last byte flipped": at(1),
    "cut by one": lambda data: data.removesuffix(b"\n")[:-1],
    "cut to half": lambda data: data[: len(data) // 2],
    "emptied": lambda _: b"",
    "one byte longer": lambda data: data + b".",
    "a block longer": lambda data: data + bytes(BLOCK),
    "removed": None,
}


def connect(writer: WriterProcess, rank: int, generation: int) -> StagingClient:
    """Connect a rank of two."""
    return StagingClient.connect(
        writer.address, rank=rank, world_size=2, local_world_size=2, generation=generation
    )


def stage(client: StagingClient, rank: int, step: int) -> None:
    """Stage rows of a tensor, and a frozen one; step and rank are its bytes."""
    size = SIZES[rank]
    piece = Piece.of_rows("own", (sum(ROWS),), sum(ROWS[:rank]))
    client.buffer(size, 20)[:] = bytes([16 * step + rank]) * size
    tensors = [
        TensorEntry(piece.key, "U8", (ROWS[rank],), 0, ROWS[rank], piece=piece),
        TensorEntry(f"frozen{rank}", "U8", (FROZEN,), size - FROZEN, FROZEN, frozen=True),
    ]
    state, facts = {"position": {"step": step}, "state": {}}, ManifestFacts(trigger="steps")
    record = SnapshotRecord(state, facts) if rank == 0 else None
    name = f"{step:012d}-0001-{step:08x}"
    client.stage(name=name, step=step, tensors=tensors, nbytes=size, record=record)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with snapshots of two steps, by two ranks that share a tensor."""
    folder = tmp_path_factory.mktemp("damage") / "run"
    with forks():
        writer = start_writer(WriterStart(str(folder), "r"))
    clients = [connect(writer, rank, 1) for rank in range(2)]
    for step in (1, 2):
        for rank, client in enumerate(clients):
            stage(client, rank, step)
    for client in clients:
        client.flush(20)
        client.close()
    writer.close()
    return folder


@pytest.fixture
def here(run: Path, tmp_path: Path) -> Iterator[tuple[Catalog, NodeLoader]]:
    """A copy of the run to harm, and a loader of its node's writer."""
    folder = shutil.copytree(run, tmp_path / "run")
    with forks():
        writer = start_writer(WriterStart(str(folder), "r"))
    client = connect(writer, 0, 2)
    yield Catalog(Storage(str(folder))), NodeLoader(client, lambda: None)
    client.close()
    writer.close()


@pytest.mark.parametrize("file", FILES)
def test_harmed_file(real_processes: None, me: Any, here: tuple[Catalog, NodeLoader], file: str) -> None:
    """Whatever is done to a file, the reason names it, and the older snapshot is what all resume from."""
    catalog, loads = here
    newest, older = (manifest.name for manifest in catalog.committed())
    path = catalog.storage.local_path(f"{catalog.folder(newest)}/{file}")
    good = path.read_bytes()
    for harm, change in HARMS.items():
        path.unlink() if change is None else path.write_bytes(change(good))
        me.events.clear()
        found = restore.newest_good(me, catalog, loads)
        assert found is not None, harm
        assert older == found.manifest.name, harm
        assert {"position": {"step": 1}, "state": {}} == found.state
        own = torch.cat([torch.full((rows,), 16 + rank, dtype=torch.uint8) for rank, rows in enumerate(ROWS)])
        assert torch.equal(own, found.tensors["own"])
        for rank in range(2):
            frozen = found.tensors[f"frozen{rank}"]
            assert torch.equal(torch.full_like(frozen, 16 + rank), frozen)
        loads.release()
        if change is None and file == "MANIFEST.json":  # without one there is no snapshot
            assert [] == me.events
        else:
            assert [("snapshot.rejected", newest)] == [(e["event"], e["name"]) for e in me.events], harm
            assert me.events[0]["reason"].startswith(file), harm
            assert {newest: me.events[0]["reason"]} == catalog.quarantined()
            catalog.storage.remove(f"{catalog.prefix}verdicts/{newest}.json")
        path.write_bytes(good)
    found = restore.newest_good(me, catalog, loads)
    assert found is not None
    assert newest == found.manifest.name
