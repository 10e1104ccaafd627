"""The writer's part of the memory tier: slots for workers, sets for the store and for successors."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from elasticflow import events
from elasticflow.snapshots.client.messages import (
    CommittedPosition,
    Describe,
    Held,
    HeldMemory,
    HeldSet,
    HeldShard,
    Invalidate,
    PersistBegun,
    Recall,
    RequestPersist,
)
from elasticflow.snapshots.client.writer_reports import SnapshotReport
from elasticflow.snapshots.memory.tier import MemoryTierSlots, PersistRequest, RankSlots, SlotSet
from elasticflow.snapshots.writer.pending import PendingSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.client.writer_reports import WriterReport
    from elasticflow.snapshots.format.shard_file import StagedShard
    from elasticflow.snapshots.memory.buffers import Buffer, BufferPool
    from elasticflow.snapshots.writer.connected_rank import ConnectedRank
    from elasticflow.snapshots.writer.pending import PendingSnapshots

# Trigger of a snapshot that is written because its launch ended without it.
_AT_THE_END = "crash"

MemoryTierMessage = Describe | RequestPersist | Recall | Invalidate


class MemoryTierService:
    """Serves the memory tier; may be used from all the writer's threads.

    Args:
        pool: Where slots come from.
        pending_snapshots: Snapshots on their way to the store.
        write: Starts to write a shard: rank, snapshot, how the shard lies in the buffer, the buffer.
        set_aside: Sets a committed snapshot aside: name, reason.
    """

    def __init__(
        self,
        pool: BufferPool,
        pending_snapshots: PendingSnapshots,
        write: Callable[[int, PendingSnapshot, StagedShard, Buffer], None],
        set_aside: Callable[[str, str], None],
    ) -> None:
        self._pending_snapshots, self._write, self._set_aside = pending_snapshots, write, set_aside
        pending_snapshots.on_free = self.begin
        self._tier = MemoryTierSlots(pool)
        self._rank_slots: dict[ConnectedRank, RankSlots] = {}
        self._beginning = threading.Lock()
        self._begun: dict[str, CommittedPosition] = {}
        # The newest snapshot committed out of the tier.
        self._committed: CommittedPosition | None = None
        # Snapshots taken out of the tier of the newest generation, without those that were refused.
        self._taken: list[PendingSnapshot] = []

    @property
    def is_used(self) -> bool:
        """Whether workers hold their state in memory, or one that is gone did."""
        return self._tier.is_used

    def handle(self, worker: ConnectedRank, message: MemoryTierMessage) -> None:
        """Do what *worker* asks for."""
        match message:
            case Describe():
                if (rank_slots := self._rank_slots.get(worker)) is not None:
                    self._tier.describe(rank_slots, message.number, message.shard)
            case RequestPersist():
                # A worker of an older generation has nothing to ask for.
                if worker in self._rank_slots and worker.generation == self._pending_snapshots.newest:
                    self._tier.request(PersistRequest(worker.generation, message.step, message.trigger))
                    self.begin()
            case Recall():
                self._recall(worker)
            case Invalidate():
                self._invalidate(worker.generation, message.equal_at)
            case _:
                assert_never(message)

    def attach(self, worker: ConnectedRank, nbytes: int) -> list[Buffer]:
        """Return the slots for *worker*, of *nbytes* each; the one that was filled last comes last.

        Raises:
            LimitError: three slots for each rank are more than the limit allows.
            OSError: the machine has no memory for them.
        """
        rank_slots = self._tier.attach(
            worker.rank, worker.hello.world_size, worker.generation, nbytes, self._rank_slots.get(worker)
        )
        self._rank_slots[worker] = rank_slots
        return rank_slots.buffers()

    def greet(self, *, is_single_node: bool) -> None:
        """Drop the requests of older generations: a worker of the newest one is here."""
        self._tier.request(None)
        # A group over several nodes trains without the tier: what it holds becomes old.
        if not is_single_node:
            self._tier.clear()

    def leave(self, worker: ConnectedRank) -> None:
        """Keep the slots of *worker*, which is gone, for its successor."""
        rank_slots = self._rank_slots.pop(worker, None)
        if rank_slots is not None:
            self._tier.detach(rank_slots)

    def begin(self) -> None:
        """Begin to write the newest set, if a snapshot is wanted and no other is pending."""
        with self._beginning:
            if not self._pending_snapshots.is_free:
                return
            taken = self._tier.take_for_writing()
            if taken is not None:
                self._begin(*taken)

    def finish(self) -> None:
        """Begin to write the newest set, unless it is on the store: no more workers come."""
        self._pending_snapshots.end_open()
        self._pending_snapshots.await_free()
        slot_set = self._tier.newest()
        if slot_set is not None:
            self._tier.request(PersistRequest(slot_set.generation, slot_set.step, _AT_THE_END))
            self.begin()

    def note(self, report: WriterReport) -> None:
        """Remember the newest snapshot that was committed out of the memory tier."""
        if isinstance(report, SnapshotReport):
            position = self._begun.pop(report.name, None)
            if position is not None and report.event == events.SNAPSHOT_COMMITTED:
                self._committed = position

    def _begin(self, slot_set: SlotSet, request: PersistRequest) -> None:
        name, record = slot_set.metadata()
        facts = replace(record.manifest, trigger=request.trigger)
        record = replace(record, manifest=facts)
        world_size = len(slot_set.slots)
        listeners = {w.rank: w for w in tuple(self._rank_slots) if w.generation == slot_set.generation}
        self._begun[name] = CommittedPosition(name, slot_set.step, facts.epoch, facts.samples)
        pending = PendingSnapshot(
            name,
            slot_set.step,
            slot_set.generation,
            world_size,
            world_size,
            staged=set(slot_set.slots),
            record=record,
            listeners=listeners,
        )
        self._taken = [taken for taken in self._taken if taken.generation == slot_set.generation]
        self._taken.append(pending)
        self._pending_snapshots.add_complete(pending)
        for listener in listeners.values():
            listener.send(PersistBegun(name, slot_set.step, request.trigger))
        for rank, slot in slot_set.slots.items():
            self._write(rank, pending, replace(slot.layout, record=None if rank else record), slot.buffer)

    def _invalidate(self, generation: int, equal_at: int) -> None:
        """Refuse what was taken of *generation* after step *equal_at*: its replicas differ.

        Every rank asks for this before it ends. New workers are answered only after it is done.
        """
        self._tier.invalidate(generation)
        # No other set is taken meanwhile. The first rank that asks sets aside.
        with self._beginning:
            doubtful = [
                taken for taken in self._taken if taken.generation == generation and taken.step > equal_at
            ]
            self._taken = [taken for taken in self._taken if taken not in doubtful]
            reason = f"the ranks' replicas differ, and were last known to be equal after step {equal_at}"
            for pending in doubtful:
                if not self._pending_snapshots.refuse(pending, reason):
                    self._set_aside(pending.name, reason)

    def _recall(self, worker: ConnectedRank) -> None:
        is_single_node = worker.hello.is_single_node
        slot_set = self._tier.newest(before=worker.generation) if is_single_node else None
        if slot_set is None:
            worker.send(Held(None))
            return
        name, record = slot_set.metadata()
        slots = slot_set.slots.values()
        shards = [HeldShard(slot.buffer.size, replace(slot.layout, record=None)) for slot in slots]
        held = HeldSet(name, slot_set.generation, slot_set.step, record, self._committed, tuple(shards))
        worker.send(Held(held))
        for slot in slots:
            worker.send(HeldMemory(), (slot.buffer.descriptor,))
