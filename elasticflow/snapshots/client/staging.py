"""A worker's connection to its node's writer: shared memory to fill, staged shards, requests and reports."""

from __future__ import annotations

import contextlib
import math
import os
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from elasticflow import events
from elasticflow.errors import SnapshotError, StagingLimitError
from elasticflow.snapshots.client import channel as channels
from elasticflow.snapshots.client.messages import (
    GiveBack,
    Hello,
    NoSlots,
    PersistBegun,
    Refused,
    Released,
    Report,
    RequestPersist,
    Reserve,
    RetentionDone,
    Slots,
    SnapshotReport,
    Stage,
)
from elasticflow.snapshots.format.shard_file import StagedShard
from elasticflow.snapshots.memory import Slot, map_memory
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from elasticflow.snapshots.client.channel import Channel
    from elasticflow.snapshots.client.messages import ToWorker, ToWriter, WriterReport
    from elasticflow.snapshots.format.pieces import Part
    from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry

Answer = TypeVar("Answer")

_LOOK_S, _MOMENT_S = 1.0, 0.002
# A store may be slow; a writer that sends nothing for longer than this hangs.
_LONGEST_WRITE_S = 3600.0
# Snapshots staged by a worker and not committed yet; a commit takes a tenth of a second where many are kept.
MOST_OPEN = 8
_TIDY_LIMIT_S = 5.0


class StagingClient:
    """One rank's connection to its node's writer, by which it stages shards and receives reports; used from one thread.

    Its shared memory is either staging buffers or the slots of the memory tier (`MemoryTierClient`). There are two
    buffers per rank, or one where memory is short: while one is being written, the other can be filled; when all are
    being written, `buffer` waits, so a slow store delays the next snapshot and never grows memory. Methods that send or receive
    raise SnapshotError if the writer died.

    Attributes:
        handlers: Called with a message, by its type; a message without a handler is ignored.
        waiting: Called every second while `receive_one` waits, for an hour at most.
        dropping: Called with a piece of shared memory before it is given up.
        slots: The shared memory reserved last; empty until the writer has it ready.
        single: The reason why this rank has one buffer; None: it has two.
        declined: The writer's reason for giving no optional slots, if it gave none.
        no_more: The writer's reason for giving no further slot, if it gave none.
    """

    def __init__(self, channel: Channel[ToWriter, ToWorker]) -> None:
        self._channel = channel
        self.waiting: Callable[[], None] = lambda: None
        self.dropping: Callable[[Slot], None] = lambda _: None
        self.slots: list[Slot] = []
        self._reserved = 0
        # When `waiting` was called last.
        self._waited = 0.0
        self._is_optional = False
        self.declined: str | None = None
        self.no_more: str | None = None
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
        self.handlers: dict[type[ToWorker], Callable[[Any], None]] = {
            Slots: self._map,
            Released: lambda message: self._writing.discard(message.number),
            NoSlots: self._refuse,
            PersistBegun: self._note_begun,
            Report: self._note_outcome,
            RetentionDone: lambda message: self._untidied.discard(message.name),
        }

    @classmethod
    def connect(
        cls,
        address: str,
        *,
        rank: int,
        world_size: int,
        local_world_size: int,
        generation: int,
        local_rank: int | None = None,
        part: Part | None = None,
        timeout_s: float = 60.0,
    ) -> Self:
        """Return this rank's connection. Every rank.

        The writer answers once every snapshot of an earlier generation is committed or given up, so that
        `Catalog.newest()` is final after this call.

        Args:
            local_rank: Number among this node's ranks; None: each node has as many, one after the other.
            part: Rows of sharded tensors that this rank holds; None: it holds whole ones.

        Raises:
            SnapshotError: there is no writer, it did not answer in time, or it serves a later generation already.
        """
        try:
            channel = channels.connect(address, timeout_s)
            number = rank % local_world_size if local_rank is None else local_rank
            channel.send(Hello(rank, number, world_size, local_world_size, generation, part))
            answer = channel.receive(timeout_s)
        except TimeoutError:
            raise SnapshotError(f"the snapshot writer did not answer within {timeout_s:g} s") from None
        except OSError as error:
            raise SnapshotError(f"the snapshot writer cannot be reached: {error}") from None
        if answer is None or isinstance(answer, Refused):
            channel.close()
            raise SnapshotError(
                f"the snapshot writer refused: {'it ended' if answer is None else answer.reason}"
            )
        return cls(channel)

    @property
    def descriptors(self) -> deque[int]:
        """Descriptors that came with messages, oldest first; the caller that takes a descriptor closes it."""
        return self._channel.descriptors

    def fileno(self) -> int:
        """Return the connection's descriptor, for select."""
        return self._channel.fileno()

    def close(self) -> None:
        """Close the connection; the writer still writes the staged shards, and keeps the held ones."""
        self._drop_slots()
        self._channel.close()

    def send(self, message: ToWriter) -> None:
        """Send a message to the writer."""
        try:
            self._channel.send(message)
        except OSError as error:
            raise SnapshotError(f"the snapshot writer died: {error}") from None

    def receive_waiting(self) -> None:
        """Handle all messages that have arrived; never waits."""
        while True:
            try:
                message = self._channel.receive(0)
            except TimeoutError:
                return
            self._handle(message)

    def ask(
        self, request: ToWriter, *answers: type[Answer], complaint: str, limit_s: float | None = None
    ) -> Answer:
        """Send *request*; return the first message of the classes *answers*. Those before it are handled.

        Raises:
            SnapshotError: the writer died, or did not answer within *limit_s*; the text has *complaint*.
        """
        self.send(request)
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while not isinstance(message := self.receive_one(deadline, complaint), answers):
            pass
        return message

    def wait_a_moment(self, deadline: float | None, complaint: str) -> None:
        """Wait for something that the writer does without a message; handle messages that have arrived.

        Raises:
            SnapshotError: the writer died, or *deadline* is over; the text has *complaint*.
        """
        if deadline is not None and time.monotonic() >= deadline:
            raise SnapshotError(f"snapshot writer: {complaint} in time")
        self.receive_waiting()
        time.sleep(_MOMENT_S)
        if (now := time.monotonic()) > self._waited + _LOOK_S:
            self._waited = now
            self.waiting()

    def receive_one(self, deadline: float | None, complaint: str) -> ToWorker:
        """Wait for a message and handle it; return it.

        Args:
            deadline: Time of `time.monotonic`; None waits for ever.
            complaint: Text of the error if no message comes.

        Raises:
            SnapshotError: the writer died, or no message came in time.
        """
        began = time.monotonic()
        while True:
            left = math.inf if deadline is None else deadline - time.monotonic()
            try:
                return self._handle(self._channel.receive(min(max(left, 1e-3), _LOOK_S)))
            except TimeoutError:
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    raise SnapshotError(f"snapshot writer: {complaint} in time") from None
                if now < began + _LONGEST_WRITE_S:
                    self.waiting()

    def _handle(self, message: ToWorker | None) -> ToWorker:
        if message is None:
            raise SnapshotError("the snapshot writer died")
        handler = self.handlers.get(type(message))
        if handler is not None:
            handler(message)
        return message

    def reserve(self, nbytes: int, *, is_held: bool = False, is_optional: bool = False) -> None:
        """Ask for shared memory of *nbytes* per slot, if there is less, and return at once.

        The writer makes it ready while the worker continues: slots of the memory tier with *is_held*, else two buffers,
        or one where memory is short. Not between `buffer` and `stage`: larger ones take the place of the old ones.
        """
        if nbytes > self._reserved:
            self._drop_slots()
            self._reserved, self._is_optional = nbytes, is_optional
            self.send(Reserve(nbytes, is_held, is_optional))

    def reserve_more(self) -> None:
        """Ask for another slot of the memory tier, beside those that this rank has, and return at once."""
        self.no_more = None
        self.send(Reserve(self._reserved, is_held=True, is_optional=True, is_more=True))

    def give_back(self, slot: Slot) -> None:
        """Give back *slot* of the memory tier, which this rank has locked, and which has no label."""
        self.dropping(slot)
        self.slots.remove(slot)
        self.send(GiveBack(slot.number))
        os.close(slot.descriptor)

    def give_up_slots(self) -> None:
        """Forget the slots of the memory tier; the writer takes them back at the next `reserve`."""
        self._drop_slots()
        self._reserved = 0

    def buffer(self, nbytes: int, timeout_s: float | None = None) -> memoryview:
        """Return a free staging buffer of *nbytes*; waits while all are being written.

        It also waits while `MOST_OPEN` staged snapshots are not committed: small snapshots are written faster than they
        are committed, and a run that ends waits for all of them.

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
        tensors: list[TensorEntry],
        nbytes: int,
        record: SnapshotRecord | None = None,
        refusal: str | None = None,
    ) -> None:
        """Hand the buffer last given by `buffer` to the writer and return at once.

        Args:
            name: The snapshot's folder name, the same on every rank, never used before.
            tensors: Place of each tensor of this rank's shard; may be empty.
            record: Rank 0's; None on other ranks.
            refusal: The reason why the buffer lacks the shard, so that the snapshot fails on every rank; None: it has the shard.
        """
        slot, self._filling = self._filling, None
        assert slot is not None or not nbytes, "stage() without buffer()"
        number = None if slot is None else slot.number
        if number is not None:
            self._writing.add(number)
        self._open.add(name)
        self._untidied.add(name)
        self.send(Stage(name, step, number, StagedShard(tensors, nbytes, record), refusal))
        fault_injection.reach("snapshot.after_stage")

    def request_persist(self, step: int, trigger: str) -> None:
        """Ask for a snapshot on the store of the memory tier's state at *step*, or later if the writer is busy.

        It replaces earlier requests that are not begun. Every rank asks.
        """
        if step > self._begun:
            self._requested = step
            self.send(RequestPersist(step, trigger))

    def await_begun(self) -> None:
        """Wait until the writer has begun to write the snapshot that `request_persist` asked for last."""
        while (step := self._requested) is not None:
            self.receive_one(None, f"no word of step {step}")

    @property
    def is_requested(self) -> bool:
        """True while a `request_persist` is not fulfilled."""
        return self._requested is not None

    @property
    def open_names(self) -> frozenset[str]:
        """Names of the staged snapshots without an outcome."""
        return frozenset(self._open)

    @property
    def is_awaiting(self) -> bool:
        """True while a staged snapshot has no outcome, or a request is not fulfilled."""
        return bool(self._open) or self._requested is not None

    @property
    def has_reports(self) -> bool:
        """True if reports were received that `reports` has not returned, as while `buffer` waited."""
        return bool(self._reports)

    def reports(self) -> list[WriterReport | PersistBegun]:
        """Return the writer's reports since the last call; does not wait."""
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

    def _note_outcome(self, message: Report) -> None:
        report = message.report
        if isinstance(report, SnapshotReport) and report.event != events.SNAPSHOT_REMOVED:
            self._open.discard(report.name)
        self._reports.append(report)

    def _refuse(self, message: NoSlots) -> None:
        if message.is_more:
            self.no_more = message.reason
            return
        if self._is_optional:
            self.declined = message.reason
            return
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
            self.dropping(slot)
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
        slots = [
            Slot(number, descriptor, size, map_memory(descriptor, size))
            for number, descriptor, size in zip(message.numbers, descriptors, message.sizes, strict=True)
        ]
        self.slots = [*slots, *self.slots] if message.is_more else slots
