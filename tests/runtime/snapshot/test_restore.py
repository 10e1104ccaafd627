from __future__ import annotations

import errno
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.errors import SnapshotError
from elasticflow.runtime.process.failure import classify
from elasticflow.runtime.snapshot import restore
from elasticflow.snapshots.format import manifest, shard_file
from elasticflow.snapshots.format.manifest import Manifest, OtherVersionError, UnreadableSnapshotError
from elasticflow.snapshots.format.shard_file import TensorEntry
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.store.publish import Publisher
from elasticflow.storage.storage import Storage
from tests.own_loader import OwnLoader
from tests.snapshots import in_pieces

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.snapshots.read.load import LoadedSnapshot

SHARD = "shard-00000-of-00001.safetensors"


def publish(catalog: Catalog, step: int) -> str:
    """Commit a snapshot of one tensor and return its name."""
    publisher, name = Publisher(catalog), f"{step:012d}-0001-{step:08x}"
    place, storage = publisher.place(name), catalog.storage
    entries, data = [TensorEntry("x", "U8", (1000,), 0, 1000)], memoryview(bytes([step]) * 1000)
    shard = shard_file.write_shard(
        storage, place, shard_file.pack(SHARD, tensors=entries, staged=data, about={})
    )
    state = shard_file.write_json(storage, place, "state.json", {"position": {"step": step}, "state": {}})
    files = {file.name: file.entry for file in (shard, state)}
    about: dict[str, Any] = {"run_id": "r", "generation": 1, "world_size": 1, "trigger": "steps"}
    publisher.publish(
        Manifest(name=name, step=step, created=0.0, files=files, tensors=shard.tensors, **about)
    )
    return name


@pytest.fixture(params=["local", "remote"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    """A run with two snapshots."""
    uri = str(tmp_path / "run") if request.param == "local" else f"memory://restore-{tmp_path.name}"
    made = Catalog(Storage(uri))
    publish(made, 1)
    publish(made, 2)
    return made


def test_damage_is_set_aside_and_the_next_older_is_taken(me: Any, catalog: Catalog) -> None:
    """A flipped byte: the snapshot is set aside with the reason, and the older one is restored."""
    newest = catalog.committed()[0].name
    path = f"{catalog.folder(newest)}/{SHARD}"
    content = catalog.storage.read(path)
    catalog.storage.write(path, [content[:-1] + b"!"])
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    assert found.state == {"position": {"step": 1}, "state": {}}
    assert list(catalog.quarantined()) == [newest]
    assert [(e["event"], e["name"]) for e in me.events] == [("snapshot.rejected", newest)]
    assert [f"snapshot {newest} is set aside: {me.events[0]['reason']}"] == me.told


def test_a_snapshot_of_another_version_is_refused_and_stays(me: Any, catalog: Catalog) -> None:
    """The run began anew from an older snapshot before, and the newer version never saw its own again."""
    newest, older = catalog.committed()
    path = f"{catalog.folder(newest.name)}/MANIFEST.json"
    content = {**json.loads(catalog.storage.read(path)), "format": 3}
    del content["digest"]
    catalog.storage.write(path, [json.dumps({**content, "digest": manifest._digest(content)}).encode()])
    with pytest.raises(OtherVersionError):
        catalog.newest()
    with pytest.raises(
        SnapshotError,
        match=r"rank 0 cannot read snapshots: MANIFEST\.json has format 3, .*\n  help: continue with that version",
    ):
        restore.newest_good(me, catalog, OwnLoader(catalog))
    assert catalog.quarantined() == {}
    assert [snapshot.name for snapshot in catalog.committed()] == [older.name]


def test_absent_file_is_damage(me: Any, catalog: Catalog) -> None:
    """A shard that is not there sets the snapshot aside."""
    newest = catalog.committed()[0].name
    catalog.storage.remove(f"{catalog.folder(newest)}/{SHARD}")
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    assert catalog.quarantined() == {newest: f"{SHARD}: is absent"}


@pytest.mark.parametrize("told", in_pieces.LIES)
def test_a_lie_of_pieces_is_set_aside_and_the_next_older_is_taken(
    me: Any, catalog: Catalog, told: str
) -> None:
    """No tensor of it is read, and the reason says what the lie is."""
    newest = in_pieces.take(catalog, in_pieces.v_and_w(), degree=2, step=3).name
    whole = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert whole is not None
    assert newest == whole.manifest.name
    reason = in_pieces.lie(catalog, newest, told)
    seen = Catalog(catalog.storage)
    found = restore.newest_good(me, seen, OwnLoader(seen))
    assert found is not None
    assert found.state == {"position": {"step": 2}, "state": {}}
    assert reason in seen.quarantined()[newest]
    assert [("snapshot.rejected", newest)] == [(e["event"], e["name"]) for e in me.events]


@pytest.mark.parametrize("act", ["list", "read", "open_read"])
@pytest.mark.parametrize(
    "error",
    [
        PermissionError(errno.EACCES, "Access Denied"),
        ConnectionError("connection reset"),
        OSError(errno.ESTALE, "stale handle"),
    ],
    ids=["denied", "reset", "stale"],
)
def test_outage_sets_nothing_aside(
    me: Any, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, act: str, error: OSError
) -> None:
    """A store that cannot be listed or read ends the worker with class storage; every snapshot stays as it is."""

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as outage:
        outage.setattr(catalog.storage, act, fail)
        with pytest.raises(SnapshotError, match=r"^rank 0 cannot read snapshots: .*") as caught:
            restore.newest_good(me, catalog, OwnLoader(catalog))
    assert classify(caught.value) == "storage"
    assert catalog.quarantined() == {}
    assert me.events == []
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    assert found.state == {"position": {"step": 2}, "state": {}}


def test_outage_of_another_rank_ends_this_one(me: Any, catalog: Catalog) -> None:
    """A rank that read everything gives up too when another could not, and nobody sets the snapshot aside."""
    texts = iter(([], ["", "outage: TimeoutError: no answer"]))
    other = SimpleNamespace(**{**vars(me), "gather_text": lambda text: next(texts) or [text]})
    with pytest.raises(SnapshotError, match=r"^rank 1 cannot read snapshots: TimeoutError: no answer$"):
        restore.newest_good(other, catalog, OwnLoader(catalog))  # type: ignore[arg-type]
    assert catalog.quarantined() == {}


def test_disk_that_cannot_read_a_file_is_damage(
    me: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local disk's input/output error sets the snapshot aside: a restart would only meet it again."""
    catalog = Catalog(Storage(str(tmp_path)))
    publish(catalog, 1)
    bad, real = publish(catalog, 2), catalog.storage.open_read

    def fail(path: str) -> Any:
        if bad in path:
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(catalog.storage, "open_read", fail)
    found = restore.newest_good(me, catalog, OwnLoader(catalog))
    assert found is not None
    assert found.state == {"position": {"step": 1}, "state": {}}
    assert list(catalog.quarantined()) == [bad]


class Forbidding(OwnLoader):
    """Loads as `OwnLoader`, but some snapshots may not be read by this user."""

    def __init__(self, catalog: Catalog, *names: str) -> None:
        super().__init__(catalog)
        self.names = names

    def load(self, name: str) -> LoadedSnapshot:
        """Return snapshot *name*, unless it may not be read."""
        if name in self.names:
            raise UnreadableSnapshotError(f"{SHARD}: cannot be read: Permission denied")
        return super().load(name)


def test_one_that_may_not_be_read_is_damage_while_an_older_one_can(me: Any, catalog: Catalog) -> None:
    """Where none may be read it is an outage: nothing is set aside, and nothing begins anew."""
    newest, older = (manifest.name for manifest in catalog.committed())
    with pytest.raises(SnapshotError, match=f"rank 0 cannot read snapshots: {SHARD}: cannot be read"):
        restore.newest_good(me, catalog, Forbidding(catalog, newest, older))
    assert {} == catalog.quarantined()
    found = restore.newest_good(me, catalog, Forbidding(catalog, newest))
    assert found is not None
    assert older == found.manifest.name
    assert {newest: f"{SHARD}: cannot be read: Permission denied"} == catalog.quarantined()
