"""The worker's side of a snapshot: fill a staging buffer and hand it over while training goes on."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from elasticflow import events, fault_injection
from elasticflow.errors import SnapshotError, StagingLimitError
from elasticflow.snapshots.client.connection import WriterConnection
from elasticflow.snapshots.client.messages import (
    NoSlots,
    PersistBegun,
    Released,
    Report,
    RequestPersist,
    Reserve,
    RetentionDone,
    Slots,
    Stage,
)
from elasticflow.snapshots.client.writer_reports import SnapshotReport
from elasticflow.snapshots.format.shard_file import StagedShard
from elasticflow.snapshots.memory import Slot, map_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.snapshots.client.channel import Channel
    from elasticflow.snapshots.client.messages import ToWorker, ToWriter
    from elasticflow.snapshots.client.writer_reports import WriterReport
    from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry

# Snapshots staged by a worker and not committed yet; a commit takes a tenth of a second where many are kept.
MOST_OPEN = 8
_TIDY_LIMIT_S = 5.0


class StagingClient(WriterConnection):
    """One rank's connection to its node's writer, by which it stages shards and receives reports; used from one thread.

    Its shared memory is either staging buffers or the slots of the memory tier (`MemoryTierClient`). There are two
    buffers per rank, or one where memory is short: while one is being written, the other can be filled; when all are
    being written, `buffer` waits, so a slow store delays the next snapshot and never grows memory.

    Attributes:
        slots: The shared memory reserved last; empty until the writer has it ready.
        single: Why this rank has one buffer instead of two, if so.
    """

    def __init__(self, channel: Channel[ToWriter, ToWorker]) -> None:
        super().__init__(channel)
        self.slots: list[Slot] = []
        self._reserved = 0
        # The buffer that `buffer` gave and `stage` did not hand over yet.
        self._filling: Slot | None = None
        # Numbers of the buffers that the writer has not released.
        self._writing: set[int] = set()
        self._reports: list[WriterReport | PersistBegun] = []
        # Names of staged snapshots that have no outcome yet.
        self._open: set[str] = set()
        # Names of staged snapshots after which retention has not run yet.
        self._untidied: set[str] = set()
        # Step of a `RequestPersist` that the writer has not begun to fulfil.
        self._requested: int | None = None
        # Step of the newest snapshot that the writer began to write out of the memory tier.
        self._begun = 0
        self.single: str | None = None
        self.handlers |= {
            Slots: self._map,
            Released: self._release,
            NoSlots: self._refuse,
            PersistBegun: self._note_begun,
            Report: self._note_outcome,
            RetentionDone: self._note_retention,
        }

    def close(self) -> None:
        """Leave; the writer still writes what was staged, and keeps what was held."""
        self._drop_slots()
        super().close()

    def reserve(self, nbytes: int, *, is_held: bool = False) -> None:
        """Ask for shared memory of *nbytes* per slot, if there is less, and return at once.

        The writer makes it ready while the worker goes on: slots of the memory tier with *is_held*, else two buffers,
        or one where memory is short. Not between `buffer` and `stage`: larger ones take the place of the old ones.

        Raises:
            SnapshotError: the writer died.
        """
        if nbytes > self._reserved:
            self._drop_slots()
            self._reserved = nbytes
            self.send(Reserve(nbytes, is_held))

    def buffer(self, nbytes: int, timeout_s: float | None = None) -> memoryview:
        """Return a free staging buffer of *nbytes*; waits while all are being written.

        It also waits while `MOST_OPEN` staged snapshots are not committed: small snapshots are written faster than they
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
            if self._filling is None:
                free = (slot for slot in self.slots if slot.number not in self._writing)
                self._filling = next(free, None)
            if self._filling is not None:
                return memoryview(self._filling.memory)[:nbytes]
            self.receive_one(deadline, "no staging buffer became free")

    def stage(
        self,
        *,
        name: str,
        step: int,
        tensors: Sequence[TensorEntry],
        nbytes: int,
        record: SnapshotRecord | None = None,
    ) -> None:
        """Hand the buffer last given by `buffer` to the writer and return at once.

        Args:
            name: The snapshot's folder name, the same on every rank, never used before.
            step: Finished steps.
            tensors: Where each tensor of this rank's shard lies; may be empty.
            nbytes: Bytes of the buffer in use.
            record: Rank 0's; None on other ranks.

        Raises:
            SnapshotError: the writer died.
        """
        slot, self._filling = self._filling, None
        assert slot is not None or not nbytes, "stage() without buffer()"
        number = None if slot is None else slot.number
        if number is not None:
            self._writing.add(number)
        self._open.add(name)
        self._untidied.add(name)
        self.send(Stage(name, step, number, StagedShard(tensors, nbytes, record)))
        fault_injection.reach("snapshot.after_stage")

    def request_persist(self, step: int, trigger: str) -> None:
        """Ask for a snapshot on the store of what the memory tier holds at *step*, or later if the writer is busy.

        It stands for earlier requests that are not begun. Every rank asks.

        Raises:
            SnapshotError: the writer died.
        """
        if step > self._begun:
            self._requested = step
            self.send(RequestPersist(step, trigger))

    def await_begun(self) -> None:
        """Wait until the writer has begun to write what `request_persist` asked for last.

        Raises:
            SnapshotError: the writer died.
        """
        while (step := self._requested) is not None:
            self.receive_one(None, f"no word of step {step}")

    @property
    def is_awaiting(self) -> bool:
        """True while a staged snapshot has no outcome, or a request is not fulfilled."""
        return bool(self._open) or self._requested is not None

    def reports(self) -> list[WriterReport | PersistBegun]:
        """Return what the writer reported since the last call; does not wait."""
        self.receive_waiting()
        reports, self._reports = self._reports, []
        return reports

    def flush(self, timeout_s: float) -> list[WriterReport | PersistBegun]:
        """Wait until every staged snapshot is committed or failed; return the reports since the last call.

        It also waits a few seconds for retention after the last commit, whose failure is no error.

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
        self._writing.discard(message.number)

    def _note_outcome(self, message: Report) -> None:
        report = message.report
        if isinstance(report, SnapshotReport) and report.event != events.SNAPSHOT_REMOVED:
            self._open.discard(report.name)
        self._reports.append(report)

    def _note_retention(self, message: RetentionDone) -> None:
        self._untidied.discard(message.name)

    def _refuse(self, message: NoSlots) -> None:
        if message.is_over_limit:
            raise StagingLimitError(
                f"snapshots.staging_limit is too small: {message.reason}",
                "raise snapshots.staging_limit, or train on more nodes: each stages a smaller part",
            )
        raise SnapshotError(f"no memory to stage {self._reserved} bytes: {message.reason}")

    def _note_begun(self, message: PersistBegun) -> None:
        self._begun = message.step
        self._open.add(message.name)
        self._untidied.add(message.name)
        self._reports.append(message)
        if self._requested is not None and self._requested <= self._begun:
            self._requested = None

    def _drop_slots(self) -> None:
        for slot in self.slots:
            os.close(slot.descriptor)
        self.slots, self._filling = [], None
        self._writing.clear()

    def _map(self, message: Slots) -> None:
        descriptors = [self.descriptors.popleft() for _ in message.numbers]
        # An earlier reservation is answered: larger slots follow.
        if min(message.sizes) < self._reserved:
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self.single = message.single
        # The descriptors stay open: a slot's lock is given back when its process closes the file.
        self.slots = [
            Slot(number, descriptor, size, map_memory(descriptor, size))
            for number, descriptor, size in zip(message.numbers, descriptors, message.sizes, strict=True)
        ]
