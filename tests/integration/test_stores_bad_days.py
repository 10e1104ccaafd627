"""Stores that fail, answer slowly, are full or only to be read: what is committed stays, what fails is told."""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.errors import SnapshotError
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.retry import Patience
from elasticflow.storage.storage import Storage
from tests.faulty_proxy import Fault, FaultyProxy, black_hole
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

MIB = 1 << 20
ROTATION: tuple[Fault, ...] = (500, "reset", 503, "lost", "cut")


@pytest.fixture
def proxy(s3_bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    """Put a proxy between S3's server and everybody who is started from now on."""
    with FaultyProxy(os.environ["AWS_ENDPOINT_URL"]).running() as running:
        monkeypatch.setenv("AWS_ENDPOINT_URL", running.url)
        yield running


@pytest.fixture
def bench_in_bucket(proxy: FaultyProxy, s3_bucket: str, real_processes: None) -> Iterator[Bench]:
    """A run whose writers reach the bucket through the proxy; the catalog sees it directly."""
    bench = Bench(f"s3://{s3_bucket}/runs", prefix="run/")
    yield bench
    proxy.flows.set()
    bench.close()


def directly(bench: Bench, s3_server: str) -> Catalog:
    """Return a catalog that goes around the proxy."""
    options = {"client_kwargs": {"endpoint_url": s3_server}}
    return Catalog(Storage(bench.uri, options), bench.prefix)


def assert_all_whole(catalog: Catalog, steps: list[int]) -> None:
    """Assert that just the snapshots at *steps* exist, every byte of them, and that nothing else lies there."""
    found = catalog.committed()
    assert [s.step for s in found] == steps
    assert [problem for snapshot in found for problem in verify.verify(catalog, snapshot)] == []
    for snapshot in found:
        names = set(catalog.storage.list(catalog.folder(snapshot.name)))
        assert names == {*snapshot.files, "MANIFEST.json"}
    assert set(catalog.storage.list(catalog.folder())) == {s.name for s in found}


def test_every_third_request_fails(bench_in_bucket: Bench, proxy: FaultyProxy, s3_server: str) -> None:
    """500, 503, resets before and after the deed, and cut answers in turn: each snapshot is committed and whole."""
    proxy.schedule = lambda number, _: ROTATION[number // 3 % len(ROTATION)] if number % 3 == 2 else None
    bench = bench_in_bucket
    writer = bench.writer(keep_last=2)
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for step in (1, 2, 3):
        for rank, client in enumerate(clients):
            bench.share(client, step, rank=rank, size=10 * MIB)
    for client in clients:
        assert bench.outcomes(client.flush(300)) == [("snapshot.committed", step) for step in (1, 2, 3)]
    assert len(proxy.asked) > 30
    writer.close()
    assert_all_whole(directly(bench, s3_server), [3, 2])


@pytest.mark.nightly
def test_outage_in_the_middle(bench_in_bucket: Bench, proxy: FaultyProxy, s3_server: str) -> None:
    """Ten requests in a row find nobody: the writer says so, waits, and commits when the store is back."""
    bench = bench_in_bucket
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1, size=MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 1)]
    first = len(proxy.asked)
    proxy.schedule = lambda number, _: "reset" if number < first + 10 else None
    bench.share(client, 2, size=MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 2)]
    assert len(proxy.asked) > first + 10
    told = [report for report in writer.reports() if report["event"] == "store.trouble"]
    assert told[0]["operation"].startswith("write run/snapshots/")
    assert {"event", *events.STORE_TROUBLE.fields} == set(told[0])
    assert_all_whole(directly(bench, s3_server), [2, 1])


def test_store_that_refuses(bench_in_bucket: Bench, proxy: FaultyProxy, s3_server: str) -> None:
    """Whoever may not write is told so at once, not after many tries; older snapshots stay, and later ones succeed."""
    bench = bench_in_bucket
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1, size=MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 1)]
    first = len(proxy.asked)
    proxy.schedule = lambda _, method: 403 if method in {"PUT", "POST", "DELETE"} else None
    bench.share(client, 2, size=MIB)
    (report,) = bench.flushed(client, 300)
    assert report.event == "snapshot.failed"
    assert "PermissionError" in str(report.reason)
    refused = [method for method, _ in proxy.asked[first:] if method == "PUT"]
    assert len(refused) <= 2  # the shard and the state
    proxy.schedule = lambda *_: None
    assert_all_whole(directly(bench, s3_server), [1])
    bench.share(client, 3, size=MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 3)]
    assert_all_whole(directly(bench, s3_server), [3, 1])


@pytest.mark.nightly
def test_slow_store_spaces_snapshots_out(bench_in_bucket: Bench, proxy: FaultyProxy, s3_server: str) -> None:
    """Two snapshots are taken over though the store takes nothing; a third has to wait, and is not queued."""
    bench = bench_in_bucket
    client = bench.connect(bench.writer(keep_last=5))
    proxy.flows.clear()
    for step in (1, 2):
        bench.share(client, step, size=6 * MIB)
    assert client.reports() == []
    with pytest.raises(SnapshotError, match="no staging buffer became free"):
        client.buffer(6 * MIB, timeout_s=0.5)
    proxy.bytes_per_s = 6.0 * MIB
    proxy.flows.set()
    bench.share(client, 3, size=6 * MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", step) for step in (1, 2, 3)]
    proxy.bytes_per_s = None
    assert_all_whole(directly(bench, s3_server), [3, 2, 1])


@pytest.mark.parametrize("kind", ["s3", "http", "sftp"])
def test_store_that_never_answers(kind: str) -> None:
    """A store that takes the connection and says nothing is given up within its limits, as an OSError."""
    import aiohttp

    short = {"connect_timeout": 1, "read_timeout": 1, "retries": {"max_attempts": 1}}
    with black_hole() as port:
        address = f"127.0.0.1:{port}"
        places: dict[str, tuple[str, dict[str, Any]]] = {
            "s3": (
                "s3://bucket/x",
                {"anon": True, "endpoint_url": f"http://{address}", "config_kwargs": short},
            ),
            "http": (
                f"http://{address}/x",
                {"client_kwargs": {"timeout": aiohttp.ClientTimeout(sock_read=1)}},
            ),
            "sftp": (f"sftp://{address}/x", {"login_timeout": 1, "client_keys": [], "config": []}),
        }
        uri, options = places[kind]
        storage = Storage(uri, options, patience=Patience(total_s=3, first_s=0.1))
        with pytest.raises(OSError, match=r"(?i)time|connect|lost") as caught:
            storage.read("a")
    assert not isinstance(caught.value, FileNotFoundError)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a disk of 16 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    with contextlib.suppress(OSError):
        if subprocess.run(mount, check=False, capture_output=True, timeout=100).returncode == 0:
            yield folder
            subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=100)
            return
    pytest.skip("this user may not mount a tmpfs")


@pytest.fixture
def bench_on_disk(small_disk: Path, real_processes: None) -> Iterator[Bench]:
    """A run on that disk."""
    bench = Bench(str(small_disk / "store"), prefix="run/")
    yield bench
    bench.close()


def test_full_disk(bench_on_disk: Bench, small_disk: Path) -> None:
    """No room: told as such, older snapshots whole, nothing half there; the next save works once there is room."""
    bench = bench_on_disk
    client = bench.connect(bench.writer())
    bench.share(client, 1, size=4 * MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 1)]
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"x" * (9 * MIB))
    for step in (2, 3):
        bench.share(client, step, size=4 * MIB)
        (report,) = bench.flushed(client, 300)
        assert report.event == "snapshot.failed"
        assert "No space left on device" in str(report.reason)
    assert_all_whole(bench.catalog, [1])
    ballast.unlink()
    bench.share(client, 4, size=4 * MIB)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 4)]
    assert_all_whole(bench.catalog, [4, 1])


def test_read_only_disk(bench_on_disk: Bench, small_disk: Path) -> None:
    """A disk that can only be read fails each snapshot with that reason; older ones load; later ones succeed."""
    bench = bench_on_disk
    client = bench.connect(bench.writer())
    bench.share(client, 1)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 1)]
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=100)
    bench.share(client, 2)
    (report,) = bench.flushed(client, 300)
    assert report.event == "snapshot.failed"
    assert "Read-only file system" in str(report.reason)
    assert_all_whole(bench.catalog, [1])
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True, timeout=100)
    bench.share(client, 3)
    assert bench.outcomes(client.flush(300)) == [("snapshot.committed", 3)]
    assert_all_whole(bench.catalog, [3, 1])
