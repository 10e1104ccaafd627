"""A snapshot is verified once per node, read by its ranks, and given up when the last of them is done."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.client import messages
from elasticflow.snapshots.client.channel import Channel
from elasticflow.snapshots.client.loading import NodeLoader
from elasticflow.snapshots.client.messages import Hello, Load
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.format.manifest import DamagedSnapshotError
from elasticflow.snapshots.read import load
from elasticflow.snapshots.read.stream import VerifiedStream
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer import load_service
from elasticflow.snapshots.writer.connected_rank import ConnectedRank
from elasticflow.snapshots.writer.load_service import LoadService
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.snapshots.client.writer_process import WriterProcess
    from elasticflow.snapshots.read.load import LoadedSnapshot

SIZE = 9 << 20  # two blocks for each rank
HARMED = (8 << 20) + 17
SHARD = "shard-00000-of-00002.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a writer that is gone, with a snapshot of two ranks."""
    bench = Bench(str(tmp_path_factory.mktemp("written")))
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for rank, client in enumerate(clients):
        bench.share(client, 1, rank=rank, size=SIZE)
    for client in clients:
        client.flush(100)
    bench.close()
    return Path(bench.uri)


@pytest.fixture
def committed(bench: Bench, written: Path) -> str:
    """A snapshot of two ranks, copied into the test's own store."""
    shutil.copytree(written, bench.uri, dirs_exist_ok=True)
    return Bench.name_of(1)


def loader(bench: Bench, writer: WriterProcess, rank: int = 0, generation: int = 2) -> NodeLoader:
    """Return a rank's loader, of a group of two."""
    return NodeLoader(bench.connect(writer, rank, 2, generation=generation), lambda: None)


OPEN_BEFORE: set[tuple[str, int, str]] = set()


@pytest.fixture(scope="module", autouse=True)
def _little_to_collect() -> None:
    """Have the collector leave out what tests of other modules left: it runs before each test of this one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_held_before() -> None:
    """Note what earlier tests of this process have left open.

    A thread that such a test began may close its file in the middle of this one, and its number is then another file's. So
    may the inode be, once the file is removed; the names of two tests' files differ.
    """
    gc.collect()
    OPEN_BEFORE.clear()
    OPEN_BEFORE.update((link.name, file, name) for link, file, name in opened("self"))


def opened(pid: int | str) -> Iterator[tuple[Path, int, str]]:
    """Yield each descriptor of a process, with its file's inode and name."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            yield link, link.stat().st_ino, str(link.readlink())


def held(pid: int | str, committed: str) -> list[str]:
    """What a process has open of a snapshot; what this one held before the test does not count."""
    left = OPEN_BEFORE if pid == "self" else set()
    names = [name for link, file, name in opened(pid) if (link.name, file, name) not in left]
    return [name for name in names if f"/{committed}/" in name or "elasticflow-loading" in name]


def comes_true(condition: Callable[[], bool]) -> bool:
    """Wait for something that another process is about to do."""
    deadline = time.monotonic() + 60
    while not (is_true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_true  # not asked again: what came true may pass


def check(loaded: LoadedSnapshot) -> None:
    """Compare every tensor with what was staged."""
    assert {"position": {"step": 1}, "state": {}} == loaded.state
    for rank in range(2):
        content, half = Bench.content(1, rank, SIZE), SIZE // 2
        for key, expected in ((f"a{rank}", content[:half]), (f"b{rank}", content[half:])):
            data = bytearray(loaded.manifest.tensors[key].nbytes)
            loaded.read_into(key, memoryview(data))
            assert expected == data


class NodeOfOne:
    """The writer's side of loading, for one rank, in this process: a store in memory is no other process' to read."""

    def __init__(self, uri: str) -> None:
        ours, theirs = socket.socketpair()
        self.link = StagingClient(Channel(ours, messages.TO_WRITER, messages.TO_WORKER))
        self._rank = ConnectedRank(
            Channel(theirs, messages.TO_WORKER, messages.TO_WRITER), Hello(0, 0, 1, 1, 1)
        )
        self._loader = LoadService(Catalog(Storage(uri)))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while (message := self._rank.channel.receive()) is not None:
            if isinstance(message, Load):
                self._loader.load(self._rank, message.name, is_whole=message.is_whole)
            else:
                self._loader.leave(self._rank)
        self._rank.channel.close()


@pytest.fixture
def remote(bench: Bench, committed: str) -> str:
    """The URI of the same snapshot in a store that is no disk."""
    storage = Storage(f"memory://{bench.uri.strip('/').replace('/', '-')}")
    folder = Path(bench.uri) / "snapshots" / committed
    for path in folder.iterdir():
        storage.write(f"snapshots/{committed}/{path.name}", [path.read_bytes()])
    return storage.absolute_uri


def test_ranks_read_the_files_that_were_verified(bench: Bench, committed: str) -> None:
    """On a local disk nothing is copied: writer and ranks hold the files themselves, until the last rank is done."""
    writer = bench.writer()
    loaders = [loader(bench, writer, rank) for rank in range(2)]
    loaded = [each.load(committed) for each in loaders]
    for each in loaded:
        check(each)
    names = ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors", "state.json"]
    assert names == sorted(Path(target).name for target in held(writer.process.pid, committed))
    assert 6 == len(held("self", committed))
    loaders[0].release()
    assert 3 == len(held("self", committed))
    loaders[1].release()
    assert [] == held("self", committed)
    assert comes_true(lambda: not held(writer.process.pid, committed))


def test_elsewhere_one_copy_in_memory_is_read(remote: str, committed: str) -> None:
    """What is not on a disk of this machine's own is read once, into a file in memory, which goes with the last rank."""
    node = NodeOfOne(remote)
    ours = NodeLoader(node.link, lambda: None)
    loaded = ours.load(committed)
    check(loaded)
    assert 2 == len(held("self", committed))  # the writer's side and the rank's are one process here
    ours.release()
    assert comes_true(lambda: not held("self", committed))
    node.link.close()


def flip(path: Path) -> None:
    """Change one byte in place."""
    with path.open("r+b") as file:
        file.seek(HARMED)
        good = file.read(1)
        file.seek(HARMED)
        file.write(bytes([good[0] ^ 1]))


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, HARMED),
    "emptied": lambda path: os.truncate(path, 0),
    "byte flipped": flip,
    "another in its place": lambda path: path.with_name("new").rename(path),
    "removed": Path.unlink,
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_after_verification_is_noticed(bench: Bench, committed: str, change: str) -> None:
    """A file cut while it is held is an error that names it, not the end of the process; no bytes pass for verified."""
    loaded = load.load(bench.catalog, committed)
    path = Path(bench.uri) / "snapshots" / committed / SHARD
    path.with_name("new").write_bytes(path.read_bytes())
    CHANGES[change](path)
    target = memoryview(bytearray(loaded.manifest.tensors["b0"].nbytes))
    told = rf"^{committed}/{SHARD} changed while it was loaded; the next start verifies it again$"
    with pytest.raises(SnapshotError, match=told) as caught:
        loaded.read_into("b0", target)
    assert not isinstance(caught.value, DamagedSnapshotError)
    loaded.read_into("b1", target)  # the other file is as it was
    loaded.files.close()


def test_change_during_verification_is_noticed(
    bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was replaced between being opened and being verified is not what was verified."""
    path = Path(bench.uri) / "snapshots" / committed / SHARD
    real = VerifiedStream.read

    def read(stream: VerifiedStream) -> dict[str, str]:
        path.with_name("new").write_bytes(path.read_bytes())
        path.with_name("new").rename(path)
        return real(stream)

    monkeypatch.setattr(VerifiedStream, "read", read)
    with pytest.raises(SnapshotError, match="changed while it was loaded"):
        load.load(bench.catalog, committed)
    assert [] == held("self", committed)


def test_many_files_or_others_disks_are_copied(
    bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More files than a process may well hold open, or a kind of file system that other machines write, too."""
    for name, value in (("MOST", 2), ("_OWN_KINDS", frozenset({"nfs4"}))):
        with monkeypatch.context() as other:
            other.setattr(load, name, value)
            loaded = load.load(bench.catalog, committed)
        assert 1 == len(held("self", committed)), name
        check(loaded)
        loaded.files.close()


def test_damage_is_told_to_every_rank(bench: Bench, committed: str) -> None:
    """File and block are named; nothing stays in memory; a rank that asks later hears the same without a second read."""
    path = bench.catalog.storage.local_path(f"snapshots/{committed}/{SHARD}")
    flip(path)
    writer = bench.writer()
    loaders = [loader(bench, writer, rank) for rank in range(2)]
    told = rf"^{SHARD}: block 1 \(from byte 8388608\) is not what was written$"
    with pytest.raises(DamagedSnapshotError, match=told):
        loaders[0].load(committed)
    flip(path)  # whoever read it again would find it good
    with pytest.raises(DamagedSnapshotError, match=told):
        loaders[1].load(committed)
    assert [] == held(writer.process.pid, committed)
    check(loaders[0].load(committed))


def test_an_outage_is_no_damage(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses to be read, or shows no manifest, says nothing about the snapshot."""
    monkeypatch.setenv(fault_injection.VARIABLE, "restore.mid_load=raise:EACCES@3")
    node = loader(bench, bench.writer())
    with pytest.raises(
        SnapshotError, match=r"cannot be read: PermissionError: .*Permission denied"
    ) as caught:
        node.load(committed)
    assert not isinstance(caught.value, DamagedSnapshotError)
    with pytest.raises(SnapshotError, match=r"has no MANIFEST\.json as this node sees it") as caught:
        node.load(bench.name_of(9))
    assert not isinstance(caught.value, DamagedSnapshotError)
    check(node.load(committed))


def test_writer_killed_while_loading(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that waits is told at once; another writer loads the snapshot."""
    monkeypatch.setenv(fault_injection.VARIABLE, "restore.mid_load=kill@2")
    node = loader(bench, bench.writer())
    with pytest.raises(SnapshotError, match=r"^the snapshot writer died$"):
        node.load(committed)
    monkeypatch.delenv(fault_injection.VARIABLE)
    check(loader(bench, bench.writer(), generation=3).load(committed))


def test_rank_gone_while_loading(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last rank that waits, reading ends and nothing stays open; the next generation's ranks are served."""
    monkeypatch.setenv(fault_injection.VARIABLE, "restore.mid_load=stall:1@2-3")
    writer = bench.writer()
    client = bench.connect(writer, 0, 2, generation=2)
    client.send(Load(committed))
    assert comes_true(lambda: bool(held(writer.process.pid, committed)))
    client.close()
    assert comes_true(lambda: not held(writer.process.pid, committed))
    check(loader(bench, writer, generation=3).load(committed))


def test_no_memory_is_told_with_figures(remote: str, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is not begun: the machine would end some process to make room."""
    monkeypatch.setattr(load, "available", lambda: SIZE)
    with pytest.raises(
        SnapshotError, match=rf"takes 18\d{{6}} bytes of memory, {SIZE} are left on this node$"
    ):
        load.load(Catalog(Storage(remote)), committed)


def test_waiting_ranks_see_it_go_on(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slow store is read, each rank beats with the bytes that come; when nothing comes, it does not."""
    monkeypatch.setenv(fault_injection.VARIABLE, "restore.mid_load=stall:0.6@2-6")
    beats: list[None] = []
    client = bench.connect(bench.writer(), 0, 2, generation=2)
    check(NodeLoader(client, lambda: beats.append(None)).load(committed))
    assert beats


def test_the_newest_snapshot_is_read_before_anybody_asks(bench: Bench, committed: str) -> None:
    """The ranks are given what the writer has open, and it reads nothing again."""
    writer = bench.writer()
    writer.load_ahead()
    assert comes_true(lambda: bytes_read(writer) > 2 * SIZE)
    assert comes_true(lambda: len(held(writer.process.pid, committed)) == 3)
    before = bytes_read(writer)
    ranks = [loader(bench, writer, rank) for rank in range(2)]
    for loaded in [rank.load(committed) for rank in ranks]:
        check(loaded)
    for rank in ranks:
        rank.release()
    assert bytes_read(writer) < before + SIZE
    assert comes_true(lambda: not held(writer.process.pid, committed))


def test_it_is_read_again_once_the_workers_are_gone(bench: Bench) -> None:
    """What they were handing over comes first, and what nobody asks for is given up when the next one trains."""
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1, size=SIZE)
    client.close()
    writer.load_ahead()
    name = Bench.name_of(1)
    assert comes_true(lambda: held(writer.process.pid, name) != [])
    assert [name] == [manifest.name for manifest in bench.catalog.committed()]
    bench.connect(writer, generation=2).buffer(100, timeout_s=20)
    assert comes_true(lambda: not held(writer.process.pid, name))


def test_another_one_than_was_read_ahead_may_be_asked_for(bench: Bench, committed: str) -> None:
    """It is read, and the one that nobody wants is given up."""
    writer = bench.writer()
    bench.share(first := bench.connect(writer, generation=2), 2, generation=2)
    first.flush(20)
    writer.close()
    writer = bench.writer()
    writer.load_ahead()
    newest = Bench.name_of(2, 2)
    assert comes_true(lambda: held(writer.process.pid, newest) != [])
    loader(bench, writer, generation=3).load(committed)
    assert not held(writer.process.pid, newest)


def test_what_nobody_asks_for_is_given_up_in_time(
    bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a node that no group takes."""
    is_read = threading.Event()

    class SinceItIsRead(threading.Timer):
        """Begins when the test has seen the files open, however slow the machine is."""

        def run(self) -> None:
            is_read.wait()
            super().run()

    monkeypatch.setattr(threading, "Timer", SinceItIsRead)
    monkeypatch.setattr(load_service, "_AHEAD_LIMIT_S", 0.2)
    LoadService(bench.catalog).load_ahead(committed)
    assert comes_true(lambda: len(held("self", committed)) == 3)
    is_read.set()
    assert comes_true(lambda: not held("self", committed))


def test_damage_found_ahead_is_told_to_who_asks(bench: Bench, committed: str) -> None:
    """As if nothing had been read before."""
    os.truncate(Path(bench.uri) / "snapshots" / committed / SHARD, HARMED)
    writer = bench.writer()
    writer.load_ahead()
    with pytest.raises(DamagedSnapshotError, match=SHARD):
        loader(bench, writer).load(committed)


def bytes_read(writer: WriterProcess) -> int:
    """Return how much the writer has read so far."""
    return int(Path(f"/proc/{writer.process.pid}/io").read_text().split()[1])
