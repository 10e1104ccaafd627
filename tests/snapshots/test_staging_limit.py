"""How much memory staging takes: two buffers for each rank, one where memory is short, an error where there is none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import StagingLimitError

if TYPE_CHECKING:
    from elasticflow.snapshots.client.writer_process import WriterProcess
    from tests.snapshots.conftest import Bench

SIZE = 8_000_000
SLACK = 2 << 20
"""A buffer is a whole number of pages that may be large ones: 8 MiB for this size."""


@pytest.mark.parametrize(("limit", "times"), [(None, 2), (4 * SIZE, 2), (3 * SIZE, 1)])
def test_memory_above_the_state_is_bounded(bench: Bench, limit: int | None, times: int) -> None:
    """Two workers stage six snapshots: twice the state is taken with two buffers each, once with one, no more."""
    writer = bench.writer(staging_limit=None if limit is None else limit + SLACK)
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for step in range(1, 7):
        for rank, client in enumerate(clients):
            bench.share(client, step, rank=rank, size=SIZE)
    for client in clients:
        assert bench.outcomes(client.flush(60))[-1] == ("snapshot.committed", 6)
        assert (client.single is not None) == (times == 1)
    state = 2 * SIZE
    assert times * state <= staging_bytes(writer) <= (times + 0.1) * state


def test_limit_that_is_too_small_is_told(bench: Bench) -> None:
    """Not even one buffer for each worker fits: an error with figures and a remedy, and the writer lives on."""
    writer = bench.writer(staging_limit=SIZE)
    client = bench.connect(writer, 0, 2)
    with pytest.raises(StagingLimitError) as caught:
        client.buffer(SIZE, timeout_s=100)
    assert caught.value.message == (
        "snapshots.staging_limit is too small: 16777216 bytes are needed to stage this node's part of a snapshot "
        "once, 8000000 are allowed"
    )
    assert caught.value.remedy == (
        "raise snapshots.staging_limit, or train on more nodes: each stages a smaller part"
    )
    assert writer.process.poll() is None


def test_one_buffer_waits_for_the_store(bench: Bench) -> None:
    """With one buffer staging waits for the snapshot before: all are written, in order, none overwritten."""
    writer = bench.writer(keep_last=100, staging_limit=SIZE + (4 << 20))
    client = bench.connect(writer)
    for step in range(1, 7):
        bench.share(client, step, size=SIZE)
    assert bench.outcomes(client.flush(60)) == [("snapshot.committed", step) for step in range(1, 7)]
    assert client.single == f"the limit of {SIZE + (4 << 20)} bytes allows no more"
    for found in bench.catalog.committed():
        place = found.tensors["a0"]
        shard = bench.catalog.storage.read(f"snapshots/{found.name}/{place.file}")
        assert shard[place.offset : place.offset + 1000] == bench.content(found.step, 0, SIZE)[:1000]


def staging_bytes(writer: WriterProcess) -> int:
    """Return the bytes that the writer's memory files take; workers map the same."""
    files = {}
    for entry in Path(f"/proc/{writer.process.pid}/fd").iterdir():
        try:
            if "elasticflow-staging" in str(entry.readlink()):
                found = os.stat(entry)  # noqa: PTH116
                files[found.st_ino] = found.st_blocks * 512
        except FileNotFoundError:  # closed in this moment
            continue
    return sum(files.values())
