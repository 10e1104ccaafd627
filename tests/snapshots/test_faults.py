"""A snapshot is whole or not there, wherever the writer dies and whatever the disk does."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
import zlib
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, FileEntry
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.publish import Publisher
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.snapshots.conftest import Bench

# Saves the snapshots of steps 1 and 2, the second in a child that kills itself at its n-th act on the disk.
DYING_SAVE = """
    import os, sys, signal
    from elasticflow.snapshots.format import shard_file as shards
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.store.publish import Publisher
    from elasticflow.snapshots.format.shard_file import TensorEntry
    from elasticflow.storage.storage import Storage

    ACTS = ("mkdir", "open", "write", "fsync", "link", "replace", "rename", "unlink", "rmdir", "close")

    def save(uri, step):
        catalog = Catalog(Storage(uri))
        publisher = Publisher(catalog)
        name = f"{step:012d}-0001-{step:08x}"
        data = memoryview(bytes([step]) * 100_000)
        entries = [TensorEntry("x", "U8", (100_000,), 0, 100_000)]
        shard = shards.write_shard(catalog.storage, publisher.place(name), shards.pack("shard-00000-of-00001.safetensors",
                                   tensors=entries, staged=data, about={}))
        state = shards.write_json(catalog.storage, publisher.place(name), "state.json", {"position": {"step": step}, "state": {}})
        files = {f.name: f.entry for f in (shard, state)}
        publisher.publish(Manifest(run_id="r", name=name, step=step, generation=1, world_size=1, trigger="steps",
                                   created=0.0, files=files, tensors=shard.tensors))
        if step > 1:
            catalog.remove_snapshot(f"{step - 1:012d}-0001-{step - 1:08x}")

    def die_at(n):
        left = [n]
        for act in ACTS:
            def dying(*args, _act=getattr(os, act), **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return _act(*args, **kwargs)
            setattr(os, act, dying)

    root, most = sys.argv[1], int(sys.argv[2])
    for n in range(1, most + 1):
        uri = f"{root}/{n:03d}"
        save(uri, 1)
        if os.fork() == 0:
            die_at(n)
            save(uri, 2)
            os._exit(0)
        if os.wait()[1] == 0:
            break
"""


def test_killed_at_every_act_on_the_disk(tmp_path: Path, bench_at: Callable[[str], Bench]) -> None:
    """Killed before any act of a save: the newest committed snapshot is whole, and the next commit sweeps the rest."""
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DYING_SAVE), str(tmp_path), "200"], check=True, timeout=100
    )
    tried = sorted(path.name for path in tmp_path.iterdir())
    assert 20 < len(tried) < 200  # the last one lived
    steps = []
    for number in tried:
        catalog = bench_at(str(tmp_path / number)).catalog
        catalog.prefix = ""
        newest = catalog.newest()
        assert newest is not None
        assert verify.verify(catalog, newest) == []
        assert verify.read_state(catalog, newest) == {"position": {"step": newest.step}, "state": {}}
        assert catalog.damaged() == {}
        steps.append(newest.step)
        Publisher(catalog).sweep(2, ())
        assert catalog.storage.list("snapshots") == sorted(s.name for s in catalog.committed())
    assert steps == sorted(steps)  # older before the commit, newer after it, never nothing
    assert set(steps) == {1, 2}


def test_writer_killed_at_random_times(bench: Bench) -> None:
    """A writer killed while it writes leaves committed snapshots only; its successor continues."""
    chance = random.Random(4)
    for generation in range(1, 9):
        writer = bench.writer(keep_last=2)
        clients = [bench.connect(writer, rank, 2, generation=generation) for rank in range(2)]
        for step in range(generation * 10, generation * 10 + 3):
            for rank, client in enumerate(clients):
                bench.share(client, step, rank=rank, generation=generation, size=400_000)
        time.sleep(chance.uniform(0, 0.06))
        writer.process.kill()
        writer.process.wait()
        for found in bench.catalog.committed():
            assert verify.verify(bench.catalog, found) == []
    client = bench.connect(bench.writer(keep_last=2), generation=99)
    bench.share(client, 999, generation=99)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 999)]
    names = bench.catalog.storage.list("snapshots")
    assert names == sorted(s.name for s in bench.catalog.committed())
    assert len(names) <= 2


def test_full_disk_fails_one_snapshot_only(bench: Bench) -> None:
    """A write error is reported with its reason, leaves nothing, and the next snapshot is committed."""
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1, size=300_000)
    client.flush(20)
    with bench.small_files(writer, 100_000):
        bench.share(client, 2, size=300_000)
        (report,) = bench.flushed(client, 20)
    assert report.event == "snapshot.failed"
    assert report.reason == "OSError: [Errno 27] File too large"
    assert bench.catalog.storage.list("snapshots") == [bench.name_of(1)]
    bench.share(client, 3, size=300_000)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 3)]


def test_failure_sweeps_what_a_dead_writer_left(bench: Bench) -> None:
    """It may be what fills the disk: no later snapshot would be committed, and nothing swept."""
    bench.catalog.storage.write(f"snapshots/.tmp-{bench.name_of(1)}/shard", [bytes(1000)])
    writer = bench.writer()
    client = bench.connect(writer, generation=2)
    client.buffer(300_000, timeout_s=100)
    with bench.small_files(writer, 100_000):
        bench.share(client, 2, generation=2, size=300_000)
        assert bench.outcomes(client.flush(20)) == [("snapshot.failed", 2)]
    assert bench.catalog.storage.list("snapshots") == []


def test_unwritable_place_fails_the_snapshot(bench: Bench) -> None:
    """A file where the folder of snapshots should be is a reason, not a crash."""
    writer = bench.writer()
    client = bench.connect(writer)
    bench.catalog.storage.write("snapshots", [b"in the way"])
    bench.share(client, 1)
    (report,) = bench.flushed(client, 20)
    assert report.event == "snapshot.failed"
    assert str(report.reason).startswith(("NotADirectoryError", "FileExistsError"))
    bench.catalog.storage.remove("snapshots")
    bench.share(client, 2)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 2)]


def test_a_snapshot_is_never_overwritten(bench: Bench) -> None:
    """The same name twice: the second is refused and the first stays as it is."""
    client = bench.connect(bench.writer())
    bench.share(client, 1)
    client.flush(20)
    before = bench.catalog.newest()
    bench.share(client, 1)
    (report,) = bench.flushed(client, 20)
    assert report.event == "snapshot.failed"
    assert bench.catalog.newest() == before
    assert before is not None
    assert verify.verify(bench.catalog, before) == []


@pytest.mark.parametrize("file", ["shard-00000-of-00001.safetensors", "state.json", "MANIFEST.json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "longer", "absent", "empty"])
def test_every_damage_is_found(bench: Bench, file: str, harm: str) -> None:
    """A flipped bit, a missing end, an extra byte or no file at all: never loaded."""
    client = bench.connect(bench.writer())
    name = bench.share(client, 1)
    client.flush(20)
    catalog = bench.catalog
    (found,) = catalog.committed()
    path = catalog.storage.local_path(f"snapshots/{name}/{file}")
    data = bytearray(path.read_bytes())
    if harm == "absent":
        path.unlink()
    else:
        middle = len(data) // 2
        data[middle] ^= 1 << 3
        longer = path.read_bytes() + b"\0"
        changed: dict[str, bytes] = {
            "flip": bytes(data),
            "cut": bytes(data[:middle]),
            "longer": longer,
            "empty": b"",
        }
        path.write_bytes(changed[harm])
    if file != "MANIFEST.json":
        (problem,) = verify.verify(catalog, found)
        assert problem.startswith(f"{file}: ")
    elif harm == "absent":
        assert catalog.committed() == []
        assert catalog.uncommitted() == [name]
    elif harm == "longer":
        assert catalog.damaged().keys() == {name}
    else:
        assert catalog.committed() == []
        assert catalog.damaged().keys() == {name}


def test_damage_is_located(bench: Bench) -> None:
    """The reason names the file and the 8 MiB block."""
    client = bench.connect(bench.writer())
    name = bench.share(client, 1, size=20 << 20)
    client.flush(20)
    (found,) = bench.catalog.committed()
    path = bench.catalog.storage.local_path(f"snapshots/{name}/shard-00000-of-00001.safetensors")
    with path.open("r+b") as file:
        file.seek(17 << 20)
        file.write(b"\xff\x00\xff")
    expected = "shard-00000-of-00001.safetensors: block 2 (from byte 16777216) is not what was written"
    assert verify.verify(bench.catalog, found) == [expected]
    with pytest.raises(Exception, match="block 2"):
        verify.read_shard(bench.catalog.storage, f"snapshots/{name}/{path.name}", found.files[path.name])


def test_store_that_does_not_answer_is_not_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outage while reading from a remote store says nothing about the snapshot: it is not to be set aside."""
    storage = Storage("memory://outage")
    storage.write("x", [b"data"])

    def fail(path: str) -> None:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(storage, "open_read", fail)
    with pytest.raises(SnapshotError, match="x: cannot be read: ConnectionError: connection reset") as caught:
        verify.read_shard(storage, "x", FileEntry(4, (zlib.crc32(b"data"),)))
    assert not isinstance(caught.value, DamagedSnapshotError)
