"""A cache as one object: packed, verified, replaced; nothing strange comes out of it."""

from __future__ import annotations

import io
import json
import zipfile
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.compiler_cache.transfer import BadArchiveError, CacheStore, pack, unpack
from elasticflow.storage.storage import Storage
from elasticflow.system.machine import MachineKind

if TYPE_CHECKING:
    from pathlib import Path

KIND = MachineKind("0123456789ab", {"torch": "2.13.0"})
FILES = {"ab/cab.main.so": b"\x7fELF", "fxgraph/cd/fcd/entry": b"pickled" * 100}


def _folder(path: Path, files: dict[str, bytes] = FILES) -> dict[str, int]:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return {name: len(content) for name, content in files.items()}


def _store(path: Path, kind: MachineKind = KIND) -> CacheStore:
    return CacheStore(Storage(str(path / "store")), "run-1/", kind)


def test_what_is_packed_comes_out_again(tmp_path: Path) -> None:
    """With its bytes and sizes, and the same archive from the same files."""
    sizes = _folder(tmp_path / "a")
    data = pack(tmp_path / "a", sizes)
    assert sizes == unpack(data, tmp_path / "b")
    assert FILES == {name: (tmp_path / "b" / name).read_bytes() for name in FILES}
    assert data == pack(tmp_path / "b", sizes)


@pytest.mark.parametrize("name", ["../evil.so", "/evil.so", "a/../../evil.so", "folder/"])
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, name: str) -> None:
    """An archive with such a name is refused as a whole."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("fine.so", b"1")
        file.writestr(zipfile.ZipInfo(name), b"2")
    with pytest.raises(BadArchiveError, match="it holds"):
        unpack(buffer.getvalue(), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(BadArchiveError, match="it is no archive"):
        unpack(b"no zip", tmp_path)


def test_a_cache_is_of_its_kind_of_machine_and_replaced_whole(tmp_path: Path) -> None:
    """Another kind finds none; of the older archive nothing stays."""
    store = _store(tmp_path)
    assert store.load() is None
    assert not store.has_one()
    store.save(b"first", {"a": 1})
    store.save(b"second", {"a": 1, "b": 2})
    found = store.load()
    assert found is not None
    assert (b"second", 2) == (found.data, found.files)
    assert _store(tmp_path, MachineKind("another", {})).load() is None
    folder = tmp_path / "store" / "run-1" / "compiler"
    names = sorted(path.name for path in folder.iterdir())
    assert ["0123456789ab-", "0123456789ab.json"] == [names[0][:13], names[1]]
    assert 2 == len(names)
    assert {"torch": "2.13.0"} == json.loads((folder / names[1]).read_text())["machine"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: next(folder.glob("*.zip")).write_bytes(b"other"), "its SHA-256 differs"),
        (lambda folder: next(folder.glob("*.zip")).unlink(), "is gone"),
        (lambda folder: (folder / "0123456789ab.json").write_text("{"), "0123456789ab.json"),
        (lambda folder: (folder / "0123456789ab.json").write_text('{"format": 2}'), "another version"),
        (
            lambda folder: (folder / "0123456789ab.json").write_text('{"format": 1, "archive": "../x"}'),
            "names no archive",
        ),
    ],
)
def test_a_damaged_cache_is_told_and_can_be_saved_anew(tmp_path: Path, damage: object, reason: str) -> None:
    """Nothing of it is handed out."""
    store = _store(tmp_path)
    store.save(b"data", {"a": 1})
    damage(tmp_path / "store" / "run-1" / "compiler")  # type: ignore[operator]
    with pytest.raises(BadArchiveError, match=reason):
        store.load()
    store.save(b"new", {"a": 1})
    found = store.load()
    assert found is not None
    assert b"new" == found.data
