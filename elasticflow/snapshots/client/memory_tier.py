"""The worker's side of the memory tier: fill a slot, label it, resume from a predecessor's state."""

from __future__ import annotations

import json
import mmap
import os
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.client.messages import (
    Describe,
    Held,
    Invalidate,
    Recall,
)
from elasticflow.snapshots.format.shard_file import StagedShard
from elasticflow.snapshots.memory import MOST_METADATA, TAIL, Label, digest_of
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from elasticflow.snapshots.client.messages import CommittedPosition
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
    from elasticflow.snapshots.memory import Slot

_ANSWER_LIMIT_S = 60.0
# Made once: making an encoder takes longer than encoding the metadata of a step.
_JSON = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True)
class RecalledState:
    """The state that all ranks of an earlier generation held at one step, in the memory of this node.

    Attributes:
        name: Name that a snapshot of the state would have.
        record: Rank 0's.
        committed: Newest snapshot that the writer committed out of the memory tier; None: none.
        shards: For each rank, the place of each tensor, and the memory.
        digests: For each rank, the bytes in use and the digest that was made when they were held.
    """

    name: str
    generation: int
    step: int
    record: SnapshotRecord
    committed: CommittedPosition | None
    shards: list[tuple[Sequence[TensorEntry], mmap.mmap]]
    digests: list[tuple[int, int]]

    @property
    def parent(self) -> str | None:
        """Name of the newest committed snapshot before it, if any."""
        return self.record.manifest.parent if self.committed is None else self.committed.name

    def damaged(self, part: int, parts: int) -> int | None:
        """Return the rank whose shard has changed since it was held, if any. Looks at one of *parts* parts of the shards."""
        for rank in range(part, len(self.shards), parts):
            nbytes, digest = self.digests[rank]
            if digest_of(self.shards[rank][1], nbytes) != digest:
                return rank
        return None


class MemoryTierClient:
    """One rank's slots; used from the thread that uses the connection.

    Args:
        link: To the node's writer; its slots are those of the memory tier, the one that was filled last at the end.
        generation: This worker's.
        is_optional: Train on without slots where the writer has no memory for them.
    """

    def __init__(self, link: StagingClient, generation: int, *, is_optional: bool = False) -> None:
        self._link, self._generation, self._is_optional = link, generation, is_optional
        # Number and bytes of the layout described last.
        self._layout = self._nbytes = 0
        # Rank 0's record as JSON, as it was described last.
        self._described: dict[str, Any] = {}

    def reserve(self, nbytes: int) -> None:
        """Ask for slots for shards of *nbytes* and return at once; see `StagingClient.reserve`."""
        # A run that holds its state already does not go on without: not each rank might learn of it.
        is_optional = self._is_optional and not self._link.slots
        self._link.reserve(nbytes + TAIL, is_held=True, is_optional=is_optional)

    @property
    def declined(self) -> str | None:
        """Why the writer has no memory for the slots, if it answered so."""
        return self._link.declined

    @property
    def is_answered(self) -> bool:
        """True if the writer has answered `reserve`; never waits."""
        if not self._link.slots and self.declined is None:
            self._link.receive_waiting()
        return bool(self._link.slots) or self.declined is not None

    def await_answer(self) -> None:
        """Wait until the writer has answered `reserve`.

        Raises:
            SnapshotError: the writer died.
        """
        while not self.is_answered:
            self._link.receive_one(None, "no answer about slots")

    @property
    def is_free(self) -> bool:
        """True if `next_slot` would not wait, and the writer has begun to write each snapshot that was asked for; never waits."""
        if self._link.is_requested:
            self._link.receive_waiting()
        slot = self._link.slots[0] if self._link.slots else None
        if slot is None or self._link.is_requested or not slot.lock():
            return False
        slot.unlock()
        return True

    def give_up(self) -> None:
        """Do without slots from now on."""
        self._link.give_up_slots()

    def next_slot(self, timeout_s: float | None = None) -> Slot:
        """Return the slot to fill next, locked; waits until slots are ready.

        The slot that was filled last stays whole meanwhile. With two slots it also waits while the other is being written.

        Raises:
            SnapshotError: the writer died, has no memory, or had no slot ready within *timeout_s*.
            StagingLimitError: slots for each worker are more than the limit allows.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._link.slots:
            self._link.receive_one(deadline, "no slot was made ready")
        while True:
            for slot in self._link.slots[:-1]:
                if slot.lock():
                    slot.clear_label()
                    return slot
            self._link.wait_a_moment(deadline, "no slot of the memory tier is free")

    def describe(self, tensors: Sequence[TensorEntry], nbytes: int, record: SnapshotRecord | None) -> None:
        """Send how the shards that follow are laid out, and rank 0's record as it is now.

        Raises:
            SnapshotError: the writer died.
        """
        self._layout, self._nbytes = self._layout + 1, nbytes
        self._described = {} if record is None else record.to_json()
        self._link.send(Describe(self._layout, StagedShard(tensors, nbytes, record)))

    def commit_slot(self, slot: Slot, name: str, step: int, record: SnapshotRecord | None) -> bool:
        """Label *slot* as this rank's shard of *step*; False if the record changed too much for that: `describe` first.

        Args:
            slot: From `next_slot`; unlocked if it was labelled.
            name: Name that a snapshot of the shard's state would have; used on rank 0.
            step: Finished steps.
            record: Rank 0's; None on other ranks.
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

    def recall(self) -> RecalledState | None:
        """Return the state that the newest earlier generation held, or None if this node has no whole set. Call before `reserve`.

        Raises:
            SnapshotError: the writer died.
        """
        held = self._link.ask(
            Recall(), Held, complaint="no word of what it holds", limit_s=_ANSWER_LIMIT_S
        ).held
        if held is None:
            return None
        descriptors = [self._link.descriptors.popleft() for _ in held.shards]
        try:
            shards = [
                (shard.shard.tensors, mmap.mmap(descriptor, shard.size))
                for descriptor, shard in zip(descriptors, held.shards, strict=True)
            ]
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        digests = [(each.shard.nbytes, each.digest) for each in held.shards]
        return RecalledState(
            held.name, held.generation, held.step, held.record, held.committed, shards, digests
        )


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
