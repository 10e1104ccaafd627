"""Which files a rank's shard becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from elasticflow.snapshots.client.writer_process import WriterStart
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard, TensorEntry
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer.pending import PendingSnapshot
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path

NAME = "000000000010-0001-0123abcd"


@pytest.mark.parametrize(
    ("rank", "world_size", "tensors", "expected"),
    [
        (1, 2, 1, ["shard-00001-of-00002.safetensors"]),
        (1, 2, 0, ["shard-00001-of-00002.safetensors"]),
        (7, 1024, 1, ["shard-00007-of-01024.safetensors"]),
        (7, 1024, 0, []),
        (0, 1024, 0, ["state.json"]),
    ],
)
def test_rank_of_many_that_stores_nothing_writes_no_file(
    tmp_path: Path, rank: int, world_size: int, tensors: int, expected: list[str]
) -> None:
    """Every node would have to read it; of few each has one."""
    writer = ShardWriter(WriterStart(str(tmp_path), "run"), Catalog(Storage(str(tmp_path))))
    record = SnapshotRecord({}, ManifestFacts(trigger="steps")) if rank == 0 else None
    entries = [TensorEntry("layer", "U8", (8,), 0, 8)] * tensors
    pending = PendingSnapshot(NAME, 10, 1, world_size, 1)
    files = writer.write(pending, rank, StagedShard(entries, 8 * tensors, record), memoryview(bytes(8)))

    assert expected == [file.name for file in files]
    there = tmp_path / "snapshots" / f".tmp-{NAME}"
    assert expected == (sorted(path.name for path in there.iterdir()) if there.exists() else [])
