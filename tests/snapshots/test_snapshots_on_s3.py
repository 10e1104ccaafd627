"""The object-store protocol against a real S3 server on loopback."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import StorageError
from elasticflow.snapshots.read import verify
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.snapshots.conftest import Bench

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
pytestmark = pytest.mark.integration


def test_snapshots_are_committed_and_retained(s3_bucket: str, bench_at: Callable[[str], Bench]) -> None:
    """Two ranks, three snapshots, two kept; every byte is verified and nothing else lies there."""
    bench = bench_at(f"s3://{s3_bucket}/runs")
    writer = bench.writer(keep_last=2)
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for step in (1, 2, 3):
        for rank, client in enumerate(clients):
            bench.share(client, step, rank=rank, size=200_000)
    for client in clients:
        assert bench.outcomes(client.flush(60)) == [("snapshot.committed", step) for step in (1, 2, 3)]
    catalog = bench.catalog
    found = catalog.committed()
    assert [s.step for s in found] == [3, 2]
    for snapshot in found:
        assert verify.verify(catalog, snapshot) == []
        assert set(catalog.storage.list(catalog.folder(snapshot.name))) == {*snapshot.files, "MANIFEST.json"}
    assert set(catalog.storage.list(catalog.folder())) == {s.name for s in found}


def test_a_relative_path_of_credentials_is_one_of_the_writer_too(
    s3_bucket: str, bench_at: Callable[[str], Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before a run found the file, and then no snapshot was written."""
    keys = [f"{name.lower()} = {os.environ[name]}" for name in KEYS]
    (tmp_path / "keys").write_text("\n".join(["[default]", *keys]))
    for name in KEYS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "keys")
    monkeypatch.chdir(tmp_path)
    bench = bench_at(f"s3://{s3_bucket}/runs")
    client = bench.connect(bench.writer())
    bench.share(client, 1)
    assert bench.outcomes(client.flush(60)) == [("snapshot.committed", 1)]


def test_two_nodes_on_s3(s3_bucket: str, bench_at: Callable[[str], Bench]) -> None:
    """Record files carry the other node's share; after the commit they are gone."""
    bench = bench_at(f"s3://{s3_bucket}/runs")
    clients = [bench.connect(bench.writer(), rank, 2, local_world_size=1) for rank in range(2)]
    for rank, client in enumerate(clients):
        bench.share(client, 1, rank=rank)
    for client in clients:
        assert bench.outcomes(client.flush(60)) == [("snapshot.committed", 1)]
    (found,) = bench.catalog.committed()
    assert set(bench.catalog.storage.list(bench.catalog.folder(found.name))) == {
        *found.files,
        "MANIFEST.json",
    }


def test_generations_on_s3_are_exclusive(s3_bucket: str) -> None:
    """Of six creators at once one wins; what another process wrote is seen at once."""
    uri = f"s3://{s3_bucket}/x"
    won, start = [], threading.Barrier(6)

    def create(number: int) -> None:
        storage = Storage(uri)
        start.wait()
        if storage.create("generations/0001.json", str(number).encode()):
            won.append(number)

    reader_storage = Storage(uri)
    assert not reader_storage.exists("generations/0001.json")
    assert reader_storage.list("generations") == []
    threads = [threading.Thread(target=create, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert reader_storage.exists("generations/0001.json")
    assert reader_storage.list("generations") == ["0001.json"]
    assert reader_storage.read("generations/0001.json") == str(won[0]).encode()


def test_broken_upload_leaves_no_object(s3_bucket: str) -> None:
    """A write that fails after several parts were uploaded leaves nothing at the key, nor an open upload."""
    import s3fs

    storage = Storage(f"s3://{s3_bucket}/x")

    def parts() -> Iterator[bytes]:
        for _ in range(3):
            yield b"x" * (9 << 20)
        raise OSError("the disk died")

    with pytest.raises(OSError, match="the disk died"):
        storage.write("big", parts())
    assert not storage.exists("big")
    uploads = s3fs.S3FileSystem(skip_instance_cache=True).call_s3("list_multipart_uploads", Bucket=s3_bucket)
    assert uploads.get("Uploads", []) == []
    assert storage.write("big", [b"y" * (9 << 20)] * 2) == 18 << 20
    assert storage.size("big") == 18 << 20


def test_missing_bucket_is_named(s3_bucket: str) -> None:
    """The check before a launch names the URI and the cause."""
    with pytest.raises(
        StorageError, match=r'snapshots.uri "s3://no-such-bucket-here/x" cannot be written: FileNotFound'
    ):
        Storage("s3://no-such-bucket-here/x").check_writable()
    Storage(f"s3://{s3_bucket}/x").check_writable()


def test_store_that_refuses_fails_the_snapshot(s3_bucket: str, bench_at: Callable[[str], Bench]) -> None:
    """A writer whose bucket does not exist reports each snapshot as failed and lives on."""
    bench = bench_at("s3://no-such-bucket-here/runs")
    client = bench.connect(bench.writer())
    for step in (1, 2):
        bench.share(client, step)
        (report,) = bench.flushed(client, 60)
        assert report.event == "snapshot.failed"
        assert "bucket does not exist" in str(report.reason)
