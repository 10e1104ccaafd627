"""The memory tier: the newest state that the ranks of this node hold in shared memory, which the writer owns.

Each rank has three slots: the rank fills the first, has filled the second before, and a third may be on its way to the store.
Where the tier is optional a rank has two, and a third only while the older is on its way to the store, if there is memory to spare;
else it fills none of them meanwhile.
Ranks step together: no rank is more than one held step ahead, so all still hold the step that the slowest filled. When
workers die, their slots stay with the writer; their successors resume from the content and then take the slots over.
The ranks of each node hold the whole state among themselves, so that any one node has all of it. Of a snapshot on the store each node
writes what its ranks would store without the tier. A node that lacks the state receives it from another node.
"""

from __future__ import annotations

import copy
import errno
import json
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, assert_never

from elasticflow import events
from elasticflow.protocol.snapshot_settings import HELD_MOST_OF_FREE, HELD_STATES, HELD_STATES_AUTO
from elasticflow.snapshots.client.messages import (
    RECEIVED,
    CommittedPosition,
    Describe,
    GiveBack,
    Held,
    HeldSet,
    HeldShard,
    Invalidate,
    PersistBegun,
    Recall,
    Receive,
    Receiving,
    RequestPersist,
    SnapshotReport,
)
from elasticflow.snapshots.format.shard_file import SnapshotRecord
from elasticflow.snapshots.memory import TAIL, LimitError
from elasticflow.snapshots.writer.pending import PendingSnapshot, State
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.snapshots.client.messages import WriterReport
    from elasticflow.snapshots.format.shard_file import StagedShard
    from elasticflow.snapshots.memory import Buffer, BufferPool, Label, Slot
    from elasticflow.snapshots.writer.connected_rank import ConnectedRank
    from elasticflow.snapshots.writer.pending import PendingSnapshots

# Trigger of a snapshot that is written because its launch ended without it.
_AT_THE_END = "crash"
# Layouts kept of each rank: labels may still refer to them.
_LAYOUTS = 2 * HELD_STATES
# Tries to lock a set, while ranks continue to newer ones.
_TRIES = 5


@dataclass(frozen=True)
class HeldLayout:
    """The layout of shards in slots, and the rank that filled them."""

    shard: StagedShard
    rank: int
    world_size: int


@dataclass(eq=False)
class RankSlots:
    """One rank's slots, and how its shards are laid out.

    Attributes:
        generation: Generation of the worker that has the slots, or had them last.
        layouts: By generation and number of the `Describe`.
    """

    local_rank: int
    local_world_size: int
    generation: int
    slots: list[Buffer]
    layouts: dict[tuple[int, int], HeldLayout] = field(default_factory=dict)
    is_detached: bool = False

    def oldest_first(self) -> list[Buffer]:
        """Return the slots; the one that was filled last comes last."""
        return sorted(self.slots, key=_age)


@dataclass(frozen=True)
class FilledSlot:
    """One rank's part of a set: where it lies, its label, and how it is laid out."""

    slot: Buffer
    label: Label
    layout: HeldLayout


@dataclass(frozen=True)
class SlotSet:
    """The slots that all ranks of the node hold at one step, by number of the rank on the node."""

    generation: int
    step: int
    slots: dict[int, FilledSlot]

    @property
    def age(self) -> tuple[int, int]:
        """Generation and step: the newer is greater."""
        return self.generation, self.step

    @property
    def world_size(self) -> int:
        """Ranks of the group on all nodes."""
        return self.slots[0].layout.world_size

    def metadata(self) -> tuple[str, SnapshotRecord]:
        """Return the name of the snapshot and the record, as they were at this step."""
        slot = self.slots[0]
        assert slot.layout.shard.record is not None, (
            "the first rank of a node describes its shard with a record"
        )
        metadata = json.loads(slot.label.metadata)
        content = copy.deepcopy(slot.layout.shard.record.to_json())
        for path, value in metadata["changed"]:
            parent: Any = content
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
        return metadata["name"], SnapshotRecord.from_json(content)


class MemoryTierSlots:
    """Slots of all ranks of a node; may be used from all the writer's threads."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lock = threading.RLock()
        self._rank_slots: dict[int, RankSlots] = {}
        # Age of the state that is wanted on the store, this one or a newer one, and the trigger.
        self._request: tuple[tuple[int, int], str] | None = None
        # Free memory when the first rank of a generation, or the first while a set is being written, asked for optional slots.
        self._spare: tuple[tuple[int, int], int] | None = None
        # Age of the set that was last taken for writing.
        self._written = (0, 0)
        # States that this generation or an older one holds must not be used.
        self._invalid = 0

    @property
    def is_used(self) -> bool:
        """True if a rank has, or had, slots."""
        return bool(self._rank_slots)

    def attach(
        self,
        local_rank: int,
        local_world_size: int,
        generation: int,
        nbytes: int,
        before: RankSlots | None,
        *,
        is_optional: bool = False,
    ) -> RankSlots:
        """Return slots of *nbytes* for a rank: those of its predecessor if they fit, with their content.

        Args:
            nbytes: Bytes of each slot, its label included.
            before: The worker's slots so far, which became too small.
            is_optional: Take two slots, and only if there is memory to spare for all ranks; alike for all of a generation.

        Raises:
            LimitError: the slots for each rank are more than the limit allows.
            OSError: the machine has no memory for them, or none to spare.
        """
        with self._lock:
            old = self._rank_slots.get(local_rank)
            count = HELD_STATES_AUTO if is_optional else HELD_STATES
            is_alike = old is not None and old.is_detached and old.local_world_size == local_world_size
            # A node that received its state has one slot of each rank.
            fits = old is not None and all(nbytes <= slot.size for slot in old.slots)
            if old is not None and is_alike and fits and len(old.slots) >= count:
                old.generation, old.is_detached = generation, False
                return old
            if before is not None:
                self.detach(before)
            self.clear()
            if is_optional:
                self._require_spare((generation, 0), count * nbytes * local_world_size)
            slots = self._take(count, nbytes, local_world_size)
            rank_slots = self._rank_slots[local_rank] = RankSlots(
                local_rank, local_world_size, generation, slots
            )
            return rank_slots

    def add(self, rank_slots: RankSlots) -> Buffer:
        """Return another slot for a rank, which it fills while a set is being written.

        Raises:
            LimitError: so many slots for each rank are more than the limit allows.
            OSError: there is no memory to spare for another slot of each rank.
        """
        with self._lock:
            size, workers = min(slot.size for slot in rank_slots.slots), rank_slots.local_world_size
            self._require_spare(self._written, size * workers)
            slot = self._take(1, size, workers, besides=len(rank_slots.slots))[0]
            rank_slots.slots.append(slot)
            return slot

    def remove(self, rank_slots: RankSlots, number: int) -> None:
        """Release the slot that a rank gives back."""
        with self._lock:
            slot = next(slot for slot in rank_slots.slots if slot.number == number)
            rank_slots.slots.remove(slot)
            self._pool.release(slot)

    def receive(self, message: Receive) -> list[Buffer]:
        """Return a slot for each part of a state of another node; it counts as held once the slots have their labels.

        Raises:
            LimitError: the slots are more than the limit allows.
            OSError: there is no memory for them, or none to spare.
        """
        fault_injection.reach("tier.before_receive")
        with self._lock:
            self.clear()
            if self._rank_slots:
                raise OSError(errno.EBUSY, "a worker of an older generation lives")
            count = len(message.shards)
            self._spare = None
            self._require_spare((message.generation, 0), sum(shard.nbytes + TAIL for shard in message.shards))
            # The generation that asks next measures anew.
            self._spare = None
            received = {}
            try:
                for number, shard in enumerate(message.shards):
                    slots = self._take(1, shard.nbytes + TAIL, count)
                    # No rank of this node filled it.
                    layouts = {
                        (message.generation, RECEIVED): HeldLayout(shard, -1 - number, message.world_size)
                    }
                    received[number] = RankSlots(
                        number, count, message.generation, slots, layouts, is_detached=True
                    )
            except (OSError, LimitError):
                for rank_slots in received.values():
                    self._give_back(rank_slots)
                raise
            self._rank_slots = received
            return [rank_slots.slots[0] for rank_slots in received.values()]

    def _take(self, count: int, nbytes: int, workers: int, besides: int = 0) -> list[Buffer]:
        slots, _ = self._pool.take_up_to(count, nbytes, least=count, workers=workers, besides=besides)
        for slot in slots:
            slot.is_held = True
            # The buffer may have been a slot before.
            slot.clear_label()
        return slots

    def _require_spare(self, occasion: tuple[int, int], nbytes: int) -> None:
        """Raise if *nbytes* are more than may be taken; the first rank decides for all on each *occasion*, since it takes memory."""
        if self._spare is None or self._spare[0] != occasion:
            self._spare = occasion, self._pool.available()
        spare = int(self._spare[1] * HELD_MOST_OF_FREE)
        if nbytes > spare:
            text = f"{nbytes >> 20} MiB are needed on this node, and at most {spare >> 20} MiB, half of the free memory, are taken"
            raise OSError(errno.ENOMEM, text)

    def describe(self, rank_slots: RankSlots, number: int, layout: HeldLayout) -> None:
        """Remember how a rank's next shards are laid out."""
        with self._lock:
            rank_slots.layouts[rank_slots.generation, number] = layout
            while len(rank_slots.layouts) > _LAYOUTS:
                del rank_slots.layouts[next(iter(rank_slots.layouts))]

    def detach(self, rank_slots: RankSlots) -> None:
        """Keep the slots of a worker that is gone, unless another worker of the same rank has its own already."""
        with self._lock:
            rank_slots.is_detached = True
            if self._rank_slots.get(rank_slots.local_rank) is not rank_slots:
                self._give_back(rank_slots)

    def clear(self) -> None:
        """Give the slots of dead workers back."""
        with self._lock:
            for rank_slots in [slots for slots in self._rank_slots.values() if slots.is_detached]:
                del self._rank_slots[rank_slots.local_rank]
                self._give_back(rank_slots)

    def newest(self, before: int | None = None, older_than: tuple[int, ...] = ()) -> SlotSet | None:
        """Return the newest set that is whole, or None.

        Args:
            before: A generation; None is returned while a worker of an older generation lives, which could still write.
            older_than: Generation and step, of which an older set is wanted; empty: any.
        """
        with self._lock:
            if before is not None and any(
                not slots.is_detached and slots.generation < before for slots in self._rank_slots.values()
            ):
                return None
            ranks = sorted(self._rank_slots)
            filled = [dict(_labels(self._rank_slots[rank])) for rank in ranks]
            counts = {rank_slots.local_world_size for rank_slots in self._rank_slots.values()}
            if counts != {len(filled)}:
                return None
            common = {
                age
                for age in set(filled[0]).intersection(*filled[1:])
                if age[0] > self._invalid and (not older_than or age < older_than)
            }
            if not common:
                return None
            generation, step = max(common)
            slots = {rank: labels[generation, step] for rank, labels in zip(ranks, filled, strict=True)}
            return SlotSet(generation, step, slots)

    def request(self, age: tuple[int, int], trigger: str, *, is_again: bool = False) -> None:
        """Remember that a snapshot of this generation and step or a later one is wanted on the store, instead of older requests.

        Every rank makes the same request; it is ignored if an equal request was fulfilled already, unless *is_again*.
        """
        with self._lock:
            if is_again:
                self._written = 0, 0
            if age > self._written:
                self._request = age, trigger

    def drop_request(self) -> None:
        """Forget the request."""
        with self._lock:
            self._request = None

    def invalidate(self, generation: int) -> None:
        """Forbid any further use of the state that *generation* or an older one holds, by the store or by successors."""
        with self._lock:
            self._invalid = max(self._invalid, generation)
            self._request = None

    def take_for_writing(self) -> tuple[SlotSet, str] | None:
        """Return the newest set, locked, and the trigger of its request, if there is one; each set is returned once."""
        with self._lock:
            for _ in range(_TRIES):
                request, slot_set = self._request, self.newest()
                if request is None or slot_set is None or slot_set.age < request[0]:
                    return None
                if slot_set.age == self._written:
                    self._request = None
                elif _lock(slot_set):
                    for filled in slot_set.slots.values():
                        filled.slot.is_busy = True
                    self._request, self._written = None, slot_set.age
                    return slot_set, request[1]
            return None

    def _give_back(self, rank_slots: RankSlots) -> None:
        # Once only: a worker that got no larger slots leaves later, and still has these.
        slots, rank_slots.slots = rank_slots.slots, []
        for slot in slots:
            self._pool.disown(slot)


def _lock(slot_set: SlotSet) -> bool:
    """Lock all slots of a set; False, with none locked, if a rank has begun to fill one of them."""
    locked: list[Slot] = []
    for filled in slot_set.slots.values():
        if not filled.slot.lock():
            break
        locked.append(filled.slot)
        if filled.slot.label() != filled.label:
            break
    else:
        return True
    for slot in locked:
        slot.unlock()
    return False


def _age(slot: Slot) -> tuple[int, int]:
    label = slot.label()
    return (0, 0) if label is None else label.age


def _labels(rank_slots: RankSlots) -> Iterator[tuple[tuple[int, int], FilledSlot]]:
    for slot in rank_slots.slots:
        label = slot.label()
        if label is not None and (layout := rank_slots.layouts.get((label.generation, label.layout))):
            yield label.age, FilledSlot(slot, label, layout)


MemoryTierMessage = GiveBack | Describe | RequestPersist | Recall | Receive | Invalidate


class MemoryTierService:
    """Serves the memory tier; may be used from all the writer's threads.

    Args:
        write: Starts to write a shard: rank, snapshot, how the shard lies in the buffer, the buffer, and the digest that the
            content must have; None: it is not looked at again.
        set_aside: Sets a committed snapshot aside: name, reason.
    """

    def __init__(
        self,
        pool: BufferPool,
        pending_snapshots: PendingSnapshots,
        write: Callable[[int, PendingSnapshot, StagedShard, Buffer, int | None], None],
        set_aside: Callable[[str, str], None],
    ) -> None:
        self._pending_snapshots, self._write, self._set_aside = pending_snapshots, write, set_aside
        pending_snapshots.on_room = self.begin
        self._tier = MemoryTierSlots(pool)
        self._rank_slots: dict[ConnectedRank, RankSlots] = {}
        self._beginning = threading.Lock()
        # The newest snapshot committed out of the tier.
        self._committed: CommittedPosition | None = None
        # Snapshots taken out of the tier of the newest generation, by name, without those that were refused.
        self._taken: dict[str, PendingSnapshot] = {}

    @property
    def is_used(self) -> bool:
        """True if workers hold their state in memory, or a worker that is gone did."""
        return self._tier.is_used

    def handle(self, worker: ConnectedRank, message: MemoryTierMessage) -> None:
        """Carry out the request of *worker*."""
        match message:
            case GiveBack():
                self._tier.remove(self._rank_slots[worker], message.number)
            case Describe():
                if (rank_slots := self._rank_slots.get(worker)) is not None:
                    layout = HeldLayout(message.shard, worker.rank, worker.hello.world_size)
                    self._tier.describe(rank_slots, message.number, layout)
            case RequestPersist():
                # A worker of an older generation has nothing to ask for.
                if worker in self._rank_slots and worker.generation == self._pending_snapshots.newest:
                    self._tier.request((worker.generation, message.step), message.trigger)
                    self.begin()
            case Recall():
                self._recall(worker, message.older_than)
            case Receive():
                self._receive(worker, message)
            case Invalidate():
                self._invalidate(worker.generation, message.equal_at)
            case _:
                assert_never(message)

    def attach(self, worker: ConnectedRank, nbytes: int, *, is_optional: bool = False) -> list[Buffer]:
        """Return the slots for *worker*, of *nbytes* each; the one that was filled last comes last.

        Raises:
            LimitError: the slots for each rank are more than the limit allows.
            OSError: the machine has no memory for them, or none to spare for optional ones.
        """
        rank_slots = self._tier.attach(
            worker.hello.local_rank,
            worker.hello.local_world_size,
            worker.generation,
            nbytes,
            self._rank_slots.get(worker),
            is_optional=is_optional,
        )
        self._rank_slots[worker] = rank_slots
        return rank_slots.oldest_first()

    def add(self, worker: ConnectedRank) -> Buffer:
        """Return another slot for *worker*; see `MemoryTierSlots.add`."""
        return self._tier.add(self._rank_slots[worker])

    def greet(self) -> None:
        """Drop the requests of older generations: a worker of the newest one is here."""
        self._tier.drop_request()

    def leave(self, worker: ConnectedRank) -> None:
        """Keep the slots of *worker*, which is gone, for its successor."""
        rank_slots = self._rank_slots.pop(worker, None)
        if rank_slots is not None:
            self._tier.detach(rank_slots)

    def switch_off(self, worker: ConnectedRank) -> None:
        """Give back the slots of all ranks that are gone, and of *worker*, which trains without: what they hold becomes old."""
        self.leave(worker)
        self._tier.clear()

    def begin(self) -> None:
        """Begin to write the newest set, if a snapshot is wanted and no other is pending."""
        with self._beginning:
            if not self._pending_snapshots.has_room:
                return
            taken = self._tier.take_for_writing()
            if taken is not None:
                self._begin(*taken)

    def finish(self) -> None:
        """Begin to write the newest set, unless it is on the store: no more workers come. Of several nodes rank 0's writes all of it."""
        self._pending_snapshots.end_open()
        self._pending_snapshots.await_free()
        slot_set = self._tier.newest()
        if slot_set is not None and slot_set.slots[0].layout.rank == 0:
            taken = self._taken.get(slot_set.metadata()[0])
            # A store that did not take it may be well again.
            has_failed = taken is not None and taken.state is not State.COMMITTED
            self._tier.request(slot_set.age, _AT_THE_END, is_again=has_failed)
            self.begin()

    def note(self, report: WriterReport) -> None:
        """Remember the newest snapshot that was committed out of the memory tier."""
        if isinstance(report, SnapshotReport) and report.event == events.SNAPSHOT_COMMITTED:
            pending = self._taken.get(report.name)
            if pending is not None and pending.record is not None:
                facts = pending.record.manifest
                self._committed = CommittedPosition(pending.name, pending.step, facts.epoch, facts.samples)

    def _begin(self, slot_set: SlotSet, trigger: str) -> None:
        name, record = slot_set.metadata()
        record = replace(record, manifest=replace(record.manifest, trigger=trigger))
        filled_by = {filled.layout.rank: filled for filled in slot_set.slots.values()}
        listeners = {w.rank: w for w in tuple(self._rank_slots) if w.generation == slot_set.generation}
        # No other node writes its part then.
        is_alone = trigger == _AT_THE_END
        pending = PendingSnapshot(
            name,
            slot_set.step,
            slot_set.generation,
            slot_set.world_size,
            len(slot_set.slots),
            staged=set(filled_by),
            record=record,
            listeners=listeners,
            is_alone=is_alone,
        )
        for older in [each for each in self._taken.values() if each.generation != slot_set.generation]:
            del self._taken[older.name]
        self._taken[name] = pending
        self._pending_snapshots.add_complete(pending)
        for listener in listeners.values():
            listener.send(PersistBegun(name, slot_set.step, trigger))
        for rank, filled in filled_by.items():
            shard = filled.layout.shard
            entries = [entry for entry in shard.tensors if is_alone or not entry.is_copy]
            layout = replace(shard, tensors=entries, record=None if rank else record)
            # A state that ranks ask for was held a moment ago, as in a staging buffer.
            digest = filled.label.digest if is_alone else None
            self._write(rank, pending, layout, filled.slot, digest)

    def _invalidate(self, generation: int, equal_at: int) -> None:
        """Refuse the snapshots taken of *generation* after step *equal_at*: its replicas differ.

        Every rank asks for this before it ends. New workers are answered only after it is done.
        """
        self._tier.invalidate(generation)
        # No other set is taken meanwhile. The first rank that asks sets aside.
        with self._beginning:
            doubtful = [
                each
                for each in self._taken.values()
                if each.generation == generation and each.step > equal_at
            ]
            reason = f"the ranks' replicas differ, and were last known to be equal after step {equal_at}"
            for pending in doubtful:
                del self._taken[pending.name]
                if not self._pending_snapshots.refuse(pending, reason):
                    self._set_aside(pending.name, reason)

    def _receive(self, worker: ConnectedRank, message: Receive) -> None:
        try:
            slots = self._tier.receive(message)
            self._committed = message.committed
        except (LimitError, OSError) as error:
            worker.send(Receiving((), getattr(error, "strerror", None) or str(error)))
        else:
            sizes = tuple(slot.size for slot in slots)
            worker.send(Receiving(sizes), tuple(slot.descriptor for slot in slots))

    def _recall(self, worker: ConnectedRank, older_than: tuple[int, ...]) -> None:
        slot_set = self._tier.newest(worker.generation, older_than)
        if slot_set is None:
            worker.send(Held(None))
            return
        name, record = slot_set.metadata()
        filled = slot_set.slots.values()
        shards = [
            HeldShard(each.slot.size, replace(each.layout.shard, record=None), each.label.digest)
            for each in filled
        ]
        held = HeldSet(
            name,
            slot_set.generation,
            slot_set.step,
            slot_set.world_size,
            record,
            self._committed,
            tuple(shards),
        )
        worker.send(Held(held), tuple(each.slot.descriptor for each in filled))
