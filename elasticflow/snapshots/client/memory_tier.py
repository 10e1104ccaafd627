"""The worker's side of the memory tier: fill a slot, label it, resume from a predecessor's state."""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from elasticflow.protocol.snapshot_settings import HELD_STATES_AUTO
from elasticflow.snapshots.client.messages import (
    RECEIVED,
    Describe,
    Held,
    HeldSet,
    Invalidate,
    Recall,
    Receive,
    Receiving,
)
from elasticflow.snapshots.format.shard_file import StagedShard
from elasticflow.snapshots.memory import MOST_METADATA, TAIL, Label, Slot, digest_of, map_memory
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry

_ANSWER_LIMIT_S = 60.0
# A snapshot that takes longer to write is worth another slot meanwhile.
_LONG_WRITE_S = 1.0
# Made once: making an encoder takes longer than encoding the metadata of a step.
_JSON = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True)
class RecalledState:
    """The state that the ranks of an earlier generation held at one step, in the memory of this node."""

    held: HeldSet
    memories: list[mmap.mmap]

    @property
    def age(self) -> tuple[int, int]:
        """Generation and step: the newer is greater."""
        return self.held.generation, self.held.step

    @property
    def parent(self) -> str | None:
        """Name of the newest committed snapshot before it, if any."""
        committed = self.held.committed
        return self.held.record.manifest.parent if committed is None else committed.name

    @property
    def shards(self) -> list[tuple[Sequence[TensorEntry], mmap.mmap]]:
        """The place of each tensor, and the memory, for each rank of the node."""
        pairs = zip(self.held.shards, self.memories, strict=True)
        return [(shard.shard.tensors, memory) for shard, memory in pairs]

    def damaged(self, part: int, parts: int) -> int | None:
        """Return the number of a shard that has changed since it was held, if any. Looks at one of *parts* parts of the shards."""
        for number in range(part, len(self.memories), parts):
            shard = self.held.shards[number]
            if digest_of(self.memories[number], shard.shard.nbytes) != shard.digest:
                return number
        return None


class MemoryTierClient:
    """One rank's slots; used from the thread that uses the connection. Methods raise SnapshotError if the writer died.

    Args:
        link: To the node's writer; its slots are those of the memory tier, the one that was filled last at the end.
        is_optional: Train without slots if the writer has no memory for them. There are two slots then, and a third while a
            snapshot is being written from one, if there is memory for it.
    """

    def __init__(self, link: StagingClient, generation: int, *, is_optional: bool = False) -> None:
        self._link, self._generation, self._is_optional = link, generation, is_optional
        # Number and bytes of the layout described last.
        self._layout = self._nbytes = 0
        # Rank 0's record as JSON, as it was described last.
        self._described: dict[str, Any] = {}
        # The first time at which no slot was free since the last was filled, and whether another was asked for.
        self._short_since: float | None = None
        self._has_asked = False

    def reserve(self, nbytes: int) -> None:
        """Ask for slots for shards of *nbytes* and return at once; see `StagingClient.reserve`."""
        # A run that holds a state cannot do without slots any more: some ranks might not learn of it.
        is_optional = self._is_optional and not self._link.slots
        self._link.reserve(nbytes + TAIL, is_held=True, is_optional=is_optional)

    @property
    def declined(self) -> str | None:
        """The writer's reason for giving no slots, if it gave none."""
        return self._link.declined

    @property
    def is_answered(self) -> bool:
        """True if the writer has answered `reserve`; never waits."""
        if not self._link.slots and self.declined is None:
            self._link.receive_waiting()
        return bool(self._link.slots) or self.declined is not None

    def await_answer(self) -> None:
        """Wait until the writer has answered `reserve`."""
        while not self.is_answered:
            self._link.receive_one(None, "no answer about slots")

    @property
    def is_free(self) -> bool:
        """True if `next_slot` would not wait, and the writer has begun to write each snapshot that was asked for; never waits."""
        if self._link.is_requested or self._has_asked:
            self._link.receive_waiting()
        if self._link.is_requested:
            return False
        free = self._lock_free()
        for slot in free:
            slot.unlock()
        return bool(free)

    def ask_for_another(self, now: float) -> str | None:
        """Ask for another slot if the writer keeps those that could be filled for long; never waits.

        Return the reason if the writer gives none. To be called when a state is to be held and no slot is free.
        """
        # A snapshot that the writer has not begun takes the newest state: another slot would not help.
        if not self._is_optional or self._link.is_requested or len(self._link.slots) != HELD_STATES_AUTO:
            return None
        if self._short_since is None:
            self._short_since = now
        if self._has_asked:
            return self._link.no_more
        if now > self._short_since + _LONG_WRITE_S:
            self._link.reserve_more()
            self._has_asked = True
        return None

    def give_up(self) -> None:
        """Do without slots from now on."""
        self._link.give_up_slots()

    def next_slot(self, timeout_s: float | None = None) -> Slot:
        """Return the slot to fill next, locked; waits until slots are ready.

        The slot that was filled last stays whole meanwhile. With two slots it also waits while the other is being written, or
        until there is a third, which is given back once it is not needed.

        Raises:
            SnapshotError: the writer died, has no memory, or had no slot ready within *timeout_s*.
            StagingLimitError: slots for each worker are more than the limit allows.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._link.slots:
            self._link.receive_one(deadline, "no slot was made ready")
        while not (free := self._lock_free()):
            self.ask_for_another(time.monotonic())
            self._link.wait_a_moment(deadline, "no slot of the memory tier is free")
        self._short_since, self._has_asked = None, False
        for slot in free:
            slot.clear_label()
        *not_needed, slot = free
        for each in not_needed:
            self._link.give_back(each)
        return slot

    def _lock_free(self) -> list[Slot]:
        """Lock and return a slot that can be filled; before it, a third slot that is not needed, since nothing is being written."""
        # The slot that was filled before the last may be about to be written: it is left alone where three stay.
        most = HELD_STATES_AUTO if self._is_optional else 1
        free: list[Slot] = []
        for slot in self._link.slots[:-1]:
            if len(free) < most and slot.lock():
                free.append(slot)
        return free

    def describe(self, tensors: list[TensorEntry], nbytes: int, record: SnapshotRecord | None) -> None:
        """Send the layout of the following shards and, if this is the first rank of its node, the present record."""
        self._layout, self._nbytes = self._layout + 1, nbytes
        self._described = {} if record is None else record.to_json()
        self._link.send(Describe(self._layout, StagedShard(tensors, nbytes, record)))

    def commit_slot(self, slot: Slot, name: str, step: int, record: SnapshotRecord | None) -> bool:
        """Label *slot* as this rank's shard of *step*; False if the record changed too much for that: `describe` first.

        Args:
            slot: From `next_slot`; unlocked if it was labelled.
            name: Name that a snapshot of the shard's state would have; used on the first rank of a node.
            record: The record, on the first rank of a node; None on other ranks.
        """
        metadata = b""
        if record is not None:
            changed = list(_differences(self._described, record.to_json(), []))
            metadata = _JSON.encode({"name": name, "changed": changed}).encode()
        if len(metadata) > MOST_METADATA:
            return False
        fault_injection.reach("tier.before_seal")
        digest = digest_of(slot.memory, self._nbytes)
        slot.set_label(Label(self._generation, step, self._layout, digest, metadata))
        self._link.slots.remove(slot)
        self._link.slots.append(slot)
        slot.unlock()
        return True

    def invalidate(self, equal_at: int) -> None:
        """Forbid resuming from the state that the ranks of this generation hold, and from its snapshots after *equal_at*.

        Such a snapshot that the writer took of the memory tier is not committed, or set aside. One rank that calls this
        is enough, and it may end right after.

        Raises:
            SnapshotError: the writer died, and the held state is lost with it.
        """
        self._link.send(Invalidate(equal_at))

    def recall(self, older_than: tuple[int, ...] = ()) -> RecalledState | None:
        """Return the newest state that an earlier generation held, or None if this node has no whole set. Call before `reserve`.

        Args:
            older_than: Generation and step, of which an older state is wanted; empty: any.
        """
        request = Recall(older_than)
        held = self._link.ask(
            request, Held, complaint="no word of what it holds", limit_s=_ANSWER_LIMIT_S
        ).held
        if held is None:
            return None
        return RecalledState(held, self._mapped([shard.size for shard in held.shards], mmap.mmap))

    def prepare_to_receive(self, held: HeldSet) -> list[mmap.mmap] | str:
        """Return memory for each shard of *held*, a state of another node, or the reason why there is none; this node's own held state is lost."""
        first, *rest = (shard.shard for shard in held.shards)
        shards = (replace(first, record=held.record), *rest)
        request = Receive(held.generation, held.world_size, held.committed, shards)
        answer = self._link.ask(request, Receiving, complaint="no word of memory", limit_s=_ANSWER_LIMIT_S)
        return self._mapped(answer.sizes, map_memory) if answer.sizes else answer.reason

    def count_received(self, held: HeldSet, memories: Sequence[mmap.mmap]) -> None:
        """Label the shards that were received: from now on this node holds the state."""
        name = _JSON.encode({"name": held.name, "changed": []}).encode()
        for number, (memory, shard) in enumerate(zip(memories, held.shards, strict=True)):
            label = Label(held.generation, held.step, RECEIVED, shard.digest, b"" if number else name)
            Slot(number, -1, len(memory), memory).set_label(label)

    def _mapped(self, sizes: Sequence[int], map_one: Callable[[int, int], mmap.mmap]) -> list[mmap.mmap]:
        """Return the memory files whose descriptors came with the last message."""
        descriptors = [self._link.descriptors.popleft() for _ in sizes]
        try:
            return [map_one(descriptor, size) for descriptor, size in zip(descriptors, sizes, strict=True)]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _differences(old: Any, new: Any, path: list[str | int]) -> Iterator[tuple[list[str | int], Any]]:
    """Yield the path and the new value of everything in *new* that differs from *old*."""
    if type(old) is dict and type(new) is dict and old.keys() == new.keys():
        pairs: Iterable[tuple[str | int, Any, Any]] = ((key, old[key], value) for key, value in new.items())
    elif type(old) is list and type(new) is list and len(old) == len(new):
        pairs = zip(count(), old, new, strict=False)
    else:
        yield path, new
        return
    for key, before, now in pairs:
        # 1 and 1.0 count as equal: no reader tells them apart.
        if before is not now and before != now:
            yield from _differences(before, now, [*path, key])
