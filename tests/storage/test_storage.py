from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.errors import INTERRUPTED, StorageError, StorageFullError
from elasticflow.storage import urls
from elasticflow.storage.objects import ObjectStore
from elasticflow.storage.retry import Patience
from elasticflow.storage.storage import Storage, Trouble
from elasticflow.system import atomic_files

if TYPE_CHECKING:
    from collections.abc import Iterator


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


def test_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system asks again then, and finds what it has made."""
    link = os.link

    def asked_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", asked_twice)
    storage = Storage(str(tmp_path))
    assert storage.create("one", b"first")
    assert not storage.create("one", b"first")
    assert storage.list() == ["one"]


def test_a_file_that_was_there_for_a_moment_was_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner has removed it by the time that we look."""

    def was_there(*_: Path) -> None:
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", was_there)
    storage = Storage(str(tmp_path))
    assert not storage.create("one", b"first")
    assert storage.list() == []


def test_unwritable_folder_is_named(tmp_path: Path) -> None:
    """The error names key, URI and cause, and says what to do."""
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(StorageError) as caught:
        Storage(f"{blocked}/sub").check_writable()
    assert f'snapshots.uri "{blocked}/sub" cannot be written: NotADirectoryError' in caught.value.message
    expected = (
        "check that the folder exists and may be written, or choose another place: snapshots.uri of a job file, "
        "join(snapshots=...) of a script"
    )
    assert caught.value.remedy == expected


def test_full_folder_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler starts the same command again, which continues once there is room."""

    def create(*_: object) -> bool:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(atomic_files, "create", create)
    with pytest.raises(StorageFullError, match="is full: No space left on device") as caught:
        Storage(str(tmp_path)).check_writable()
    assert INTERRUPTED == caught.value.exit_code


def test_a_store_that_makes_a_file_twice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generations are claimed by making a file: two launches would get the same one."""
    storage = Storage("memory://careless")
    store = storage._opened()
    monkeypatch.setattr(store, "create", lambda path, data: store.write(path, (data,)))
    with pytest.raises(
        StorageError, match=r'snapshots.uri "memory://careless" replaces a file where it is asked'
    ):
        storage.check_writable()
    assert storage.list() == []


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

    code = f"import sys; from elasticflow.storage.storage import Storage; Storage({str(tmp_path)!r}).check_writable(); assert 'fsspec' not in sys.modules"
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
    assert atomic_files.write(tmp_path / "x", [b"", b"a" * (9 << 20), b"b"]) == (9 << 20) + 1
    assert (tmp_path / "x").stat().st_size == (9 << 20) + 1


def test_outage_is_not_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that does not answer whether a file is there raises, also where fsspec itself would say no."""
    storage = Storage("memory://silent", patience=Patience(total_s=0))
    assert not storage.exists("x")
    storage.write("x", [b"1"])
    assert storage.exists("x")

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("connection reset")

    monkeypatch.setattr(storage._opened(), "exists", fail)
    with pytest.raises(ConnectionError, match="connection reset"):
        storage.exists("x")


class Flaky:
    """Parts of one file, given anew each time; the first *failures* times they end in a reset."""

    def __init__(self, failures: int) -> None:
        self.left = failures
        self.given = 0

    def __call__(self) -> Iterator[bytes]:
        """Give them."""
        self.given += 1
        yield b"abc"
        if self.left:
            self.left -= 1
            raise ConnectionResetError("connection reset by peer")


def test_what_passes_is_tried_again_and_told() -> None:
    """A write that is reset twice succeeds with whole content; who asked hears of each try, without secrets."""
    told: list[Trouble] = []
    options, patience = {"secret": "hunter22"}, Patience(first_s=0.001)
    storage = Storage("memory://flaky-write", options, patience=patience, on_trouble=told.append)
    storage._store = urls.open_store("memory://flaky-write", {}, "shown")
    parts = Flaky(2)
    assert storage.write("x", parts) == 3
    assert parts.given == 3
    assert storage.read("x") == b"abc"
    said = ("write x", "ConnectionResetError", "ConnectionResetError: connection reset by peer")
    assert [(*said, 1), (*said, 2)] == [(t.operation, t.kind, t.error, t.attempt) for t in told]


def test_iterators_are_not_tried_again() -> None:
    """Parts that can be gone through once only are never written a second time, half."""
    storage = Storage("memory://flaky-iterator", patience=Patience(first_s=0.001))
    parts = Flaky(1)
    with pytest.raises(ConnectionResetError):
        storage.write("x", parts())
    assert not storage.exists("x")


def test_lost_answer_of_a_create(monkeypatch: pytest.MonkeyPatch) -> None:
    """A create whose answer was lost is ours if the bytes are; another's bytes are another's."""
    storage = Storage("memory://lost-answer", patience=Patience(first_s=0.001))
    store = storage._opened()
    create, calls = store.create, []

    def lose_the_first_answer(path: str, data: bytes) -> None:
        calls.append(path)
        create(path, data)
        if len(calls) == 1:
            raise ConnectionResetError("connection reset by peer")

    monkeypatch.setattr(store, "create", lose_the_first_answer)
    assert storage.create("g/1", b"mine")
    assert calls == ["g/1", "g/1"]
    assert not storage.create("g/1", b"another's")


class Conditional:
    """A file system whose first exclusive puts are answered with *answers*, as s3fs passes them on."""

    def __init__(self, *answers: tuple[str, int]) -> None:
        self.answers = list(answers)

    def pipe_file(self, key: str, data: bytes, mode: str) -> None:
        """Answer."""
        from botocore.exceptions import ClientError
        from s3fs.errors import translate_boto_error

        if self.answers:
            code, status = self.answers.pop(0)
            told = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
            raise translate_boto_error(ClientError(told, "PutObject"))

    def cat_file(self, key: str) -> bytes:
        """Return another's bytes."""
        return b"another's"


def test_create_where_the_server_does_not_tell_the_condition() -> None:
    """MinIO answers an exclusive put on a taken key without the element by which s3fs knows it: it is taken all the same."""
    storage = Storage("memory://minio")
    storage._store = ObjectStore(Conditional(("PreconditionFailed", 412)), "minio")
    assert not storage.create("g/1", b"mine")


def test_create_in_conflict_is_tried_again() -> None:
    """S3 answers so while another put, or a removal, of the same key is under way."""
    storage = Storage("memory://conflict", patience=Patience(first_s=0.001))
    storage._store = ObjectStore(Conditional(*[("ConditionalRequestConflict", 409)] * 2), "conflict")
    assert storage.create("g/1", b"mine")


def test_unreadable_local_path_is_not_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.14 on `Path.exists` takes every error for absence; a sweep would remove a committed snapshot."""
    monkeypatch.setattr(Path, "exists", os.path.exists)
    with pytest.raises(OSError, match="File name too long"):
        Storage(str(tmp_path)).exists("x" * 300)


def test_local_failures_are_told_at_once(tmp_path: Path) -> None:
    """On a local disk nothing is tried again: what fails there does not pass."""
    parts = Flaky(1)
    with pytest.raises(ConnectionResetError):
        Storage(str(tmp_path), patience=Patience(first_s=0.001)).write("x", parts)
    assert parts.given == 1


def test_secrets_in_the_cause_of_an_error_are_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback shows no secret either: an error that came from one which tells it is replaced."""
    storage = Storage("memory://cause", {"account_key": "hunter22"})

    def fail(*_: object) -> None:
        raise FileNotFoundError("nothing there") from ValueError("signed with hunter22")

    monkeypatch.setattr(storage._opened(), "read", fail)
    with pytest.raises(FileNotFoundError, match="nothing there") as caught:
        storage.read("x")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
