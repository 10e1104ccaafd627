"""Snapshots that a web server offers: read, never written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from elasticflow.errors import StorageError
from elasticflow.storage.retry import Patience
from elasticflow.storage.storage import Storage, Trouble
from tests.servers import QuietHandler, RangeHandler, web

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

QUICK = Patience(total_s=5.0, first_s=0.01)


@pytest.fixture(params=[RangeHandler, QuietHandler], ids=["ranges", "no-ranges"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """Serve a folder with a file and a folder in it."""
    (tmp_path / "a" / "sub").mkdir(parents=True)
    (tmp_path / "a" / "x.bin").write_bytes(bytes(range(200)))
    (tmp_path / "a" / "sub" / "y").write_bytes(b"y")
    with web(tmp_path, request.param) as url:
        yield Storage(f"{url}/a")


def test_files_are_read_and_listed(served: Storage) -> None:
    """Content, size, ranges, streams and names are as on any store, whether the server knows ranges or not."""
    assert served.list() == ["sub", "x.bin"]
    assert served.list("sub") == ["y"]
    assert served.list("absent") == []
    assert served.read("x.bin") == bytes(range(200))
    assert served.size("x.bin") == 200
    assert served.exists("x.bin")
    assert not served.exists("absent")
    assert served.read_range("x.bin", 10, 5) == bytes(range(10, 15))
    assert served.read_range("x.bin", 190, 50) == bytes(range(190, 200))
    with served.open_read("x.bin") as file:
        assert file.read(3) == b"\x00\x01\x02"
        assert file.read(500) == bytes(range(3, 200))
        assert file.read(1) == b""
    with pytest.raises(FileNotFoundError):
        served.read("absent")
    with pytest.raises(FileNotFoundError):
        served.open_read("absent")


def test_new_files_are_seen_at_once(served: Storage, tmp_path: Path) -> None:
    """Nothing is kept from an earlier look."""
    assert served.list("sub") == ["y"]
    assert not served.exists("sub/z")
    (tmp_path / "a" / "sub" / "z").write_bytes(b"zz")
    assert served.list("sub") == ["y", "z"]
    assert served.size("sub/z") == 2


def test_large_file_in_pieces(tmp_path: Path) -> None:
    """Twenty MB come back bit for bit, by a stream and by ranges."""
    content = os.urandom(20_000_001)
    (tmp_path / "big").write_bytes(content)
    with web(tmp_path) as url:
        storage = Storage(url)
        with storage.open_read("big") as file:
            assert file.read() == content
        pieces = [storage.read_range("big", start, 7_000_000) for start in range(0, len(content), 7_000_000)]
    assert b"".join(pieces) == content


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("write", ("x", [b"1"])),
        ("create", ("x", b"1")),
        ("remove", ("x.bin",)),
        ("remove_tree", ("sub",)),
        ("check_writable", ()),
    ],
)
def test_writing_is_refused(served: Storage, method: str, arguments: tuple[Any, ...]) -> None:
    """Every write is an error that names the URL and says that it can only be read."""
    with pytest.raises(StorageError) as caught:
        getattr(served, method)(*arguments)
    assert caught.value.message == f"{served.uri} is read-only"
    assert caught.value.remedy == "write to another place and serve that: http only reads"
    assert served.list() == ["sub", "x.bin"]


class OutOfOrder(RangeHandler):
    """Answers 503 as often as it is told to, then as usual."""

    left: ClassVar[list[int]] = []

    def do_GET(self) -> None:  # noqa: N802  # http.server's name
        """Fail, or send the file."""
        if self.left:
            self.send_error(self.left.pop())
        else:
            super().do_GET()

    def do_HEAD(self) -> None:  # noqa: N802  # http.server's name
        """Fail, or send its size."""
        if self.left:
            self.send_error(self.left.pop())
        else:
            super().do_HEAD()


def test_server_errors_pass_and_are_never_absence(tmp_path: Path) -> None:
    """A server that fails for a while is asked again; one that continues failing is an error, not an absent file."""
    (tmp_path / "x").write_bytes(b"content")
    told: list[Trouble] = []
    with web(tmp_path, OutOfOrder) as url:
        storage = Storage(url, patience=QUICK, on_trouble=told.append)
        OutOfOrder.left[:] = [503] * 3
        assert storage.exists("x")
        OutOfOrder.left[:] = [500] * 3
        assert storage.read("x") == b"content"
        assert ["look for x", "read x"] == list(dict.fromkeys(each.operation for each in told))
        assert [1, 3] == [told[0].attempt, told[-1].attempt]
        OutOfOrder.left[:] = [503] * 10_000
        with pytest.raises(OSError, match="503"):
            Storage(url, patience=Patience(total_s=0.1, first_s=0.02)).exists("x")
        OutOfOrder.left[:] = [403] * 2
        with pytest.raises(PermissionError):
            storage.size("x")
        OutOfOrder.left.clear()


def test_password_opens_and_is_never_told(tmp_path: Path) -> None:
    """User and password of the URL are sent; neither the storage nor its errors show the password."""
    given: list[str | None] = []

    class Guarded(RangeHandler):
        def do_GET(self) -> None:  # noqa: N802  # http.server's name
            given.append(self.headers.get("Authorization"))
            super().do_GET()

    (tmp_path / "x").write_bytes(b"content")
    with web(tmp_path, Guarded) as url:
        storage = Storage(url.replace("://", "://me:swordfish@"))
        assert storage.read("x") == b"content"
        assert given[0] is not None
        assert given[0].startswith("Basic ")
        assert "swordfish" not in storage.uri
        with pytest.raises(FileNotFoundError) as caught:
            storage.read("absent")
    assert "swordfish" not in str(caught.value)
