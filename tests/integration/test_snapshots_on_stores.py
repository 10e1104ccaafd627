"""The writer process on every kind of store: stage, commit, load back, retention, and no secret anywhere."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch

from elasticflow.snapshots.format.pieces import Part
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.read.load import SnapshotReader
from elasticflow.snapshots.store.catalog import Catalog
from tests.places import LARGE_BODY, ON_SERVERS, Place
from tests.servers import AZURE_KEY, web
from tests.snapshots import in_pieces
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from elasticflow.snapshots.client.writer_process import WriterProcess

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings(LARGE_BODY)]
on_servers = pytest.mark.parametrize("place", ON_SERVERS, indirect=True)


@dataclass
class PlaceBench(Bench):
    """A run at a place that needs options."""

    options: dict[str, Any] = field(default_factory=dict)
    place: Place | None = None

    @property
    def catalog(self) -> Catalog:
        """A catalog that has seen nothing yet."""
        assert self.place is not None
        return Catalog(self.place.storage(), self.prefix)

    def writer(self, python: str = sys.executable, **config: Any) -> WriterProcess:
        """Start a node's writer."""
        return super().writer(python, options=self.options, **config)


@pytest.fixture
def bench_on(real_processes: None) -> Iterator[Callable[[Place], PlaceBench]]:
    """Make a bench at a place."""
    made: list[PlaceBench] = []

    def make(place: Place) -> PlaceBench:
        made.append(PlaceBench(place.uri, prefix="run/", options=place.options, place=place))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


@on_servers
def test_snapshots_are_committed_loaded_and_retained(
    place: Place, bench_on: Callable[[Place], PlaceBench]
) -> None:
    """Two ranks, three snapshots, two kept; every byte comes back, and nothing else lies there."""
    bench = bench_on(place)
    writer = bench.writer(keep_last=2)
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    size = 9 << 20  # more than one request takes
    for step in (1, 2, 3):
        for rank, client in enumerate(clients):
            bench.share(client, step, rank=rank, size=size)
    for client in clients:
        assert bench.outcomes(client.flush(300)) == [("snapshot.committed", step) for step in (1, 2, 3)]
    catalog = bench.catalog
    found = catalog.committed()
    assert [s.step for s in found] == [3, 2]
    for snapshot in found:
        assert verify.verify(catalog, snapshot) == []
        assert set(catalog.storage.list(catalog.folder(snapshot.name))) == {*snapshot.files, "MANIFEST.json"}
        for rank in range(2):
            (name,) = [file for file in snapshot.files if file.startswith(f"shard-{rank:05d}-of")]
            content = verify.read_shard(
                catalog.storage, f"{catalog.folder(snapshot.name)}/{name}", snapshot.files[name]
            )
            assert bytes(content).endswith(bench.content(snapshot.step, rank, size))
        assert verify.read_state(catalog, snapshot) == {"position": {"step": snapshot.step}, "state": {}}
    assert set(catalog.storage.list(catalog.folder())) == {s.name for s in found}


@on_servers
def test_a_node_fetches_the_rows_that_its_ranks_hold(place: Place) -> None:
    """Of a snapshot that four ranks share a node of two fetches half, whichever; a node of one a quarter."""
    rows = torch.arange(12.0).view(12, 1).expand(12, 1 << 18)
    taken = in_pieces.take(
        Catalog(place.storage(), "run/"), in_pieces.state_of({f"w{n}": rows + n for n in range(4)}), degree=4
    )
    for shards, share in (((0,), 0.25), ((0, 1), 0.5), ((2, 3), 0.5), ((0, 1, 2, 3), 1.0)):
        storage, sizes = place.storage(), list[int]()
        read_range = storage.read_range

        def counted(path: str, start: int, size: int, fetch: Any = read_range, into: Any = sizes) -> bytes:
            data: bytes = fetch(path, start, size)
            into.append(len(data))
            return data

        storage.read_range = counted  # type: ignore[method-assign]
        parts = frozenset(Part(shard, 4) for shard in shards)
        with contextlib.closing(
            SnapshotReader(Catalog(storage, "run/"), taken.name, parts=parts).read().files
        ):
            assert share * taken.size <= sum(sizes) < (share + 0.01) * taken.size, shards


@on_servers
def test_two_launches_get_different_generations(place: Place) -> None:
    """Of four claims at once, each by a storage of its own, no two get the same number."""
    start, numbers = threading.Barrier(4), []

    def claim() -> None:
        catalog = Catalog(place.storage(), "run/")
        start.wait()
        numbers.append(catalog.claim_generation({"launch": 1}))

    threads = [threading.Thread(target=claim) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2, 3, 4]
    assert Catalog(place.storage(), "run/").newest_generation() == 4


@on_servers
def test_damage_on_the_store_is_found(place: Place, bench_on: Callable[[Place], PlaceBench]) -> None:
    """A byte flipped in a shard is named; the snapshot before is whole."""
    bench = bench_on(place)
    client = bench.connect(bench.writer())
    for step in (1, 2):
        bench.share(client, step, size=200_000)
    client.flush(300)
    newest, older = bench.catalog.committed()
    storage = place.storage()
    path = f"run/snapshots/{newest.name}/shard-00000-of-00001.safetensors"
    content = bytearray(storage.read(path))
    content[100_000] ^= 1
    storage.write(path, [content])
    (problem,) = verify.verify(bench.catalog, newest)
    assert problem.startswith("shard-00000-of-00001.safetensors: block 0")
    assert verify.verify(bench.catalog, older) == []


def test_snapshots_are_read_from_a_web_server(
    tmp_path: Path, bench_on: Callable[[Place], PlaceBench]
) -> None:
    """A folder of snapshots behind a web server is listed and verified; a writer is refused and says why."""
    bench = bench_on(Place("local", str(tmp_path / "store")))
    client = bench.connect(bench.writer())
    bench.share(client, 1, size=20 << 20)
    client.flush(300)
    with web(tmp_path / "store") as url:
        served = bench_on(Place("http", url))
        (found,) = served.catalog.committed()
        assert found.step == 1
        assert verify.verify(served.catalog, found) == []
        client = served.connect(served.writer())
        served.share(client, 2)
        (report,) = served.flushed(client, 300)
    assert report.event == "snapshot.failed"
    assert f"{url} is read-only" in str(report.reason)
    assert [s.step for s in bench.catalog.committed()] == [1]


OTHER_KEY = "V3JvbmdLZXlPZkF6dXJl"
WRONG: dict[
    str, tuple[dict[str, Any], tuple[str, ...]]
] = {  # options that open nothing, and what must not be told
    "s3": ({"key": "AKIA0WRONG0KEY", "secret": "Wr0ngS3cretOfS3"}, ("AKIA0WRONG0KEY", "Wr0ngS3cretOfS3")),
    "az": ({"connection_string": ""}, (OTHER_KEY,)),
    "abfs": ({"connection_string": ""}, (OTHER_KEY,)),
    "gs": ({"token": "ya29.Wr0ngBearerToken"}, ("Wr0ngBearerToken",)),
    "sftp": ({"client_keys": [], "agent_path": None, "password": "Wr0ngPassw0rd"}, ("Wr0ngPassw0rd",)),
}
CHECK = """
import json, sys
from elasticflow.errors import StorageError
from elasticflow.storage.storage import Storage
uri, options = json.loads(sys.stdin.read())
storage = Storage(uri, options)
print(storage.uri)
try:
    storage.check_writable()
except StorageError as error:
    print(error)
storage.read("x")
"""


@on_servers
def test_secrets_are_told_nowhere(
    place: Place, bench_on: Callable[[Place], PlaceBench], capfd: pytest.CaptureFixture[str]
) -> None:
    """Right or wrong credentials, from the environment or the job file: no output, traceback, report or file tells them."""
    bench = bench_on(place)
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1)
    reports = client.flush(300)
    assert bench.outcomes(reports) == [("snapshot.committed", 1)]

    options, told = WRONG[place.kind]
    if "connection_string" in options:
        right = os.environ["AZURE_STORAGE_CONNECTION_STRING"]
        options = {"connection_string": right.replace(AZURE_KEY, OTHER_KEY)}
    uri = place.uri.replace("://", "://me:Wr0ngInTheUrl@") if place.kind == "s3" else place.uri
    asked = json.dumps([uri, {**place.options, **options}])
    done = subprocess.run(
        [sys.executable, "-c", CHECK], input=asked, capture_output=True, text=True, check=False, timeout=300
    )
    storage = place.storage()
    found = [
        storage.read(f"run/snapshots/{name}/{file}").decode(errors="replace")
        for name in storage.list("run/snapshots")
        for file in storage.list(f"run/snapshots/{name}")
    ]
    assert len(found) == 3
    everything = [
        *found,
        json.dumps([reports, writer.reports()], default=vars),
        done.stdout,
        done.stderr,
        *capfd.readouterr(),
    ]
    secrets = (*place.secrets, *told, "Wr0ngInTheUrl")
    assert [] == [(secret, text) for secret in secrets for text in everything if secret in text]
    assert "cannot be written: " in done.stdout, done.stderr
