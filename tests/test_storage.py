from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import durable
from elasticflow.errors import StorageError
from elasticflow.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(params=["local", "file-url", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """Return an empty storage of each kind that needs no server."""
    uris = {
        "local": str(tmp_path / "store"),
        "file-url": f"file://{tmp_path}/store",
        "memory": f"memory://{tmp_path.name}-{os.getpid()}/store",
    }
    return Storage(uris[request.param])


def test_what_is_written_is_read_back(storage: Storage) -> None:
    """Bytes given in parts come back whole, by name, size and listing."""
    size = storage.write("a/b.bin", [b"one", memoryview(b"two"), b"", bytearray(b"three")])
    assert size == 11
    assert storage.read("a/b.bin") == b"onetwothree"
    with storage.open_read("a/b.bin") as file:
        assert file.read(4) == b"onet"
    assert storage.size("a/b.bin") == 11
    assert storage.list("a") == ["b.bin"]
    assert storage.exists("a/b.bin")


def test_absent_things_are_empty_not_errors(storage: Storage) -> None:
    """Listing or removing what is not there is no error; reading it is FileNotFoundError."""
    assert storage.list() == []
    assert storage.list("no/where") == []
    assert not storage.exists("no")
    storage.remove("no")
    storage.remove_tree("no")
    with pytest.raises(FileNotFoundError):
        storage.read("no")


def test_failed_write_leaves_nothing(storage: Storage) -> None:
    """An error in the middle of a write leaves neither the file nor a part of it."""

    def parts() -> Iterator[bytes]:
        yield b"x" * 1000
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        storage.write("a/b", parts())
    assert not storage.exists("a/b")
    assert storage.list("a") == []


def test_failed_write_keeps_the_old_file_on_local_disks(tmp_path: Path) -> None:
    """Replacing a file either succeeds or leaves the old one."""
    storage = Storage(str(tmp_path))
    storage.write("a", [b"old"])

    def parts() -> Iterator[bytes]:
        yield b"new"
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        storage.write("a", parts())
    assert storage.read("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_create_is_exclusive(storage: Storage) -> None:
    """The second creator is told so and changes nothing."""
    assert storage.create("g/0001.json", b"first")
    assert not storage.create("g/0001.json", b"second")
    assert storage.read("g/0001.json") == b"first"


def test_one_of_many_creators_wins(tmp_path: Path) -> None:
    """Of eight creators at once exactly one makes the file, and it holds that one's bytes."""
    storage = Storage(str(tmp_path))
    start, won = threading.Barrier(8), []

    def create(number: int) -> None:
        start.wait()
        if storage.create("one", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=create, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert storage.read("one") == str(won[0]).encode()
    assert storage.list() == ["one"]


def test_create_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that knows no links still gives the file to one creator only."""

    def no_links(*args: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    storage = Storage(str(tmp_path))
    assert storage.create("one", b"first")
    assert not storage.create("one", b"second")
    assert storage.read("one") == b"first"
    assert storage.list() == ["one"]


def test_replace_text(storage: Storage) -> None:
    """A small file can be replaced."""
    storage.replace_text("s/state.json", b"1")
    storage.replace_text("s/state.json", b"22")
    assert storage.read("s/state.json") == b"22"


def test_remove_tree(storage: Storage) -> None:
    """A folder goes with all in it, its neighbour stays."""
    storage.write("a/b/c", [b"1"])
    storage.write("a/d", [b"2"])
    storage.remove_tree("a/b")
    assert storage.list("a") == ["d"]
    storage.remove("a/d")
    assert not storage.exists("a/d")


def test_check_writable_leaves_nothing(storage: Storage) -> None:
    """A good URI passes, and the probe is gone."""
    storage.check_writable()
    assert storage.list() == []


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    """The error names key, URI and cause, and says what to do."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(StorageError) as caught:
        Storage(f"{blocked}/sub").check_writable()
    assert f'snapshots.uri "{blocked}/sub" cannot be written: NotADirectoryError' in caught.value.message
    expected = "check that the folder exists and may be written, or set snapshots.uri to another place"
    assert caught.value.remedy == expected


def test_unknown_protocol_is_named() -> None:
    """A URL that fsspec does not know is refused with its name."""
    with pytest.raises(
        StorageError, match=r'snapshots.uri "nosuch://x" cannot be opened: .*Protocol not known: nosuch'
    ):
        Storage("nosuch://x").check_writable()


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing protocol package is told with what to install."""
    import fsspec.core

    def no_package(*args: Any, **kwargs: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", no_package)
    with pytest.raises(StorageError) as caught:
        Storage("s3://bucket/x").check_writable()
    assert (
        caught.value.message
        == 'snapshots.uri "s3://bucket/x" cannot be opened: ImportError: Install s3fs to access S3'
    )
    assert caught.value.remedy == 'pip install "elasticflow[s3]"'


def test_secrets_never_reach_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords in URLs and secret options are masked, also inside other people's error texts."""
    import fsspec.core

    def leaks(uri: str, **kwargs: Any) -> None:
        raise ValueError(f"cannot open {uri} with {kwargs}")

    monkeypatch.setattr(fsspec.core, "url_to_fs", leaks)
    options = {
        "key": "AKIA1234",
        "client_kwargs": {"aws_secret_access_key": "hunter22"},
        "endpoint_url": "http://x",
    }
    with pytest.raises(StorageError) as caught:
        Storage("s3://user:swordfish@bucket/x", options).check_writable()
    text = str(caught.value)
    assert not [secret for secret in ("AKIA1234", "hunter22", "swordfish") if secret in text]
    assert "http://x" in text


def test_odd_errors_become_os_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a back-end raises outside of OSError arrives as one."""
    storage = Storage("memory://odd")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no credentials")

    monkeypatch.setattr(storage._opened(), "read", fail)
    with pytest.raises(OSError, match="RuntimeError: no credentials"):
        storage.read("x")


def test_local_storage_never_loads_fsspec(tmp_path: Path, real_processes: None) -> None:
    """A process that writes to a local folder starts without fsspec."""
    import subprocess
    import sys

    code = f"import sys; from elasticflow.storage import Storage; Storage({str(tmp_path)!r}).check_writable(); assert 'fsspec' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_file_system_is_made_again_after_a_fork() -> None:
    """A child process gets a file system of its own."""
    storage = Storage("memory://forked")
    mine = storage._opened()
    storage._pid = -1  # as seen from a child
    assert storage._opened() is not mine


def test_remote_has_no_local_path() -> None:
    """Asking a remote URI for a local path is an error of ours."""
    with pytest.raises(ValueError, match="not a local folder"):
        Storage("memory://x").local_path()


def test_short_writes_are_continued(tmp_path: Path) -> None:
    """Parts of any length, also none, add up."""
    assert durable.write(tmp_path / "x", [b"", b"a" * (9 << 20), b"b"]) == (9 << 20) + 1
    assert (tmp_path / "x").stat().st_size == (9 << 20) + 1


def test_outage_is_not_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer whether a file is there raises, also where fsspec itself would say no."""
    storage = Storage("memory://silent")
    assert not storage.exists("x")
    storage.write("x", [b"1"])
    assert storage.exists("x")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(storage._opened(), "exists", fail)
    with pytest.raises(ConnectionError, match="connection reset"):
        storage.exists("x")
