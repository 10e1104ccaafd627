"""Finished files and folders get their names in one act."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from elasticflow.snapshots.tools import durable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(params=["as linux does", "as others do"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kernel's own call, and where there is none."""
    if request.param == "as others do":
        monkeypatch.setattr(durable, "_renameat2", lambda *_: False)


def make(path: Path, kind: str, text: str) -> Path:
    """Make a file, or a folder with a file in it."""
    if kind == "file":
        path.write_text(text)
    else:
        path.mkdir()
        (path / "inside").write_text(text)
    return path


def text_of(path: Path) -> str:
    """Return what `make` put there."""
    return (path / "inside" if path.is_dir() else path).read_text()


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_free_name_is_taken(tmp_path: Path, kind: str) -> None:
    """Nothing but the target is left."""
    durable.put(make(tmp_path / ".new", kind, "new"), tmp_path / "target", replaces=False)
    assert "new" == text_of(tmp_path / "target")
    assert ["target"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_taken_name_is_refused(tmp_path: Path, kind: str) -> None:
    """Also one that was taken a moment ago; both are as they were."""
    old, new = make(tmp_path / "target", kind, "old"), make(tmp_path / ".new", kind, "new")
    with pytest.raises(FileExistsError):
        durable.put(new, old, replaces=False)
    assert ("old", "new") == (text_of(old), text_of(new))


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("before", ["file", "folder"])
def test_old_and_new_change_places(tmp_path: Path, kind: str, before: str) -> None:
    """With leave to replace, the new one is there and the old one is gone."""
    make(tmp_path / "target", before, "old")
    durable.put(make(tmp_path / ".new", kind, "new"), tmp_path / "target", replaces=True)
    assert "new" == text_of(tmp_path / "target")
    assert ["target"] == [path.name for path in tmp_path.iterdir()]


def test_leave_to_replace_is_no_duty(tmp_path: Path) -> None:
    """Where nothing was, the new one is just put."""
    durable.put(make(tmp_path / ".new", "file", "new"), tmp_path / "target", replaces=True)
    assert "new" == text_of(tmp_path / "target")


def test_a_failure_is_told(tmp_path: Path) -> None:
    """The kernel's own reason, with the path."""
    with pytest.raises(OSError, match="gone/target") as caught:
        durable.put(make(tmp_path / ".new", "file", "new"), tmp_path / "gone" / "target", replaces=False)
    assert errno.ENOENT == caught.value.errno
