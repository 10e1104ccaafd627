"""The memory tier: the newest state that all ranks of this node staged, held by the writer.

Each rank has three slots: one that it fills, one that holds what it filled before, and one that may be on its way to
the store. Ranks step together, so no rank is more than one step ahead, and what the slowest has filled is still held
by all. Workers that die leave their slots with their writer; their successors go on from what lies there, and then
take the slots over. The tier covers one node: it holds a set only if all ranks of the group are here.
"""

from __future__ import annotations

import copy
import json
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.format.shard_file import SnapshotRecord
from elasticflow.snapshots.memory.slots import Label, Slot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.snapshots.format.shard_file import StagedShard
    from elasticflow.snapshots.memory.buffers import Buffer, BufferPool

SLOTS = 3
# Layouts of one rank that labels may still refer to.
_LAYOUTS = 2 * SLOTS
# Tries to lock a set while ranks go on to newer ones.
_TRIES = 5


@dataclass(eq=False)
class RankSlots:
    """One rank's slots, and how its shares are laid out.

    Attributes:
        rank: Whose.
        world_size: Ranks of its group, all on this node.
        generation: Of the worker that has it, or had it last.
        slots: With their buffers.
        is_detached: That worker is gone.
    """

    rank: int
    world_size: int
    generation: int
    slots: list[tuple[Slot, Buffer]]
    layouts: dict[tuple[int, int], StagedShard] = field(default_factory=dict)
    is_detached: bool = False

    def buffers(self) -> list[Buffer]:
        """Return the buffers, the one that was filled last at the end."""
        return [buffer for _, buffer in sorted(self.slots, key=lambda pair: _age(pair[0]))]


@dataclass(frozen=True)
class FilledSlot:
    """One rank's part of a held set: where it lies, its label, and how it is laid out."""

    slot: Slot
    buffer: Buffer
    label: Label
    layout: StagedShard


@dataclass(frozen=True)
class SlotSet:
    """What all ranks staged at one step."""

    generation: int
    step: int
    slots: dict[int, FilledSlot]

    @property
    def place(self) -> tuple[int, int]:
        """Generation and step: what is newer is greater."""
        return self.generation, self.step

    def metadata(self) -> tuple[str, SnapshotRecord]:
        """Return the set's name and rank 0's record, as it was at this step."""
        slot = self.slots[0]
        assert slot.layout.record is not None, "rank 0 describes its shard with a record"
        metadata = json.loads(slot.label.metadata)
        content = copy.deepcopy(slot.layout.record.to_json())
        for path, value in metadata["changed"]:
            parent: Any = content
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = value
        return metadata["name"], SnapshotRecord.from_json(content)


@dataclass(frozen=True)
class PersistRequest:
    """A generation's request for a snapshot on the store, of this step or a later one."""

    generation: int
    step: int
    trigger: str

    @property
    def place(self) -> tuple[int, int]:
        """Generation and step."""
        return self.generation, self.step


class MemoryTierSlots:
    """Slots of all ranks of a node; safe to use from all the writer's threads."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._lock = threading.RLock()
        self._rank_slots: dict[int, RankSlots] = {}
        self._request: PersistRequest | None = None
        # Generation and step of the set that was last handed out to be written.
        self._written = (0, 0)
        # What this generation or an older one held is not handed out.
        self._invalid = 0

    def attach(
        self, rank: int, world_size: int, generation: int, nbytes: int, before: RankSlots | None
    ) -> RankSlots:
        """Return slots of *nbytes* for a rank: those its predecessor left if they fit, with what lies in them.

        Args:
            rank: Who asks.
            world_size: Ranks of its group, all on this node.
            generation: Its own.
            nbytes: Bytes of each slot, its label included.
            before: Its slots so far, if they became too small.

        Raises:
            LimitError: three slots for each rank are more than the limit allows.
            OSError: the machine has no memory for them.
        """
        with self._lock:
            old = self._rank_slots.get(rank)
            if old is not None and old.is_detached and old.world_size == world_size and _fits(old, nbytes):
                old.generation, old.is_detached = generation, False
                return old
            if before is not None:
                self.detach(before)
            self.clear()
            buffers, _ = self._pool.take_up_to(SLOTS, nbytes, least=SLOTS, workers=world_size)
            slots = [(Slot(b.number, b.descriptor, b.size, b.view), b) for b in buffers]
            for slot, buffer in slots:
                buffer.is_slot = True
                # The buffer may have been a slot of another rank.
                slot.clear_label()
            rank_slots = self._rank_slots[rank] = RankSlots(rank, world_size, generation, slots)
            return rank_slots

    def describe(self, rank_slots: RankSlots, number: int, layout: StagedShard) -> None:
        """Take note of how a rank's next shares are laid out."""
        with self._lock:
            rank_slots.layouts[rank_slots.generation, number] = layout
            while len(rank_slots.layouts) > _LAYOUTS:
                del rank_slots.layouts[next(iter(rank_slots.layouts))]

    def detach(self, rank_slots: RankSlots) -> None:
        """Keep what lies in *rank_slots*, whose worker is gone, unless another worker of its rank is here already."""
        with self._lock:
            rank_slots.is_detached = True
            if self._rank_slots.get(rank_slots.rank) is not rank_slots:
                self._give_back(rank_slots)

    def clear(self) -> None:
        """Drop what dead workers left."""
        with self._lock:
            for rank_slots in [b for b in self._rank_slots.values() if b.is_detached]:
                del self._rank_slots[rank_slots.rank]
                self._give_back(rank_slots)

    def newest(self, before: int | None = None) -> SlotSet | None:
        """Return the newest set that is whole.

        Args:
            before: Only if all who could still write in it are of generations before this one, and gone.
        """
        with self._lock:
            if before is not None and any(
                not b.is_detached and b.generation < before for b in self._rank_slots.values()
            ):
                return None
            ranks = sorted(self._rank_slots)
            filled = [dict(_labels(self._rank_slots[rank])) for rank in ranks]
            worlds = {rank_slots.world_size for rank_slots in self._rank_slots.values()}
            if worlds != {len(filled)}:
                return None
            common = {at for at in set(filled[0]).intersection(*filled[1:]) if at[0] > self._invalid}
            if not common:
                return None
            generation, step = max(common)
            slots = {rank: labels[generation, step] for rank, labels in zip(ranks, filled, strict=True)}
            return SlotSet(generation, step, slots)

    def request(self, request: PersistRequest | None) -> None:
        """A snapshot is wanted on the store; the newest request stands for those before, None for none.

        Every rank has the same request: one that comes when another rank's has been fulfilled already is ignored.
        """
        with self._lock:
            if request is None or request.place > self._written:
                self._request = request

    def invalidate(self, generation: int) -> None:
        """Nothing that *generation* or an older one holds is handed out any more, to the store or to successors."""
        with self._lock:
            self._invalid = max(self._invalid, generation)
            self._request = None

    def take_for_writing(self) -> tuple[SlotSet, PersistRequest] | None:
        """Return the newest set, locked for writing, if a snapshot is asked for; the same set only once."""
        with self._lock:
            for _ in range(_TRIES):
                request, slot_set = self._request, self.newest()
                if request is None or slot_set is None or slot_set.place < request.place:
                    return None
                if slot_set.place == self._written:
                    self._request = None
                elif _lock(slot_set):
                    for slot in slot_set.slots.values():
                        slot.buffer.busy = True
                    self._request, self._written = None, slot_set.place
                    return slot_set, request
            return None

    def _give_back(self, rank_slots: RankSlots) -> None:
        for _, buffer in rank_slots.slots:
            self._pool.disown(buffer)


def _lock(slot_set: SlotSet) -> bool:
    """Lock all slots of a set; False, and none is locked, if a rank was quicker."""
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


def _fits(rank_slots: RankSlots, nbytes: int) -> bool:
    return all(nbytes <= buffer.size for _, buffer in rank_slots.slots)


def _age(slot: Slot) -> tuple[int, int]:
    label = slot.label()
    return (label.generation, label.step) if label is not None else (0, 0)


def _labels(rank_slots: RankSlots) -> Iterator[tuple[tuple[int, int], FilledSlot]]:
    for slot, buffer in rank_slots.slots:
        label = slot.label()
        if label is not None and (layout := rank_slots.layouts.get((label.generation, label.layout))):
            yield (label.generation, label.step), FilledSlot(slot, buffer, label, layout)
