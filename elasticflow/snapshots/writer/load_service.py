"""Loads snapshots for the ranks of a node: each is verified once, and kept until the last rank is done.

The newest one is read ahead while workers start, build their model and form their group. If ranks share a model, the rows that this
node's ranks hold are enough.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticflow.errors import in_words
from elasticflow.snapshots.client.messages import LoadFailed, LoadProgress, LoadReady
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.snapshots.read.load import LoadedSnapshot, SnapshotReader
from elasticflow.snapshots.writer.threads import thread

if TYPE_CHECKING:
    from elasticflow.snapshots.client.messages import Hello
    from elasticflow.snapshots.format.pieces import Part
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.writer.connected_rank import ConnectedRank

_PROGRESS_EVERY_S = 0.5
# Stands for the generation of a snapshot that is read before a rank asks for it.
_AHEAD = 0
_AHEAD_LIMIT_S = 300.0


@dataclass(eq=False)
class _Loading:
    """A snapshot that is being read, was read, or could not be read.

    Attributes:
        ranks: The ranks that wait for the snapshot or read it; it is closed with the last of them.
        outcome: The snapshot, or why it could not be read; None: it is being read.
    """

    name: str
    generation: int
    reader: SnapshotReader
    ranks: set[ConnectedRank] = field(default_factory=set)
    outcome: LoadedSnapshot | LoadFailed | None = None

    def serves(self, parts: frozenset[Part] | None) -> bool:
        """Return whether it reads at least these rows."""
        own = self.reader.parts
        return own is None or (parts is not None and parts <= own)

    def send_outcome(self, rank: ConnectedRank) -> None:
        """Send *rank* the outcome, if there is one."""
        if isinstance(self.outcome, LoadFailed):
            rank.send(self.outcome)
        elif self.outcome is not None:
            descriptors = self.outcome.files.descriptors
            rank.send(LoadReady(self.name, len(descriptors), self.outcome.to_json()), descriptors)


class LoadService:
    """Loads snapshots for the ranks of one node; safe to use from all the writer's threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._loadings: list[_Loading] = []
        # First messages of the newest generation, by rank.
        self._hellos: dict[int, Hello] = {}

    def greet(self, rank: ConnectedRank) -> None:
        """Note a new rank, before any rank of its generation asks."""
        with self._lock:
            self._hellos = {
                number: hello for number, hello in self._hellos.items() if hello.generation == rank.generation
            }
            self._hellos[rank.rank] = rank.hello

    def _parts(self) -> frozenset[Part] | None:
        """Return the rows that the node's ranks hold of sharded tensors; None: at least one holds all of them, or is unknown."""
        hellos = list(self._hellos.values())
        parts = [hello.part for hello in hellos if hello.part is not None]
        if not parts or not len(parts) == len(hellos) == hellos[0].local_world_size:
            return None
        return frozenset(parts)

    def load(self, rank: ConnectedRank, name: str, *, is_whole: bool = False) -> None:
        """Send snapshot *name* to *rank* once it is verified, or the reason why it cannot be read; returns at once.

        Verifies what this node's ranks need, or all if *is_whole*.
        """
        with self._lock:
            parts = None if is_whole else self._parts()
            # A failure is kept for the ranks of this generation that have not asked yet.
            self._loadings = [
                loading
                for loading in self._loadings
                if not isinstance(loading.outcome, LoadFailed)
                or (loading.name, loading.generation) == (name, rank.generation)
            ]
            begun = (
                one
                for one in self._loadings
                if one.name == name and rank not in one.ranks and one.serves(parts)
            )
            loading = next(begun, None) or self._begin(name, rank.generation, parts)
            if loading.generation == _AHEAD and parts is not None:
                # No rank waits for the rest.
                loading.reader.narrow(parts)
            loading.generation = rank.generation
            loading.ranks.add(rank)
            self._drop_unasked()
            is_over = loading.outcome is not None
        if is_over:
            loading.send_outcome(rank)

    def load_ahead(self, name: str) -> None:
        """Read snapshot *name*, for which ranks will probably ask; a rank that asks is told of a failure."""
        with self._lock:
            self._drop_unasked()
            if all(loading.name != name for loading in self._loadings):
                loading = self._begin(name, _AHEAD, self._parts())
                # On a node that takes part in no group no rank asks.
                timer = threading.Timer(_AHEAD_LIMIT_S, self._give_up, [loading])
                timer.daemon = True
                timer.start()

    def drop_ahead(self) -> None:
        """Give up the data that was read ahead and that no rank has asked for."""
        with self._lock:
            self._drop_unasked()

    def _give_up(self, loading: _Loading) -> None:
        with self._lock:
            if loading in self._loadings and loading.generation == _AHEAD:
                self._drop(loading)

    def _drop_unasked(self) -> None:
        for loading in tuple(self._loadings):
            if loading.generation == _AHEAD:
                self._drop(loading)

    def _drop(self, loading: _Loading) -> None:
        self._loadings.remove(loading)
        loading.reader.stop()
        if isinstance(loading.outcome, LoadedSnapshot):
            loading.outcome.files.close()

    def leave(self, rank: ConnectedRank) -> None:
        """Note that *rank* has read all that it needs, or is gone."""
        with self._lock:
            for loading in tuple(self._loadings):
                if rank not in loading.ranks or isinstance(loading.outcome, LoadFailed):
                    continue
                loading.ranks.discard(rank)
                if not loading.ranks:
                    self._drop(loading)

    def _begin(self, name: str, generation: int, parts: frozenset[Part] | None) -> _Loading:
        sent_at = time.monotonic()

        def progress(nbytes: int) -> None:
            nonlocal sent_at
            if time.monotonic() - sent_at > _PROGRESS_EVERY_S:
                sent_at = time.monotonic()
                for rank in tuple(loading.ranks):
                    rank.send(LoadProgress(name, nbytes))

        loading = _Loading(name, generation, SnapshotReader(self._catalog, name, progress, parts))
        self._loadings.append(loading)
        thread(self._run, loading).start()
        return loading

    def _run(self, loading: _Loading) -> None:
        outcome: LoadedSnapshot | LoadFailed
        try:
            outcome = loading.reader.read()
        except DamagedSnapshotError as error:
            outcome = LoadFailed(loading.name, "damaged", error.message)
        except UnreadableSnapshotError as error:
            outcome = LoadFailed(loading.name, "forbidden", error.message)
        except Exception as error:  # noqa: BLE001  # whatever the store raises is sent to the ranks
            outcome = LoadFailed(loading.name, "unreadable", in_words(error))
        with self._lock:
            loading.outcome = outcome
            ranks = tuple(loading.ranks)
            if loading not in self._loadings and isinstance(outcome, LoadedSnapshot):
                outcome.files.close()
        for rank in ranks:
            loading.send_outcome(rank)
