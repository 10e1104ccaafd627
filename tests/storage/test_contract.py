"""What every store must do, each on a real server: see `Storage`."""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from tests.places import BETWEEN_PROCESSES, EVERYWHERE, LARGE_BODY, ON_SERVERS, SERVED, Place

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.filterwarnings(LARGE_BODY)

MIB = 1 << 20
everywhere = pytest.mark.parametrize("place", EVERYWHERE, indirect=True)
between_processes = pytest.mark.parametrize("place", BETWEEN_PROCESSES, indirect=True)
IN_ANOTHER_PROCESS = """
import json, sys
from elasticflow.storage.storage import Storage
uri, options, method, *arguments = json.loads(sys.stdin.readline())
storage = Storage(uri, options)
storage.exists("warm")
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(getattr(storage, method)(*(a.encode() if i else a for i, a in enumerate(arguments)))))
"""


class Other:
    """Another process that calls one method of a storage when told to."""

    def __init__(self, place: Place, method: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", IN_ANOTHER_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([place.uri, place.options, method, *arguments]) + "\n")
        self._process.stdin.flush()

    def ready(self) -> None:
        """Return when it has opened the store."""
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> None:
        """Let it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def result(self) -> object:
        """Return what the method returned."""
        told, _ = self._process.communicate(timeout=60)
        assert self._process.returncode == 0
        return json.loads(told)


@everywhere
def test_what_is_written_is_read_back(place: Place) -> None:
    """Bytes given in parts come back whole, by name, size and listing."""
    storage = place.storage()
    size = storage.write("a/b.bin", [b"one", memoryview(b"two"), b"", bytearray(b"three")])
    assert size == 11
    assert storage.read("a/b.bin") == b"onetwothree"
    assert storage.size("a/b.bin") == 11
    assert storage.list("a") == ["b.bin"]
    assert storage.exists("a/b.bin")
    assert storage.write("a/empty", []) == 0
    assert storage.read("a/empty") == b""
    assert storage.list("a") == ["b.bin", "empty"]


@everywhere
def test_ranges(place: Place) -> None:
    """A range gives its bytes, fewer where the file ends before, and nothing from the end on."""
    storage = place.storage()
    storage.write("x", [bytes(range(200))])
    assert storage.read_range("x", 10, 5) == bytes(range(10, 15))
    assert storage.read_range("x", 190, 50) == bytes(range(190, 200))
    assert storage.read_range("x", 200, 10) == b""
    with pytest.raises(FileNotFoundError):
        storage.read_range("absent", 0, 10)


@everywhere
def test_open_file_reads_on_and_jumps(place: Place) -> None:
    """An open file reads small and large pieces in order, and from wherever it is sent."""
    storage = place.storage()
    content = os.urandom(2 * MIB)
    storage.write("x", [content])
    with storage.open_read("x") as file:
        assert file.read(4) == content[:4]
        target = bytearray(MIB)
        assert file.readinto(target) == MIB  # type: ignore[attr-defined]
        assert bytes(target) == content[4 : 4 + MIB]
        file.seek(-10, io.SEEK_END)
        assert file.read() == content[-10:]
        assert file.read(1) == b""
        file.seek(7)
        assert file.read(3) == content[7:10]
    with pytest.raises(FileNotFoundError):
        storage.open_read("absent")


@everywhere
def test_absent_things_are_empty_not_errors(place: Place) -> None:
    """Listing or removing what is not there is no error; reading it is FileNotFoundError."""
    storage = place.storage()
    assert storage.list() == []
    assert storage.list("no/where") == []
    assert not storage.exists("no")
    storage.remove("no")
    storage.remove_tree("no")
    with pytest.raises(FileNotFoundError):
        storage.read("no")
    with pytest.raises(FileNotFoundError):
        storage.size("no")


@everywhere
@pytest.mark.parametrize("size", [1000, 45 * MIB], ids=["small", "large"])
def test_failed_write_leaves_nothing(place: Place, size: int) -> None:
    """An error in the middle of a write, small or after parts were sent, leaves neither the file nor a part of it."""
    storage = place.storage()

    def parts() -> Iterator[bytes]:
        for _ in range(0, size, 5 * MIB):
            yield b"x" * min(size, 5 * MIB)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        storage.write("a/b", parts())
    assert not storage.exists("a/b")
    assert storage.list("a") == []


@everywhere
def test_failed_write_keeps_the_old_file(place: Place) -> None:
    """Replacing a file either succeeds or leaves the old one."""
    storage = place.storage()
    storage.write("a", [b"old"])

    def parts() -> Iterator[bytes]:
        yield b"new" * (3 * MIB)
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        storage.write("a", parts())
    assert storage.read("a") == b"old"
    assert storage.list() == ["a"]


@everywhere
def test_large_file(place: Place) -> None:
    """Twenty MB in uneven parts, given by a function, come back bit for bit, whole and in pieces."""
    storage = place.storage()
    content = os.urandom(20_000_001)
    cuts = (0, 3, 9_000_000, 18_500_000, len(content))
    parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(cuts)]
    assert storage.write("big", lambda: iter(parts)) == len(content)
    assert storage.size("big") == len(content)
    assert storage.read("big") == content
    read = [storage.read_range("big", start, 7_000_000) for start in range(0, len(content), 7_000_000)]
    assert b"".join(read) == content


@everywhere
def test_create_is_exclusive(place: Place) -> None:
    """The second creator is told so and changes nothing."""
    storage = place.storage()
    assert storage.create("g/0001.json", b"first")
    assert not storage.create("g/0001.json", b"second")
    assert storage.read("g/0001.json") == b"first"
    assert storage.list("g") == ["0001.json"]


@pytest.mark.usefixtures("real_processes")
@between_processes
def test_one_of_two_processes_creates(place: Place) -> None:
    """Of two processes at once exactly one makes the file, and it holds that one's bytes."""
    names = ("ann", "bob")
    others = [Other(place, "create", "g/one", name) for name in names]
    for other in others:
        other.ready()
    for other in others:
        other.go()
    made = [name for name, other in zip(names, others, strict=True) if other.result()]
    assert len(made) == 1
    assert place.storage().read("g/one") == made[0].encode()
    assert place.storage().list("g") == ["one"]


@pytest.mark.usefixtures("real_processes")
@between_processes
def test_what_another_process_wrote_is_seen_at_once(place: Place) -> None:
    """A storage that has looked and found nothing sees a file the moment another process has written it."""
    storage = place.storage()
    storage.write("g/mine", [b"1"])
    assert not storage.exists("g/one")
    assert storage.list("g") == ["mine"]
    other = Other(place, "create", "g/one", "other")
    other.ready()
    other.go()
    assert other.result() is True
    assert storage.exists("g/one")
    assert storage.list("g") == ["mine", "one"]
    assert storage.size("g/one") == 5
    storage.write("g/one", [b"longer than before"])
    assert storage.size("g/one") == 18


@everywhere
def test_a_file_can_be_replaced(place: Place) -> None:
    """By a longer one, and by a shorter one."""
    storage = place.storage()
    storage.write("s/state.json", [b"1"])
    storage.write("s/state.json", [b"22"])
    assert storage.read("s/state.json") == b"22"
    storage.write("s/state.json", [b"3"])
    assert storage.read("s/state.json") == b"3"


@everywhere
def test_remove_tree(place: Place) -> None:
    """A folder goes with all in it; neighbours stay, also those whose names begin with its own."""
    storage = place.storage()
    for path in ("a/b/c", "a/b/d/e", "a/bc", "a/f"):
        storage.write(path, [b"1"])
    storage.remove_tree("a/b")
    assert storage.list("a") == ["bc", "f"]
    storage.remove("a/f")
    assert not storage.exists("a/f")
    assert storage.list("a") == ["bc"]


@everywhere
def test_check_writable_leaves_nothing(place: Place) -> None:
    """A good URI passes, and the probe is gone."""
    place.storage().check_writable()
    assert place.storage().list() == []


@everywhere
def test_threads_share_a_storage(place: Place) -> None:
    """Eight threads write and read at once through one storage; each gets its own bytes back."""
    storage, wrong = place.storage(), []

    def work(number: int) -> None:
        content = bytes([number]) * 300_000
        storage.write(f"t/{number}", [content])
        if storage.read_range(f"t/{number}", 100_000, 300_000) != content[100_000:]:
            wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert storage.list("t") == [str(n) for n in range(8)]


@pytest.mark.usefixtures("real_processes")
@pytest.mark.parametrize("place", ON_SERVERS, indirect=True)
def test_storage_goes_on_in_a_forked_process(place: Place) -> None:
    """A child forked from a process that has used the store uses it too, and the parent's still works."""
    storage = place.storage()
    storage.write("parent", [b"1"])
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            storage.write("child", [storage.read("parent") + b"2"])
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert storage.read("child") == b"12"


def test_all_kinds_are_tested() -> None:
    """The kinds that a server is run for are those that the documentation names."""
    assert SERVED == ("s3", "gs", "az", "abfs", "sftp")


@everywhere
def test_time_of_writing_is_now(place: Place) -> None:
    """Every server tells its own time, which is near ours here; memory need not know."""
    storage = place.storage()
    storage.write("a", (b"x",))
    told = storage.modified("a")
    assert told is None or abs(told - time.time()) < 60
    assert told is not None or place.uri.startswith("memory:")
