"""What a run has at its URI: committed, set aside, damaged; generations and the job's record."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import SnapshotError, StorageError
from elasticflow.run_folder import snapshot_name
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, FileEntry, Manifest
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.store.publish import CommitRefusedError, Publisher
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["local", "memory"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Catalog:
    """An empty catalog of each kind of store."""
    uri = str(tmp_path) if request.param == "local" else f"memory://catalog-{tmp_path.name}"
    return Catalog(Storage(uri), "run/" if request.param == "memory" else "")


def commit(catalog: Catalog, step: int, generation: int = 1) -> str:
    """Commit a snapshot without files."""
    name = snapshot_name(step, generation, f"{step:08x}")
    facts = {"run_id": "r", "world_size": 1, "trigger": "steps", "created": 0.0}
    record = Manifest(name=name, step=step, generation=generation, files={}, tensors={}, **facts)  # type: ignore[arg-type]
    catalog.storage.write(f"{Publisher(catalog).place(name)}/state.json", [b"{}"])
    Publisher(catalog).publish(record)
    return name


def test_empty(catalog: Catalog) -> None:
    """A run that never began has nothing, and asking is no error."""
    assert catalog.committed() == []
    assert catalog.newest() is None
    assert catalog.newest_generation() == 0
    assert catalog.quarantined() == {}
    assert catalog.read_job_record() is None


@pytest.mark.parametrize("name", ["snapshots", "generations"])
@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_that_takes_no_file_is_refused(tmp_path: Path, name: str, *, is_link: bool) -> None:
    """A file, or a link to nowhere, in its place; a folder of another user is the same to us."""
    place = tmp_path / "run" / name
    place.parent.mkdir()
    if is_link:
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.write_text("no folder")
    with pytest.raises(StorageError, match="cannot be written"):
        Catalog(Storage(str(tmp_path)), "run/").check_writable()
    place.unlink()
    Catalog(Storage(str(tmp_path)), "run/").check_writable()
    assert not place.exists()


def test_newest_first_by_generation_then_step(catalog: Catalog) -> None:
    """What a later generation took comes first, whatever the step; strangers and hidden folders are ignored."""
    for step, generation in ((5, 1), (10, 1), (10, 2), (7, 3)):
        commit(catalog, step, generation)
    catalog.storage.write("snapshots/README", [b"x"])
    catalog.storage.write(f"snapshots/.tmp-{snapshot_name(99, 1, '00000063')}/state.json", [b"{}"])
    assert [(s.step, s.generation) for s in catalog.committed()] == [(7, 3), (10, 2), (10, 1), (5, 1)]


def test_uncommitted_is_invisible(catalog: Catalog) -> None:
    """A folder without a manifest is no snapshot."""
    commit(catalog, 1)
    name = snapshot_name(2, 1, "00000002")
    catalog.storage.write(f"{catalog.folder(name)}/state.json", [b"{}"])
    assert [s.step for s in catalog.committed()] == [1]
    assert catalog.uncommitted() == [name]


def test_quarantine(catalog: Catalog) -> None:
    """A snapshot set aside is not offered again, with its first reason kept, its files left alone, until that is lifted."""
    good, bad = commit(catalog, 1), commit(catalog, 2)
    catalog.quarantine(bad, "block 3 is not what was written")
    catalog.quarantine(bad, "again")
    assert [s.name for s in catalog.committed()] == [good]
    assert catalog.quarantined() == {bad: "block 3 is not what was written"}
    assert catalog.manifest(bad).step == 2
    for _ in range(2):
        catalog.lift(bad)
        assert [s.name for s in catalog.committed()] == [bad, good]
    assert catalog.quarantined() == {}


def test_manifest_of_another_snapshot_is_damage(catalog: Catalog) -> None:
    """A manifest copied to another folder is noticed."""
    first, second = commit(catalog, 1), commit(catalog, 2)
    data = catalog.storage.read(f"{catalog.folder(first)}/MANIFEST.json")
    catalog.storage.write(f"{catalog.folder(second)}/MANIFEST.json", [data])
    with pytest.raises(DamagedSnapshotError, match="is that of snapshot"):
        catalog.manifest(second)
    assert list(catalog.damaged()) == [second]
    assert [s.name for s in catalog.committed()] == [first]


def test_pins(catalog: Catalog) -> None:
    """A pin is there until it is taken away, with its note; only what is committed can be pinned."""
    name = commit(catalog, 1)
    missing = snapshot_name(2, 1, "00000002")
    assert {} == catalog.pinned()
    catalog.pin(name, "for the paper")
    catalog.pin(name, "figure 3")
    assert {name: "figure 3"} == catalog.pinned()
    assert catalog.is_pinned(name)
    with pytest.raises(SnapshotError, match=f"there is no snapshot {missing}"):
        catalog.pin(missing)
    assert [name] == list(catalog.pinned())
    for _ in range(2):
        catalog.unpin(name)
    assert not catalog.is_pinned(name)
    assert {} == catalog.pinned()


def test_lends(catalog: Catalog) -> None:
    """A file can be referred to while its snapshot is committed and not set aside, and it has all its bytes."""
    name, entry = commit(catalog, 1), FileEntry(2, (0,))
    location = f"{name}/state.json"
    assert catalog.can_reuse(location, entry)
    assert not catalog.can_reuse(location, FileEntry(3, (0,)))
    assert not catalog.can_reuse(f"{name}/other", entry)
    assert not catalog.can_reuse(f"{snapshot_name(2, 1, '00000002')}/state.json", entry)
    catalog.quarantine(name, "for the test")
    assert not catalog.can_reuse(location, entry)


def test_the_newest_is_found_without_reading_older_manifests(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One manifest is read, however many snapshots there are."""
    names = [commit(catalog, step) for step in (1, 2, 3)]
    read: list[str] = []
    really = catalog.manifest

    def noted(name: str) -> Manifest:
        read.append(name)
        return really(name)

    monkeypatch.setattr(catalog, "manifest", noted)
    found = catalog.newest()
    assert found is not None
    assert [names[-1]] == [found.name] == read


def test_remove_snapshot(catalog: Catalog) -> None:
    """Removed is gone, and removing again is no error."""
    name = commit(catalog, 1)
    catalog.remove_snapshot(name)
    catalog.remove_snapshot(name)
    assert catalog.committed() == []
    assert catalog.storage.list(catalog.folder()) == []


def test_publish_refuses_a_taken_name_and_missing_bytes(catalog: Catalog) -> None:
    """Nothing is committed over a snapshot, nor with a file that is not there as written."""
    name = commit(catalog, 1)
    record = catalog.manifest(name)
    publisher = Publisher(catalog)
    other = dataclasses.replace(record, created=9.0)
    with pytest.raises((CommitRefusedError, OSError)):
        publisher.publish(other)
    short = dataclasses.replace(
        record, name=snapshot_name(2, 1, "00000002"), files={"state.json": FileEntry(5, (0,))}
    )
    catalog.storage.write(f"{publisher.place(short.name)}/state.json", [b"{}"])
    with pytest.raises(CommitRefusedError, match=r"state.json has 2 bytes on the store, 5 were written"):
        publisher.publish(short)
    borrowing = dataclasses.replace(short, files={}, borrowed={f"{name}/w.safetensors": FileEntry(5, (0,))})
    with pytest.raises(CommitRefusedError, match=r"w.safetensors, which it refers to, is no longer there"):
        publisher.publish(borrowing)
    assert catalog.committed() == [record]


def test_generations_count_up(catalog: Catalog) -> None:
    """Each claim is the next number; a claim fences all before it."""
    assert [catalog.claim_generation({"n": n}) for n in range(3)] == [1, 2, 3]
    assert catalog.newest_generation() == 3
    assert [catalog.is_fenced(number) for number in (1, 2, 3)] == [True, True, False]


def test_claim_goes_past_a_number_it_did_not_see(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale listing costs a retry, never a number given twice."""
    assert catalog.claim_generation({}) == 1
    monkeypatch.setattr(catalog, "newest_generation", lambda: 0)
    assert catalog.claim_generation({}) == 2


def test_job_record_tells_the_newest_launch(catalog: Catalog) -> None:
    """Whoever writes last is what others read."""
    for digest in ("a", "b"):
        catalog.write_job_record({"digest": digest})
    assert catalog.read_job_record() == {"digest": "b"}


def test_the_generation_after_ours_is_ours_or_nobody_elses(catalog: Catalog) -> None:
    """One launch continues after its own last generation; for another, that number is taken; asked twice, it stays ours."""
    ours, theirs = {"host": "a", "pid": 1, "reason": "start"}, {"host": "b", "pid": 1, "reason": "start"}
    assert catalog.claim_generation(ours) == 1
    assert catalog.claim_after(1, ours)
    assert catalog.claim_after(1, {**ours, "reason": "storage"})
    assert not catalog.claim_after(1, theirs)
    assert catalog.newest_generation() == 2


def test_one_manifest_that_cannot_be_read_is_damage_while_another_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is what all suffer: then nothing is said about any snapshot."""
    catalog = Catalog(Storage(str(tmp_path)))
    names = [commit(catalog, step) for step in (1, 2, 3)]
    read, refused = Storage.read, {names[2], names[1]}

    def reading(storage: Storage, path: str) -> bytes:
        if any(name in path for name in refused):
            raise PermissionError(13, "Permission denied")
        return read(storage, path)

    monkeypatch.setattr(Storage, "read", reading)
    newest = catalog.newest()
    assert newest is not None
    assert newest.name == names[0]
    assert dict.fromkeys(names[1:], "MANIFEST.json cannot be read: Permission denied") == catalog.damaged()
    refused.add(names[0])
    with pytest.raises(PermissionError):
        catalog.newest()
    with pytest.raises(PermissionError):
        catalog.damaged()


def test_a_directory_in_a_manifests_place_is_damage(tmp_path: Path) -> None:
    """It can be no outage, whether or not another snapshot is there."""
    catalog = Catalog(Storage(str(tmp_path)))
    path = tmp_path / catalog.folder(commit(catalog, 1)) / "MANIFEST.json"
    path.unlink()
    path.mkdir()
    assert ["MANIFEST.json is a directory"] == list(catalog.damaged().values())
    assert catalog.newest() is None


def test_a_snapshot_shows_that_its_generation_existed(catalog: Catalog) -> None:
    """Claims that are lost are made again with the next one: numbers continue, and writers of before are fenced off."""
    for generation in (1, 2, 3):
        assert generation == catalog.claim_generation({"host": "here"})
    commit(catalog, 5, generation=3)
    for generation in (2, 3):
        catalog.storage.remove(f"{catalog.prefix}generations/{generation:04d}.json")
    assert 3 == catalog.newest_generation()
    assert not catalog.is_fenced(2)
    assert 4 == catalog.claim_generation({"host": "here"})
    assert catalog.is_fenced(2)
    assert [1, 2, 3, 4] == list(catalog.generations())
    assert catalog.generations()[3]["lost"] is True
