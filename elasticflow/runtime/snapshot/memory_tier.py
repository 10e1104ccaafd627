"""The memory tier of a rank: holds the rank's shard at every due step, for the store and for a later generation.

At an interval, or by itself (`AUTO`): a state is then held once the time since the last is so long that holding takes at most a
fixed share of it, on every rank. A rank asks for that in the exchange of a step, by its own clock, and all hold the state
after the step in which all have asked. Whether the node has the memory, all ranks learn together as well.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.errors import StorageError
from elasticflow.protocol.snapshot_settings import AUTO
from elasticflow.run_folder import SNAPSHOT_NAME
from elasticflow.runtime.snapshot.rank_shard import view_of
from elasticflow.runtime.snapshot.restore import SnapshotContent
from elasticflow.runtime.state.codec import StoredTensors
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.snapshots.client.memory_tier import MemoryTierClient
from elasticflow.snapshots.format.manifest import Manifest
from elasticflow.snapshots.format.pieces import TensorPlace, whole_tensors
from elasticflow.snapshots.format.policy import BoundedShare, Due
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.snapshot.metadata import SnapshotMetadata
    from elasticflow.runtime.snapshot.rank_shard import RankShard, ShardPlanner
    from elasticflow.runtime.snapshot.staging_copy import Copier
    from elasticflow.runtime.state.state import Captured, State
    from elasticflow.snapshots.client.memory_tier import RecalledState
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.format.pieces import Span
    from elasticflow.snapshots.format.policy import HasPosition
    from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
    from elasticflow.snapshots.memory import Slot
    from elasticflow.snapshots.store.catalog import Catalog

_TRIGGER = "memory"
# Bytes that a rank copies, compares and sums up in a second, before it has measured that.
_EXPECTED_SPEED = 1 << 29
# Steps between two meetings of ranks that take their steps one by one, at most.
_APART = 8


def content_of(recalled: RecalledState, run_id: str) -> SnapshotContent:
    """Return the state that an earlier generation held, as a snapshot to apply; its tensors are not copied."""
    manifest = Manifest(
        run_id=run_id,
        name=recalled.name,
        step=recalled.step,
        generation=recalled.generation,
        world_size=len(recalled.shards),
        created=0.0,
        files={},
        tensors={},
        **vars(recalled.record.manifest),
    )
    return SnapshotContent(manifest, recalled.record.state, HeldTensors([*recalled.shards]))


class HeldTensors(StoredTensors):
    """Tensors of a state that the writer's memory holds; one that lies there whole is a view, others are put together.

    Args:
        shards: Each rank's entries, and the memory that they lie in.
    """

    def __init__(self, shards: Sequence[tuple[Sequence[TensorEntry], mmap.mmap]]) -> None:
        places = {
            entry.key: TensorPlace(
                str(number), entry.dtype, entry.shape, entry.offset, entry.nbytes, entry.piece
            )
            for number, (entries, _) in enumerate(shards)
            for entry in entries
        }
        super().__init__(whole_tensors(places))
        self._memories = [memoryview(memory) for _, memory in shards]

    def __getitem__(self, key: str) -> Tensor:
        """Return the whole tensor, a view of the memory if it lies there in one piece."""
        (first, *more), whole = self._whole[key].pieces, self._whole[key]
        if more:
            return super().__getitem__(key)
        return view_of(self._memories[int(first.file)], BY_NAME[whole.dtype], whole.shape, first.offset)

    def read_into(self, key: str, target: memoryview, begin: int) -> None:
        """Copy bytes of a tensor out of the memory."""

        def read(span: Span, part: memoryview) -> None:
            part[:] = self._memories[int(span.file)][span.offset : span.offset + span.nbytes]

        self._whole[key].fill(target, begin, read)


class MemoryTier:
    """Holds this rank's shard in the writer's memory. Every rank has a tier, if the whole group is on one node.

    Args:
        me: This worker.
        client: Connection to the writer.
        state: State of a snapshot.
        planner: Selects the tensors that this rank holds.
        metadata: Makes names and records.
        copier: Copies from the device.
        every: Interval at which the state is held, such as "1 step", or `AUTO`.

    Attributes:
        is_auto: It holds by itself, and can be switched off.
        is_settled: All ranks know that all have slots.
    """

    def __init__(
        self,
        me: Worker,
        client: StagingClient,
        state: State,
        planner: ShardPlanner,
        metadata: SnapshotMetadata,
        copier: Copier,
        every: str,
    ) -> None:
        self._me, self._state, self._planner, self._metadata = me, state, planner, metadata
        self._copier = copier
        self.is_auto = every == AUTO
        self.is_settled = not self.is_auto
        self._client = MemoryTierClient(client, me.generation, is_optional=self.is_auto)
        self._due = Due(() if self.is_auto else (every,))
        self._share: BoundedShare | None = None
        self._last: HasPosition | None = None
        self._last_time = time.monotonic()
        self._shard: RankShard | None = None
        self._held_step: int | None = None
        self._is_committed = True
        # Step of a state whose copy was overtaken, and the tensor.
        self._lost: tuple[int, str] | None = None
        if self.is_auto:
            me.vote.memory_quorum = me.world_size
            me.vote.when("memory", self._asks)
        elif me.rank == 0 and self._due.seconds is not None:
            me.vote.when("memory", self._is_due_by_time)

    def begin(self, position: Position) -> None:
        """Count intervals from *position*, at which training begins."""
        self._last, self._last_time = position, time.monotonic()

    def is_due(self, position: Position) -> bool:
        """True if the state must be held after this step; the same on every rank."""
        assert self._last is not None, "begin() comes first"
        return self._me.vote.memory or self._due.is_due(self._last, position)

    def reserve(self, shard: RankShard) -> None:
        """Have the writer prepare slots for *shard* while training continues."""
        self._client.reserve(shard.nbytes)
        if self.is_auto:
            self._share = BoundedShare(time.monotonic(), shard.nbytes / _EXPECTED_SPEED)

    def settle(self) -> str | None:
        """Return why this rank or another has no slots, if so: then none uses the tier. Collective: every rank.

        Raises:
            SnapshotError: the writer died.
        """
        self._client.await_answer()
        declined = next(filter(None, self._me.gather_text(self._client.declined or "")), None)
        self.is_settled = True
        if declined is not None:
            self._client.give_up()
            self._me.vote.when("memory", bool)
        return declined

    def hold(
        self, position: Position, compare: Callable[[Captured, Callable[[], None]], None], *, waits: bool
    ) -> None:
        """Copy this rank's shard into the writer's memory; waits for no other rank, if it holds by itself for a moment at most.

        Args:
            position: Position of the state.
            compare: Called with the captured state and an action that lets the copy count once it is complete: to be called when
                the state is known to be good.
            waits: The copy must not be overtaken; see `Copier.start`.

        Raises:
            SnapshotError: the writer died, or has no memory.
            StagingLimitError: the limit is too small for the tier.
            StateError: the state holds something that a snapshot cannot hold; the message names it.
        """
        began = time.monotonic()
        self._copier.finish()
        is_soon = self._held_step is not None and position.step - self._held_step <= _APART
        if self.is_auto and is_soon and not self._me.vote.memory:
            # A rank that was killed before its last copy counted leaves the copy before, which the others must still have.
            self._me.barrier()
        captured = self._state.capture()
        shard = self._planner.shard_of(captured)
        self._client.reserve(shard.nbytes)
        record = self._metadata.record(position, captured, _TRIGGER)
        name = "" if record is None else self._metadata.name(position.step)
        waiting = time.monotonic()
        slot = self._client.next_slot()
        # A slow store makes no hold dear.
        began += time.monotonic() - waiting
        target = memoryview(slot.memory)[: shard.nbytes]
        self._copier.start(shard, target, captured.stepped, waits=waits)
        commit = partial(self._commit_slot, shard, slot, name, position.step, record)
        now = time.monotonic()
        if self._share is not None:
            self._share.begin(now)
        self._last, self._last_time, self._held_step = position, now, position.step
        self._is_committed = False
        self.spent(now - began)
        compare(captured, partial(self._copier.then, commit))

    def spent(self, seconds: float) -> None:
        """Note that the last hold took *seconds*, beside what was noted before."""
        if self._share is not None:
            self._share.spent(seconds)

    def _commit_slot(
        self,
        shard: RankShard,
        slot: Slot,
        name: str,
        step: int,
        record: SnapshotRecord | None,
        overtaken: str | None,
    ) -> None:
        began, self._is_committed = time.monotonic(), True
        if overtaken is not None:
            # The slot has no label: it is filled again next.
            self._lost = step, overtaken
            self._me.event(events.STAGING_OVERTAKEN, step=step, name=overtaken)
            return
        if shard is not self._shard:
            self._client.describe(shard.entries, shard.nbytes, record)
            self._shard = shard
        if not self._client.commit_slot(slot, name, step, record):
            self._client.describe(shard.entries, shard.nbytes, record)
            self._client.commit_slot(slot, name, step, record)
        self._me.heartbeat.hold(step)
        self.spent(time.monotonic() - began)

    def holds(self, position: Position) -> bool:
        """True if this generation held the state after *position*, and no later one."""
        return self._held_step == position.step

    def lost(self, position: Position) -> str | None:
        """Return the tensor that was written while the state after *position* was copied; None: that state was not lost so."""
        return self._lost[1] if self._lost is not None and self._lost[0] == position.step else None

    def forget(self, equal_at: int) -> None:
        """Keep later generations from resuming from the held state, or from its snapshots after step *equal_at*.

        Waits for no other rank.

        Raises:
            SnapshotError: the writer died, and the held state with it.
        """
        self._client.invalidate(equal_at)

    def recall(self, catalog: Catalog) -> RecalledState | None:
        """Return the state that an earlier generation held, if all ranks received it and no committed snapshot is newer.

        A state whose bytes have changed since it was held is not returned, and an event tells. Collective: every rank. Reads
        no snapshot.
        """
        me = self._me
        fault_injection.reach("restore.before_recall")
        recalled = self._client.recall()
        name = recalled.name if recalled is not None else ""
        if me.rank == 0 and recalled is not None and not _is_newest(recalled, catalog):
            name = ""
        damaged = None if recalled is None else recalled.damaged(me.local_rank, me.local_world_size)
        names = me.gather_text(name if damaged is None else f"{damaged}")
        if recalled is None or not name or set(names) != {name}:
            if damaged is not None and recalled is not None:
                me.event(events.HELD_DAMAGED, step=recalled.step, of_rank=damaged)
            return None
        me.heartbeat.hold(recalled.step)
        return recalled

    def _asks(self) -> bool:
        """True if this rank would hold its state now, or does not know yet if all can."""
        if self._share is None or not self._is_committed or not self._client.is_answered:
            return False
        return not self.is_settled or (self._share.is_due(time.monotonic()) and self._client.is_free)

    def _is_due_by_time(self) -> bool:
        return self._due.is_due_by_time(time.monotonic() - self._last_time)


def _is_newest(recalled: RecalledState, catalog: Catalog) -> bool:
    """True if no committed snapshot is newer, judged by names alone; also if the store cannot be read."""
    try:
        set_aside = catalog.quarantined()
        matches = [SNAPSHOT_NAME.fullmatch(name) for name in catalog.storage.list(catalog.folder())]
    except (OSError, StorageError):
        return True
    steps = [int(match["step"]) for match in matches if match is not None and match[0] not in set_aside]
    return recalled.name not in set_aside and max(steps, default=0) <= recalled.step
