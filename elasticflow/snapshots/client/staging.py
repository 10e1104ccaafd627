"""The worker's side of a snapshot: fill a staging buffer, hand it over, train on."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import events, fault_injection
from elasticflow.errors import SnapshotError, StagingLimitError
from elasticflow.snapshots.client.connection import WriterConnection
from elasticflow.snapshots.client.messages import (
    Buffers,
    NoMemory,
    OverLimit,
    PersistBegun,
    Released,
    Report,
    RequestPersist,
    ReserveBuffers,
    RetentionDone,
    Stage,
)
from elasticflow.snapshots.format.shard_file import StagedShard, without_infinities
from elasticflow.snapshots.memory import buffers

if TYPE_CHECKING:
    import mmap
    from collections.abc import Sequence

    from elasticflow.events import EventRecord
    from elasticflow.snapshots.client.channel import Channel
    from elasticflow.snapshots.client.messages import ToWorker
    from elasticflow.snapshots.format.shard_file import TensorEntry


# Report that a snapshot out of the memory tier is being written: name, step, trigger.
BEGUN = "begun"
# Snapshots staged by a worker and not committed yet; a commit takes a tenth of a second where many are kept.
MOST_OPEN = 8
_TIDY_LIMIT_S = 5.0


@dataclass(eq=False)
class _Mapped:
    size: int
    memory: mmap.mmap
    # free -> filling (by the worker) -> writing (by the writer) -> free
    state: str = "free"


class StagingClient(WriterConnection):
    """One rank's connection to its node's writer, to stage and to hear of outcomes; used from one thread.

    Two buffers per rank, or one where memory is short: while one is being written, the other can be filled; when all
    are being written, `buffer` waits, so a slow store delays the next snapshot and never grows memory.

    Attributes:
        single: Why this rank has one buffer instead of two, if so.
    """

    def __init__(self, channel: Channel[ToWorker]) -> None:
        super().__init__(channel)
        self._mapped: dict[int, _Mapped] = {}
        self._reserved = 0
        self._reports: list[EventRecord] = []
        # Snapshots staged here that have no outcome yet.
        self._open: set[str] = set()
        # Snapshots staged here after which retention has not run yet.
        self._untidied: set[str] = set()
        # Step of a `RequestPersist` that the writer has not begun to fulfil.
        self._requested: int | None = None
        # Step of the newest snapshot that the writer began to write out of the memory tier.
        self._begun = 0
        self.single: str | None = None
        self.handlers |= {
            Buffers: self._map,
            Released: self._release,
            NoMemory: self._refuse,
            OverLimit: self._refuse,
            PersistBegun: self._note_begun,
            Report: self._note_outcome,
            RetentionDone: self._note_retention,
        }

    def reserve(self, nbytes: int) -> None:
        """Ask for two buffers of *nbytes*, or one where memory is short, and return at once.

        They are made ready while the worker goes on. Not between `buffer` and `stage`: larger buffers take the
        place of the old ones.
        """
        if nbytes > self._reserved:
            self._reserved = nbytes
            self.send(ReserveBuffers(nbytes))

    def buffer(self, nbytes: int, timeout_s: float | None = None) -> memoryview:
        """Return a free staging buffer of *nbytes*; waits while all are being written.

        It also waits while `MOST_OPEN` snapshots staged here are not committed: small ones are written faster than they
        are committed, and a run that leaves waits for all of them.

        Raises:
            SnapshotError: the writer died, has no memory, or freed no buffer within *timeout_s*.
        """
        self.reserve(nbytes)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self.receive_waiting()
            if len(self._open) >= MOST_OPEN:
                self.receive_one(deadline, f"none of {len(self._open)} snapshots was committed")
                continue
            for mapped in sorted(self._mapped.values(), key=lambda m: m.state != "filling"):
                if mapped.state != "writing" and mapped.size >= nbytes:
                    mapped.state = "filling"
                    return memoryview(mapped.memory)[:nbytes]
            self.receive_one(deadline, "no staging buffer became free")

    def stage(
        self,
        *,
        name: str,
        step: int,
        tensors: Sequence[TensorEntry],
        nbytes: int,
        record: dict[str, Any] | None = None,
    ) -> None:
        """Hand the buffer last given by `buffer` to the writer and return at once.

        Args:
            name: The snapshot's folder name, the same on every rank, never used before.
            step: Finished steps.
            tensors: This rank's share; may be empty.
            nbytes: Bytes of the buffer in use.
            record: Rank 0's, as of `StagedShard`; None on other ranks.

        Raises:
            SnapshotError: the writer died.
        """
        number = next((n for n, mapped in self._mapped.items() if mapped.state == "filling"), None)
        assert number is not None or not nbytes, "stage() without buffer()"
        if number is not None:
            self._mapped[number].state = "writing"
        self._open.add(name)
        self._untidied.add(name)
        shard = StagedShard(tensors, nbytes, None if record is None else without_infinities(record))
        self.send(Stage(name, step, number, shard))
        fault_injection.reach("snapshot.after_stage")

    def request_persist(self, step: int, trigger: str) -> None:
        """Ask for a snapshot on the store of what the memory tier holds at *step*, or a later one if it is busy.

        What was asked for and not begun before is included. Every rank asks.

        Raises:
            SnapshotError: the writer died.
        """
        if step > self._begun:
            self._requested = step
            self.send(RequestPersist(step, trigger))

    @property
    def is_awaiting(self) -> bool:
        """True while something staged here has no outcome, or a request is not fulfilled."""
        return bool(self._open) or self._requested is not None

    def reports(self) -> list[EventRecord]:
        """Return what became of snapshots staged here since the last call; does not wait."""
        self.receive_waiting()
        reports, self._reports = self._reports, []
        return reports

    def flush(self, timeout_s: float) -> list[EventRecord]:
        """Wait until everything staged here is committed or failed; return the reports not yet fetched.

        Retention after the last commit is waited for as well, but not for long, and never for an error.

        Raises:
            SnapshotError: the writer died, or an outcome is missing after *timeout_s*.
        """
        deadline = time.monotonic() + timeout_s
        while self._open or self._requested is not None:
            what = ", ".join(sorted(self._open)) or f"step {self._requested}"
            self.receive_one(deadline, f"no outcome of {what}")
        with contextlib.suppress(SnapshotError):
            deadline = min(deadline, time.monotonic() + _TIDY_LIMIT_S)
            while self._untidied:
                self.receive_one(deadline, "retention was not through")
        return self.reports()

    def _release(self, message: Released) -> None:
        mapped = self._mapped.get(message.number)
        if mapped is not None:
            mapped.state = "free"

    def _note_outcome(self, message: Report) -> None:
        report = message.report
        if report["event"] not in (events.SNAPSHOT_REMOVED, events.STORE_TROUBLE):
            self._open.discard(report["name"])
        self._reports.append(report)

    def _note_retention(self, message: RetentionDone) -> None:
        self._untidied.discard(message.name)

    def _refuse(self, message: OverLimit | NoMemory) -> None:
        if isinstance(message, OverLimit):
            raise StagingLimitError(
                f"snapshots.staging_limit is too small: {message.reason}",
                "raise snapshots.staging_limit, or train on more nodes: each stages a smaller part",
            )
        raise SnapshotError(f"no memory to stage {self._reserved} bytes: {message.reason}")

    def _note_begun(self, message: PersistBegun) -> None:
        self._begun = message.step
        self._open.add(message.name)
        self._untidied.add(message.name)
        self._reports.append({"event": BEGUN, **vars(message)})
        if self._requested is not None and self._requested <= self._begun:
            self._requested = None

    def _map(self, message: Buffers) -> None:
        # The writer keeps what is still being written.
        self._mapped.clear()
        self.single = message.single
        for number in message.numbers:
            descriptor = self.descriptors.popleft()
            try:
                self._mapped[number] = _Mapped(message.size, buffers.map_memory(descriptor, message.size))
            finally:
                os.close(descriptor)
