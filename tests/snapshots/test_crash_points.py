"""A writer that dies at any operation of its storage: what was committed before can always be loaded."""

from __future__ import annotations

import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.run_folder import snapshot_name
from elasticflow.snapshots.format import policy
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.pieces import Piece
from elasticflow.snapshots.format.shard_file import SnapshotRecord, StagedShard, TensorEntry
from elasticflow.snapshots.format.writer_config import WriterStart
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.writer.committer import Committer
from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots
from elasticflow.snapshots.writer.shard_writer import ShardWriter
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.snapshots.client.writer_reports import SnapshotReport
    from elasticflow.snapshots.format.manifest import Manifest

SIZE = 64  # bytes of each of two tensors
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

    def replace_text(self, path: str, data: bytes) -> None:
        """Put a small file, or die."""
        self._live()
        super().replace_text(path, data)
        self._live()

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


@dataclass(frozen=True)
class Life:
    """What one writer does before it dies, and what people do afterwards.

    Attributes:
        moment: Changes of the storage until it dies.
        frozen: For each snapshot, what its frozen tensor holds.
        rules: Which stay.
        pins: Which of the committed ones are pinned afterwards, from the newest on, modulo their number.
    """

    moment: int
    frozen: tuple[int, ...]
    rules: Keep
    pins: tuple[int, ...]


lives = st.builds(
    Life,
    moment=st.integers(0, 45),
    frozen=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple),
    rules=st.sampled_from(RETENTION),
    pins=st.lists(st.integers(0, 5), max_size=1).map(tuple),
)


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

    def live(self, life: Life, moment: int | None = None) -> None:
        """Begin a generation where the one before was left, and take snapshots until death."""
        generation, parent = self.catalog.claim_generation({}), self.catalog.newest()
        mortal = Catalog(Mortal(self.uri, life.moment if moment is None else moment), "run/")
        start = WriterStart(self.uri, "r", SnapshotSettings(keep=life.rules))
        board = PendingSnapshots()
        committer = Committer(start, mortal, board, self._hear)
        writing = ShardWriter(start, mortal)
        with suppress(DeadError):
            for number, frozen in enumerate(life.frozen):
                self.step += 1
                facts = ManifestFacts(
                    trigger="steps",
                    parent=None if parent is None else parent.name,
                    metric=float(number % 2),
                )
                self._stage(writing, board, generation, frozen, facts)
                pending = board.next_settled()
                assert pending is not None
                committer._retain(pending, self._commit(committer, board, pending))

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
        assert to_parent
        if report.event == "snapshot.committed":
            self.told.append(report.name)

    def _commit(self, committer: Committer, board: PendingSnapshots, pending: PendingSnapshot) -> Manifest:
        committed = committer._settle(pending)
        board.close(pending)
        assert committed is not None
        return committed

    def _stage(
        self,
        writing: ShardWriter,
        board: PendingSnapshots,
        generation: int,
        frozen: int,
        facts: ManifestFacts,
    ) -> None:
        name = snapshot_name(self.step, generation, f"{self.step:08x}")
        cut = SIZE // 3
        first, second = (Piece.of_rows("own", (SIZE,), begin) for begin in (0, cut))
        entries = [
            TensorEntry(first.key, "U8", (cut,), 0, cut, piece=first),
            TensorEntry(second.key, "U8", (SIZE - cut,), cut, SIZE - cut, piece=second),
            TensorEntry("frozen", "U8", (SIZE,), SIZE, SIZE, frozen=True),
        ]
        record = SnapshotRecord({"position": {"step": self.step}, "state": {}}, facts)
        shard = StagedShard(entries, 2 * SIZE, record)
        pending = board.add(PendingSnapshot(name, self.step, generation, 1, 1), 0, record, None)
        self.staged[name] = bytes([self.step]) * SIZE + bytes([frozen]) * SIZE
        files = writing.write(pending, 0, shard, memoryview(self.staged[name]))
        board.finish(pending, 0, files, None)

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
        story.live(told[-1], moment=10**6)
        names = {found.name for found in story.catalog.committed()}
        assert names == set(story.catalog.storage.list(story.catalog.folder()))
        (newest,) = {story.told[-1]} & names
        assert policy.keep(story.catalog.committed(), told[-1].rules) <= names
        assert newest == max(names, key=lambda name: name.split("-")[1::-1])
