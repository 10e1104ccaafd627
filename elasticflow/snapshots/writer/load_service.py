"""Loading for a node's ranks: each snapshot is verified once, whoever asks, and held until the last is done."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.snapshots.read.load import LoadedSnapshot, SnapshotReader
from elasticflow.snapshots.writer.threads import thread

if TYPE_CHECKING:
    from elasticflow.snapshots.client.channel import Message
    from elasticflow.snapshots.store.catalog import Catalog

_TOLD_EVERY_S = 0.5


class Asker(Protocol):
    """A connected rank."""

    @property
    def generation(self) -> int:
        """Its own."""

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send it a message; nothing happens if it is gone."""


@dataclass(eq=False)
class _Load:
    """A snapshot being read, or read, or found unreadable.

    Attributes:
        askers: Ranks that wait for it or have it; it ends with the last of them.
        snapshot: What was read.
        refusal: Why it was not, as ranks are told.
    """

    name: str
    generation: int
    reading: SnapshotReader
    askers: set[Asker] = field(default_factory=set)
    snapshot: LoadedSnapshot | None = None
    refusal: Message | None = None

    def tell(self, asker: Asker) -> None:
        """Tell *asker* the outcome, if there is one."""
        if self.refusal is not None:
            asker.send(self.refusal)
        elif self.snapshot is not None:
            asker.send(_told(self.name, "ready", **self.snapshot.to_json()), self.snapshot.files.descriptors)


class LoadService:
    """Loads snapshots for the ranks of one node; safe to use from all the writer's threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        self._loads: list[_Load] = []

    def handle(self, asker: Asker, message: Message) -> bool:
        """Do what *message* asks for; False if it is about something else."""
        if "load" in message:
            self.ask(asker, message["load"])
        elif "unload" in message:
            self.leave(asker)
        else:
            return False
        return True

    def ask(self, asker: Asker, name: str) -> None:
        """Have *asker* told of snapshot *name* as soon as it is verified, or why it will not be; returns at once."""
        with self._lock:
            # What could not be read is remembered for the ranks of this generation that have not asked yet.
            self._loads = [
                load
                for load in self._loads
                if load.refusal is None or (load.name, load.generation) == (name, asker.generation)
            ]
            load = next(
                (load for load in self._loads if load.name == name and asker not in load.askers), None
            )
            if load is None:
                load = self._begin(name, asker.generation)
            load.askers.add(asker)
            is_over = load.snapshot is not None or load.refusal is not None
        if is_over:
            load.tell(asker)

    def leave(self, asker: Asker) -> None:
        """*asker* needs nothing any more, or is gone."""
        with self._lock:
            for load in [load for load in self._loads if asker in load.askers and load.refusal is None]:
                load.askers.discard(asker)
                if not load.askers:
                    self._loads.remove(load)
                    load.reading.stop()
                    if load.snapshot is not None:
                        load.snapshot.files.close()

    def _begin(self, name: str, generation: int) -> _Load:
        told_at = time.monotonic()

        def progress(done: int) -> None:
            nonlocal told_at
            if time.monotonic() - told_at > _TOLD_EVERY_S:
                told_at = time.monotonic()
                for asker in tuple(load.askers):
                    asker.send(_told(name, "reading", bytes=done))

        load = _Load(name, generation, SnapshotReader(self._catalog, name, progress))
        self._loads.append(load)
        thread(self._run, load).start()
        return load

    def _run(self, load: _Load) -> None:
        snapshot, refusal = None, None
        try:
            snapshot = load.reading.read()
        except DamagedSnapshotError as error:
            refusal = _told(load.name, "damaged", reason=error.message)
        except UnreadableSnapshotError as error:
            refusal = _told(load.name, "refused", reason=error.message)
        except Exception as error:  # noqa: BLE001  # whatever the store raises, the ranks are told
            reason = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            refusal = _told(load.name, "unreadable", reason=reason)
        with self._lock:
            load.snapshot, load.refusal = snapshot, refusal
            askers = tuple(load.askers)
            if snapshot is not None and not askers:
                snapshot.files.close()
        for asker in askers:
            load.tell(asker)


def _told(name: str, state: str, **facts: Any) -> Message:
    return {"load": {"name": name, "state": state, **facts}}
