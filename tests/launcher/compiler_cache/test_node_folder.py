"""A node's folder: which files are whole, and what a killed worker leaves."""

from __future__ import annotations

import fcntl
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.compiler_cache.node_folder import NodeFolder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    """Return a folder with a library, an entry of the cache, and what counts as neither."""
    found = NodeFolder(tmp_path / "n0")
    assert found.why_unusable() is None
    for name in ("ab/cab.so", "fxgraph/entry", "locks/cab.lock", "ab/.123.tmp", "triton/kernel.cubin"):
        (found.path / name).parent.mkdir(parents=True, exist_ok=True)
        (found.path / name).write_bytes(b"123")
    return found


def _names(folder: NodeFolder) -> list[str]:
    return sorted(folder.files())


def _sizes(folder: NodeFolder) -> dict[str, int]:
    return {name: state.size for name, state in folder.files().items()}


def test_files_are_those_of_the_cache(folder: NodeFolder) -> None:
    """Neither locks nor what is being written."""
    assert ["ab/cab.so", "fxgraph/entry", "triton/kernel.cubin"] == _names(folder)


def test_a_half_written_library_does_not_stay(folder: NodeFolder) -> None:
    """Of what is not sealed; what torch renames when it is whole stays."""
    folder.repair()
    assert ["fxgraph/entry", "triton/kernel.cubin"] == _names(folder)


def test_what_is_sealed_stays_as_long_as_it_is_whole(folder: NodeFolder) -> None:
    """A file of another size goes, and so does a library that came later."""
    folder.seal(_sizes(folder), is_stored=True)
    assert not folder.has_news()
    (folder.path / "fxgraph/entry").write_bytes(b"1")
    (folder.path / "ab/new.so").write_bytes(b"half")
    assert folder.has_news()
    folder.repair()
    assert ["ab/cab.so", "triton/kernel.cubin"] == _names(folder)


def test_an_empty_folder_is_not_sealed(folder: NodeFolder) -> None:
    """What it had may then be loaded again."""
    folder.seal(_sizes(folder), is_stored=True)
    for name in _names(folder):
        (folder.path / name).unlink()
    folder.repair()
    assert folder.sealed() is None


def test_what_is_not_stored_is_news(folder: NodeFolder) -> None:
    """A store that did not answer is asked again."""
    folder.seal(_sizes(folder), is_stored=False)
    assert folder.has_news()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"files": 3}'])
def test_a_damaged_seal_seals_nothing(folder: NodeFolder, text: str) -> None:
    """As if there were none."""
    folder.seal_path.write_text(text)
    assert folder.sealed() is None
    assert not folder.is_stored()
    assert folder.has_news()


def test_a_lock_that_is_held_says_that_a_compiler_writes(folder: NodeFolder) -> None:
    """As torch holds it; not one that was left behind."""
    assert not folder.is_being_written()
    with (folder.path / "locks/cab.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert folder.is_being_written()
    assert not folder.is_being_written()
    # As of a lock that `repair` removes at this moment.
    (folder.path / "locks/gone.lock").symlink_to("nowhere")
    assert not folder.is_being_written()


def test_a_folder_that_compilers_cannot_work_in_is_told(tmp_path: Path) -> None:
    """With the character, or with what the system says."""
    assert "with ' ' in its path" in (NodeFolder(tmp_path / "a b").why_unusable() or "")
    assert 'with "\'" in its path' in (NodeFolder(tmp_path / "it's").why_unusable() or "")
    (tmp_path / "file").touch()
    assert "cannot be made" in (NodeFolder(tmp_path / "file" / "n0").why_unusable() or "")
