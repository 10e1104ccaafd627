"""A snapshot is loaded once per node, verified, shared by its ranks, and freed when the last of them is done."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow import faults
from elasticflow.errors import SnapshotError
from elasticflow.snapshots import loading
from elasticflow.snapshots.manifest import DamagedSnapshotError
from elasticflow.snapshots.mapped import NodeLoader
from tests.snapshots.conftest import Bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.mapped import Loaded
    from elasticflow.snapshots.process import WriterProcess

SIZE = 9 << 20  # two blocks for each rank
HARMED = (8 << 20) + 17
SHARD = "shard-00000-of-00002.safetensors"


@pytest.fixture
def committed(bench: Bench) -> str:
    """A snapshot of two ranks, whose writer is gone."""
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for rank, client in enumerate(clients):
        bench.share(client, 1, rank=rank, size=SIZE)
    for client in clients:
        client.flush(20)
    writer.close()
    return Bench.name_of(1)


def loader(bench: Bench, writer: WriterProcess, rank: int = 0, generation: int = 2) -> NodeLoader:
    """Return a rank's loader, of a group of two."""
    return NodeLoader(bench.connect(writer, rank, 2, generation=generation), lambda: None)


def kept(writer: WriterProcess) -> int:
    """How many snapshots the writer holds in memory."""
    found = []
    for link in Path(f"/proc/{writer.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(link.readlink()))
    return sum("elasticflow-loading" in target for target in found)


def comes_true(condition: Callable[[], bool]) -> bool:
    """Wait for something that another process is about to do."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def check(loaded: Loaded) -> None:
    """Compare every tensor with what was staged."""
    assert {"step": 1} == loaded.state
    for rank in range(2):
        content, half = Bench.content(1, rank, SIZE), SIZE // 2
        for key, expected in ((f"a{rank}", content[:half]), (f"b{rank}", content[half:])):
            place = loaded.manifest.tensors[key]
            data = loaded.files[loaded.manifest.location(place.file)]
            assert expected == data[place.offset : place.offset + place.nbytes]


def mapped() -> set[str]:
    """The memory files of loaded snapshots that this process maps."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split()[4] for line in lines if "elasticflow-loading" in line}


def test_ranks_share_one_copy(bench: Bench, committed: str) -> None:
    """Both ranks get every byte, in the same memory; the writer lets go with the last rank, the last view frees it."""
    before = mapped()  # what tests before this one have not let go of yet
    writer = bench.writer()
    loaders = [loader(bench, writer, rank) for rank in range(2)]
    loaded = [each.load(committed) for each in loaders]
    for each in loaded:
        check(each)
    assert 1 == kept(writer)
    assert 1 == len(mapped() - before)
    loaders[0].release()
    bench.clients[-1].close()  # as good as a release
    assert comes_true(lambda: kept(writer) == 0)
    view = loaded[1].files[f"{committed}/{SHARD}"]
    del loaded, each
    assert 1 == len(mapped() - before)
    del view
    assert set() == mapped() - before


def test_what_a_rank_writes_stays_its_own(bench: Bench, committed: str) -> None:
    """A rank that wrote into what it loaded would not change what the others see."""
    writer = bench.writer()
    first, second = (loader(bench, writer, rank).load(committed) for rank in range(2))
    for data in first.files.values():
        data[:] = bytes(len(data))
    check(second)


def test_damage_is_told_to_every_rank(bench: Bench, committed: str) -> None:
    """File and block are named; nothing stays in memory; a rank that asks later hears the same without a second read."""
    path = bench.catalog.storage.local_path(f"snapshots/{committed}/{SHARD}")
    with path.open("r+b") as file:
        file.seek(HARMED)
        good = file.read(1)
        file.seek(HARMED)
        file.write(bytes([good[0] ^ 1]))
    writer = bench.writer()
    loaders = [loader(bench, writer, rank) for rank in range(2)]
    told = rf"^{SHARD}: block 1 \(from byte 8388608\) is not what was written$"
    with pytest.raises(DamagedSnapshotError, match=told):
        loaders[0].load(committed)
    with path.open("r+b") as file:  # whoever read it again would find it good
        file.seek(HARMED)
        file.write(good)
    with pytest.raises(DamagedSnapshotError, match=told):
        loaders[1].load(committed)
    assert 0 == kept(writer)
    check(loaders[0].load(committed))


def test_an_outage_is_no_damage(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses to be read, or shows no manifest, says nothing about the snapshot."""
    monkeypatch.setenv(faults.VARIABLE, "restore.mid_load=raise:EACCES@3")
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
    monkeypatch.setenv(faults.VARIABLE, "restore.mid_load=kill@2")
    node = loader(bench, bench.writer())
    with pytest.raises(SnapshotError, match=r"^the snapshot writer died$"):
        node.load(committed)
    monkeypatch.delenv(faults.VARIABLE)
    check(loader(bench, bench.writer(), generation=3).load(committed))


def test_rank_gone_while_loading(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last rank that waits, reading ends and its memory is freed; the next generation's ranks are served."""
    monkeypatch.setenv(faults.VARIABLE, "restore.mid_load=stall:1@2-3")
    writer = bench.writer()
    client = bench.connect(writer, 0, 2, generation=2)
    client.send({"load": committed})
    assert comes_true(lambda: kept(writer) == 1)
    client.close()
    assert comes_true(lambda: kept(writer) == 0)
    check(loader(bench, writer, generation=3).load(committed))


def test_no_memory_is_told_with_figures(
    bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit is not begun: the machine would end some process to make room."""
    monkeypatch.setattr(loading, "available", lambda: SIZE)
    with pytest.raises(
        SnapshotError, match=rf"takes 18\d{{6}} bytes of memory, {SIZE} are left on this node$"
    ):
        loading.load(bench.catalog, committed)


def test_waiting_ranks_see_it_go_on(bench: Bench, committed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a slow store is read, each rank beats with the bytes that come; when nothing comes, it does not."""
    monkeypatch.setenv(faults.VARIABLE, "restore.mid_load=stall:0.6@2-6")
    beats: list[None] = []
    client = bench.connect(bench.writer(), 0, 2, generation=2)
    check(NodeLoader(client, lambda: beats.append(None)).load(committed))
    assert beats
