"""A writer that dies at any operation of its storage: what was committed before can always be loaded.

Every tensor of these snapshots lies in pieces, which are stored by one rank or shared by several, on one node or on two.
"""

from __future__ import annotations

import shutil
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.run_folder import snapshot_name
from elasticflow.snapshots.client.writer_process import Limits, WriterStart
from elasticflow.snapshots.format import policy
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.pieces import Piece
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard, TensorEntry
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.store.publish import CommitRefusedError
from elasticflow.snapshots.writer.committer import Committer
from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots, Role
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.snapshots.client.messages import SnapshotReport
    from elasticflow.snapshots.format.manifest import Manifest

SIZE = 64  # bytes of each of two tensors
FOREVER = 10**6
RETENTION = (  # last, best, every, within
    Keep(last=1),
    Keep(last=2),
    Keep(last=1, best=1, best_mode="max"),
    Keep(last=1, every="3 steps"),
    Keep(last=1, within="1 h"),
)


class DeadError(BaseException):
    """The process is no more: nothing catches it, and nothing it does afterwards has an effect."""


class Mortal(Storage):
    """A store whose user dies before, after or in the midst of its *moment*-th change."""

    def __init__(self, uri: str, moment: int) -> None:
        super().__init__(uri)
        self._left = moment

    def write(self, path: str, parts: Any) -> int:
        """Put a file, or die."""
        self._live()
        size = super().write(path, parts)
        self._live()
        return size

    def create(self, path: str, data: bytes) -> bool:
        """Put a file that is not there, or die."""
        self._live()
        is_new = super().create(path, data)
        self._live()
        return is_new

    def local_path(self, path: str = "") -> Path:
        """Tell the place of what is going to be renamed, or die before."""
        self._live()
        return super().local_path(path)

    def remove(self, path: str) -> None:
        """Remove a file, or die."""
        self._live()
        super().remove(path)
        self._live()

    def remove_tree(self, folder: str) -> None:
        """Remove a folder file by file, a manifest last, or die in the midst of it."""
        for name in sorted(self.list(folder), reverse=True):
            self.remove(f"{folder}/{name}")
        super().remove_tree(folder)

    def _live(self) -> None:
        if self._left <= 0:
            raise DeadError
        self._left -= 1


class Group(NamedTuple):
    """Ranks that take snapshots together.

    Attributes:
        ranks: Ranks that share each tensor; with one of them, it lies in two pieces of one file.
        nodes: Nodes of these ranks, each of which has a writer; rank 0 is on the first.
        dying: Number of the node whose writer dies; the other lives on.
    """

    ranks: int
    nodes: int = 1
    dying: int = 0


GROUPS = {
    "one": Group(1),
    "three": Group(3),
    "of two nodes rank 0's": Group(4, 2),
    "of two nodes the other": Group(4, 2, dying=1),
}


@dataclass(frozen=True)
class Life:
    """What one writer does before it dies, and what people do afterwards.

    Attributes:
        moment: Changes of the storage until it dies.
        frozen: For each snapshot, what its frozen tensor holds.
        rules: Which stay.
        pins: Which of the committed ones are pinned afterwards, from the newest on, modulo their number.
        group: Who takes the snapshots.
    """

    moment: int
    frozen: tuple[int, ...]
    rules: Keep
    pins: tuple[int, ...]
    group: Group


lives = st.builds(
    Life,
    moment=st.integers(0, 45),
    frozen=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple),
    rules=st.sampled_from(RETENTION),
    pins=st.lists(st.integers(0, 5), max_size=1).map(tuple),
    group=st.sampled_from(list(GROUPS.values())),
)


class Node:
    """A writer's own code, without its process; every limit on waiting is over at once.

    Args:
        ranks: Ranks of this node.
        hear: Is told what comes of each snapshot.
    """

    def __init__(self, storage: Storage, rules: Keep, ranks: range, hear: Any) -> None:
        start = WriterStart(storage.uri, "r", SnapshotSettings(keep=rules), limits=Limits(0, 0, 0))
        self.ranks = ranks
        self.board, catalog = PendingSnapshots(), Catalog(storage, "run/")
        self.committer, self.writing = (
            Committer(start, catalog, self.board, hear),
            ShardWriter(start, catalog),
        )

    def settle(self, pending: PendingSnapshot) -> bool:
        """Commit a snapshot whose shards are written, or announce them; False: the other node has to commit it."""
        try:
            committed = self.committer._settle(pending)
        except CommitRefusedError as error:
            if pending.role is Role.PARTICIPANT:
                return False
            self.committer._give_up(pending, error)
            return True
        self.board.close(pending)
        if committed is not None:
            self.committer._retain(pending, committed)
        return True

    def hear_of(self, pending: PendingSnapshot) -> None:
        """Look what the other node has made of a snapshot whose shards were announced."""
        publisher = self.committer._publisher
        try:
            publisher.await_commit(pending.name, min(pending.staged), 0, lambda: True)
        except CommitRefusedError as error:
            self.committer._give_up(pending, error)
        else:
            self.board.close(pending)


@dataclass
class Story:
    """A run of several lives at one place, and what it was promised.

    Attributes:
        staged: Bytes of each snapshot, by name.
        told: Names of the snapshots that were told to be committed, in order.
        pinned: Names that were pinned.
    """

    uri: str
    step: int = 0
    staged: dict[str, bytes] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    pinned: set[str] = field(default_factory=set)

    @property
    def catalog(self) -> Catalog:
        """The place, seen by somebody who is alive."""
        return Catalog(Storage(self.uri), "run/")

    def live(self, life: Life, moment: int | None = None) -> bool:
        """Begin a generation where the one before was left, and take snapshots until a death; False: nobody died."""
        generation, parent = self.catalog.claim_generation({}), self.catalog.newest()
        group, moments = life.group, [FOREVER] * life.group.nodes
        moments[group.dying] = life.moment if moment is None else moment
        nodes = [
            Node(Mortal(self.uri, left), life.rules, range(number, group.ranks, group.nodes), self._hear)
            for number, left in enumerate(moments)
        ]
        for number, frozen in enumerate(life.frozen):
            self.step += 1
            facts = ManifestFacts(
                trigger="steps",
                parent=None if parent is None else parent.name,
                metric=float(number % 2),
            )
            name = snapshot_name(self.step, generation, f"{self.step:08x}")
            self.staged[name] = bytes([self.step]) * SIZE + bytes([frozen]) * SIZE
            about = name, self.step, generation, group.ranks, group.ranks // group.nodes
            if self._commit([(node, PendingSnapshot(*about)) for node in nodes], facts):
                return True
        return False

    def _commit(self, nodes: list[tuple[Node, PendingSnapshot]], facts: ManifestFacts) -> bool:
        """Have the nodes store and commit a snapshot, the one of rank 0 last; return whether one of them died."""
        died, waiting = False, []
        for node, pending in reversed(nodes):
            try:
                self._stage(node, pending, facts)
                if not node.settle(pending):
                    waiting.append((node, pending))
            except DeadError:
                died = True
        for node, pending in waiting:
            try:
                node.hear_of(pending)
            except DeadError:
                died = True
        return died

    def check(self, parent: str | None = None) -> None:
        """Everything that is seen can be loaded, and all that was promised is seen."""
        seen = {found.name: found for found in self.catalog.committed()}
        assert {} == self.catalog.damaged()
        for found in seen.values():
            assert [] == verify.verify(self.catalog, found)
            assert self.staged[found.name] == self._content(found, "own") + self._content(found, "frozen")
        if self.told:
            assert self.told[-1] <= next(iter(seen))
        assert self.pinned <= seen.keys()
        assert parent is None or parent in seen

    def pin(self, life: Life) -> None:
        """Pin what somebody wants to keep."""
        names = [found.name for found in self.catalog.committed()]
        for place in life.pins if names else ():
            self.catalog.pin(names[place % len(names)])
            self.pinned.add(names[place % len(names)])

    def _hear(self, report: SnapshotReport, listeners: list[Any], *, to_parent: bool) -> None:
        if report.event == "snapshot.committed" and to_parent:
            self.told.append(report.name)

    def _stage(self, node: Node, pending: PendingSnapshot, facts: ManifestFacts) -> None:
        """Write the shards of the node's ranks: the first tensor, and a frozen one after it."""
        record = SnapshotRecord({"position": {"step": self.step}, "state": {}}, facts)
        memory, cut = memoryview(self.staged[pending.name]), -(-SIZE // max(2, pending.world_size))
        begins = list(range(0, SIZE, cut))
        for rank in node.ranks:
            entries = [
                TensorEntry(piece.key, "U8", (size,), at + piece.begin, size, at > 0, piece)
                for at, key in ((0, "own"), (SIZE, "frozen"))
                for begin in begins[rank :: pending.world_size]
                for piece, size in [(Piece.of_rows(key, (SIZE,), begin), min(cut, SIZE - begin))]
            ]
            own = record if rank == 0 else None
            node.board.add(pending, rank, own, None)
            files = node.writing.write(pending, rank, StagedShard(entries, 2 * SIZE, own), memory)
            node.board.finish(pending, rank, files, None)

    def _content(self, found: Manifest, key: str) -> bytes:
        content = b""
        for span in found.whole[key].spans(0, found.whole[key].nbytes):
            data = self.catalog.storage.read(f"{self.catalog.folder()}/{found.location(span.file)}")
            content += data[span.offset : span.offset + span.nbytes]
        return content


kinds = pytest.mark.parametrize("kind", ["folder", "memory"])


def places(kind: str, folders: pytest.TempPathFactory) -> Iterator[str]:
    """Yield a fresh place of that kind; nothing of it is left afterwards."""
    if kind == "memory":
        uri = f"memory://crash-{uuid.uuid4().hex}"
        yield uri
        Storage(uri).remove_tree("run")
        return
    folder = folders.mktemp("crash")
    yield str(folder)
    shutil.rmtree(folder)


@kinds
@settings(max_examples=25, deadline=None)
@given(st.lists(lives, min_size=1, max_size=4))
def test_previous_snapshot_can_always_be_loaded(
    kind: str, tmp_path_factory: pytest.TempPathFactory, told: list[Life]
) -> None:
    """Writers die one after the other: what was committed, pinned, borrowed or begun from is there, whole."""
    for uri in places(kind, tmp_path_factory):
        story = Story(uri)
        for life in told:
            parent = story.catalog.newest()
            story.live(life)
            story.check(None if parent is None else parent.name)
            story.pin(life)


@kinds
@settings(max_examples=8, deadline=None)
@given(st.lists(lives, min_size=1, max_size=3))
def test_the_living_clear_away_what_the_dead_left(
    kind: str, tmp_path_factory: pytest.TempPathFactory, told: list[Life]
) -> None:
    """A writer that lives on leaves nothing but what retention keeps, however the ones before it ended."""
    for uri in places(kind, tmp_path_factory):
        story = Story(uri)
        for life in told:
            story.live(life)
        story.live(told[-1], moment=FOREVER)
        names = {found.name for found in story.catalog.committed()}
        assert names == set(story.catalog.storage.list(story.catalog.folder()))
        (newest,) = {story.told[-1]} & names
        assert policy.reasons(story.catalog.committed(), told[-1].rules).keys() <= names
        assert newest == max(names, key=lambda name: name.split("-")[1::-1])


@kinds
@pytest.mark.parametrize("group", list(GROUPS)[1:])
def test_death_at_each_change_of_a_commit(
    kind: str, tmp_path_factory: pytest.TempPathFactory, group: str
) -> None:
    """Whenever a writer dies, the previous snapshot is whole, and so is the next one, if it is seen at all."""
    life = Life(0, (0,), Keep(last=2), (), GROUPS[group])
    died, seen = True, list[int]()
    while died:
        for uri in places(kind, tmp_path_factory):
            story = Story(uri)
            assert not story.live(life, moment=FOREVER)
            (first,) = story.catalog.committed()
            files = {place.file for whole in first.whole.values() for place in whole.pieces}
            assert 2 * life.group.ranks == len(files)
            died = story.live(life, moment=len(seen))
            story.check(first.name)
            seen.append(len(story.catalog.committed()))
            assert not story.live(life, moment=FOREVER)
            story.check()
            names = {found.name for found in story.catalog.committed()}
            assert names == set(story.catalog.storage.list(story.catalog.folder()))
    assert seen == sorted(seen)  # the older one alone before the commit, both after it
    assert 2 == seen[-1]
    assert 5 < len(seen)
