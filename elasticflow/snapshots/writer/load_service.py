"""Loading for a node's ranks: each snapshot is verified once, whoever asks, and held until the last rank is done."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticflow.snapshots.client.messages import LoadFailed, LoadProgress, LoadReady
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.snapshots.read.load import LoadedSnapshot, SnapshotReader
from elasticflow.snapshots.writer.threads import thread

if TYPE_CHECKING:
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.writer.connected_rank import ConnectedRank

_PROGRESS_EVERY_S = 0.5


@dataclass(eq=False)
class _Loading:
    """A snapshot that is being read, or was read, or was found unreadable.

    Attributes:
        ranks: Those that wait for it or have it; it ends with the last of them.
        outcome: What was read, or why it was not; None: it is being read.
    """

    name: str
    generation: int
    reader: SnapshotReader
    ranks: set[ConnectedRank] = field(default_factory=set)
    outcome: LoadedSnapshot | LoadFailed | None = None

    def tell(self, rank: ConnectedRank) -> None:
        """Tell *rank* the outcome, if there is one."""
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

    def load(self, rank: ConnectedRank, name: str) -> None:
        """Have *rank* told of snapshot *name* as soon as it is verified, or why it will not be; returns at once."""
        with self._lock:
            # What could not be read is remembered for the ranks of this generation that have not asked yet.
            self._loadings = [
                loading
                for loading in self._loadings
                if not isinstance(loading.outcome, LoadFailed)
                or (loading.name, loading.generation) == (name, rank.generation)
            ]
            same = (each for each in self._loadings if each.name == name and rank not in each.ranks)
            loading = next(same, None) or self._begin(name, rank.generation)
            loading.ranks.add(rank)
            is_over = loading.outcome is not None
        if is_over:
            loading.tell(rank)

    def leave(self, rank: ConnectedRank) -> None:
        """*rank* needs nothing any more, or is gone."""
        with self._lock:
            for loading in tuple(self._loadings):
                if rank not in loading.ranks or isinstance(loading.outcome, LoadFailed):
                    continue
                loading.ranks.discard(rank)
                if not loading.ranks:
                    self._loadings.remove(loading)
                    loading.reader.stop()
                    if loading.outcome is not None:
                        loading.outcome.files.close()

    def _begin(self, name: str, generation: int) -> _Loading:
        sent_at = time.monotonic()

        def progress(nbytes: int) -> None:
            nonlocal sent_at
            if time.monotonic() - sent_at > _PROGRESS_EVERY_S:
                sent_at = time.monotonic()
                for rank in tuple(loading.ranks):
                    rank.send(LoadProgress(name, nbytes))

        loading = _Loading(name, generation, SnapshotReader(self._catalog, name, progress))
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
        except Exception as error:  # noqa: BLE001  # whatever the store raises, the ranks are told
            reason = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            outcome = LoadFailed(loading.name, "unreadable", reason)
        with self._lock:
            loading.outcome = outcome
            ranks = tuple(loading.ranks)
            if not ranks and isinstance(outcome, LoadedSnapshot):
                outcome.files.close()
        for rank in ranks:
            loading.tell(rank)
