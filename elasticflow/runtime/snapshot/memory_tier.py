"""The memory tier of a rank: holds the rank's shard at every due step, for the store and for a later generation.

The ranks of each node hold the whole state among themselves. Replicas are equal, so nothing is sent for that but the tensors that may
differ between ranks, such as buffers: every node has rank 0's. A later generation resumes from the newest state that a node
has whole; nodes that lack it receive it.

At an interval, or by itself (`AUTO`): a state is then held once the time since the last is so long that holding takes at most a
fixed share of it, on every rank. A rank asks for that in the exchange of a step, by its own clock, and all hold the state
after the step in which all have asked. Whether the node has the memory, all ranks learn together as well.

Frozen weights are copied like all other tensors, and lie in each held state. A tier that leaves them out needs a proof that they have not
changed. torch does not count writes through `.data`. A sum over the bits stays the same when rows of a tensor change places, and a
third of the time when 16 numbers change their signs. A comparison of all bytes takes as long as the copy and its digest (250 MB on one
core: 46 and 42 ms).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from elasticflow import events
from elasticflow.errors import StorageError
from elasticflow.protocol.snapshot_settings import AUTO
from elasticflow.run_folder import SNAPSHOT_NAME
from elasticflow.runtime.process.process_group import send_text
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner, view_of
from elasticflow.runtime.snapshot.restore import SnapshotContent
from elasticflow.runtime.state.codec import StoredTensors
from elasticflow.runtime.state.tensors import BY_NAME
from elasticflow.snapshots.client.memory_tier import MemoryTierClient, RecalledState
from elasticflow.snapshots.client.messages import TO_WORKER, Held
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
    from elasticflow.runtime.snapshot.rank_shard import RankShard
    from elasticflow.runtime.snapshot.staging_copy import Copier
    from elasticflow.runtime.state.state import Captured, State
    from elasticflow.snapshots.client.messages import HeldSet
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.format.pieces import Span
    from elasticflow.snapshots.format.policy import HasPosition
    from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
    from elasticflow.snapshots.memory import Slot
    from elasticflow.snapshots.store.catalog import Catalog

_TRIGGER = "memory"
# Bytes that a rank copies, compares and sums up in a second, before it has measured that.
_EXPECTED_SPEED = 1 << 29
# Bytes that are sent at once to nodes that lack a state.
_CHUNK = 64 << 20
_ALIGNED = 16
# Steps between two meetings of ranks that take their steps one by one, at most.
_APART = 8


def content_of(recalled: RecalledState, run_id: str) -> SnapshotContent:
    """Return the state that an earlier generation held, as a snapshot to apply; its tensors are not copied."""
    held = recalled.held
    manifest = Manifest(
        run_id=run_id,
        name=held.name,
        step=held.step,
        generation=held.generation,
        world_size=held.world_size,
        created=0.0,
        files={},
        tensors={},
        **vars(held.record.manifest),
    )
    return SnapshotContent(manifest, held.record.state, HeldTensors(recalled.shards))


class HeldTensors(StoredTensors):
    """Tensors of a state that the writer's memory holds; one that lies there whole is a view, others are put together."""

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


class OfRank0:
    """The tensors of a state that may differ between ranks, as rank 0 has them. Every rank has an instance."""

    def __init__(self, me: Worker) -> None:
        self._me = me
        self._live: dict[str, Tensor] = {}
        self._tensors: dict[str, Tensor] = {}
        # The bytes that are sent, for each device, and the tensors in them with rank 0's own.
        self._sent: list[tuple[Tensor, list[tuple[Tensor, Tensor]]]] = []

    def of(self, captured: Captured) -> Captured:
        """Return *captured* with places for rank 0's tensors, which `receive` fills; the same as before for the same tensors."""
        if captured.tensors is not self._live:
            self._live, self._sent = captured.tensors, []
            places: dict[str, Tensor] = {}
            local = {key: captured.tensors[key] for key in sorted(captured.local)}
            for device in sorted({tensor.device for tensor in local.values()}, key=str):
                there = {key: tensor for key, tensor in local.items() if tensor.device == device}
                places |= self._place(there, device)
            self._tensors = captured.tensors if self._me.rank == 0 else {**captured.tensors, **places}
        return replace(captured, tensors=self._tensors)

    def receive(self) -> float:
        """Fill the places with what rank 0's tensors are now; return the seconds that it took. Collective: every rank."""
        began = time.monotonic()
        for sent, pairs in self._sent:
            if self._me.rank == 0:
                for place, live in pairs:
                    place.copy_(live)
            dist.broadcast(sent, 0)
        return time.monotonic() - began

    def _place(self, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        begins, end = {}, 0
        for key, tensor in tensors.items():
            begins[key] = end
            end += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        sent = torch.zeros(end, dtype=torch.uint8, device=device)
        places = {
            key: sent[begins[key] : begins[key] + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for key, tensor in tensors.items()
        }
        if end:
            self._sent.append((sent, [(places[key], tensor.detach()) for key, tensor in tensors.items()]))
        return places


class MemoryTier:
    """Holds this rank's shard in the writer's memory. Every rank has a tier.

    Args:
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
        metadata: SnapshotMetadata,
        copier: Copier,
        every: str,
    ) -> None:
        self._me, self._state, self._metadata, self._copier = me, state, metadata, copier
        # The first rank of this node.
        self._first = me.rank - me.local_rank
        node = range(self._first, self._first + me.local_world_size)
        self._planner = ShardPlanner(me.rank, me.world_size, node)
        self._shards = 0, 1
        self._of_rank_0 = None if me.local_world_size == me.world_size else OfRank0(me)
        self._misses: str | None = None
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
        self._has_told_pauses = False
        if self.is_auto:
            me.vote.when("memory", self._asks)
        elif me.rank == 0 and self._due.seconds is not None:
            me.vote.when("memory", lambda: self._due.is_due_by_time(time.monotonic() - self._last_time))

    def begin(self, position: Position) -> None:
        """Count intervals from *position*, at which training begins."""
        self._last, self._last_time = position, time.monotonic()

    def is_due(self, position: Position) -> bool:
        """True if the state must be held after this step; the same on every rank."""
        assert self._last is not None, "begin() comes first"
        return self._me.vote.memory or self._due.is_due(self._last, position)

    def reserve(self, captured: Captured) -> None:
        """Have the writer prepare slots for this rank's part of *captured* while training continues."""
        if self._of_rank_0 is not None:
            captured = self._of_rank_0.of(captured)
            if captured.boxes.keys() & captured.local:
                self._misses = "objects of the job's own are sharded, and the workers are on several nodes"
        shard = self._planner.shard_of(captured)
        self._shards = captured.shards.shard, captured.shards.degree
        self._client.reserve(shard.nbytes)
        if self.is_auto:
            self._share = BoundedShare(time.monotonic(), shard.nbytes / _EXPECTED_SPEED)

    def settle(self) -> str | None:
        """Return why this rank or another has no slots, if so, or a node not the whole state: then none uses the tier.

        Collective: every rank.
        """
        self._client.await_answer()
        me, (shard, degree) = self._me, self._shards
        own = self._client.declined or self._misses or ""
        if own and self._of_rank_0 is not None and self._client.declined:
            own = f"node {me.node}: {own}"
        answers = [json.loads(text) for text in me.gather_text(json.dumps([own, self._first, shard]))]
        declined: str | None = next((text for text, _, _ in answers if text), None)
        nodes = {first for _, first, _ in answers}
        if declined is None and len({(first, number) for _, first, number in answers}) < degree * len(nodes):
            declined = "the parts of the model are on several nodes, and no node has all of them"
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
            compare: Called with the captured state and an action that lets the copy count once it is complete: to be called when
                the state is known to be good.

        Raises:
            SnapshotError: the writer died, or has no memory.
            StagingLimitError: the limit is too small for the tier.
            StateError: the state holds something that a snapshot cannot hold; the message names it.
        """
        # The time of this thread on a core: others may keep it from one, and a slow store makes no hold dear.
        began, waited = time.thread_time(), 0.0
        self._copier.finish()
        is_soon = self._held_step is not None and position.step - self._held_step <= _APART
        if self.is_auto and is_soon and not self._me.vote.memory:
            # A rank that was killed before its last copy counted leaves the copy before, which the others must still have.
            self._me.barrier()
        captured = self._state.capture()
        held = captured
        if self._of_rank_0 is not None:
            held = self._of_rank_0.of(captured)
            waited = self._of_rank_0.receive()
        shard = self._planner.shard_of(held)
        self._client.reserve(shard.nbytes)
        record = self._metadata.record(position, captured, _TRIGGER, on_each_node=True)
        name = "" if record is None else self._metadata.name(position.step)
        slot = self._client.next_slot()
        target = memoryview(slot.memory)[: shard.nbytes]
        self._copier.start(shard, target, captured.stepped, waits=waits)
        commit = partial(self._commit_slot, shard, slot, name, position.step, record)
        now = time.monotonic()
        if self._share is not None:
            self._share.begin(now)
        self._last, self._last_time, self._held_step = position, now, position.step
        self._is_committed = False
        self.spent(time.thread_time() - began, waited)
        compare(captured, partial(self._copier.then, commit))

    def spent(self, seconds: float, waited: float = 0.0) -> None:
        """Note that the last hold took *seconds* and *waited* for other ranks, beside what was noted before."""
        if self._share is not None:
            self._share.spent(seconds, waited)

    def _commit_slot(
        self,
        shard: RankShard,
        slot: Slot,
        name: str,
        step: int,
        record: SnapshotRecord | None,
        overtaken: str | None,
    ) -> None:
        began, self._is_committed = time.thread_time(), True
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
        self.spent(time.thread_time() - began)

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
        """Return the newest state that a node of an earlier generation held whole, if no committed snapshot is newer.

        A node that lacks the state, or whose copy has changed since it was held, receives it; an event tells. If all copies
        have changed, an older state takes its place. Collective: every rank. Reads no snapshot.
        """
        me = self._me
        fault_injection.reach("restore.before_recall")
        newest, aside = json.loads(self._send(json.dumps(_committed(catalog)) if me.rank == 0 else None))
        older_than: tuple[int, ...] = ()
        while True:
            mine = self._client.recall(older_than)
            offer = None if mine is None else [mine.age, mine.held.name]
            offers = [json.loads(text) for text in me.gather_text(json.dumps([self._first, offer]))]
            best = max((offer for _, offer in offers if offer), default=None)
            if best is None or best[0] < newest or best[1] in aside:
                return None
            older_than = tuple(best[0])
            if mine is not None and mine.age != older_than:
                mine = None
            nodes = {first for first, _ in offers}
            good = self._whole_nodes(nodes, [first for first, _ in offers], mine)
            if not good:
                continue
            source = max(good, key=lambda first: (good[first], -first))
            if len(nodes) > 1:
                mine = self._shared(mine, source, sorted(nodes - good.keys()))
            if mine is not None:
                me.heartbeat.hold(mine.held.step)
            return mine

    def _send(self, text: str | None, source: int = 0) -> str:
        """Return the *text* of rank *source*. Collective: every rank."""
        if text is not None and self._me.world_size == 1:
            return text
        return send_text(text, source)

    def _whole_nodes(
        self, nodes: set[int], firsts: Sequence[int], mine: RecalledState | None
    ) -> dict[int, int]:
        """Return the nodes, by their first ranks, whose copy is as it was held, each with the step of the last snapshot it knows of.

        Collective: every rank, each looks at a part of its node's copy.
        """
        me, text = self._me, ""
        if mine is not None:
            damaged = mine.damaged(me.local_rank, me.local_world_size)
            committed = mine.held.committed
            text = str(-1 if committed is None else committed.step) if damaged is None else ""
            if damaged is not None:
                me.event(events.HELD_DAMAGED, step=mine.held.step, of_rank=damaged)
        texts = list(zip(firsts, me.gather_text(text), strict=True))
        known = {node: [text for first, text in texts if first == node] for node in nodes}
        return {node: int(found[0]) for node, found in known.items() if all(found)}

    def _shared(
        self, mine: RecalledState | None, source: int, lacking: Sequence[int]
    ) -> RecalledState | None:
        """Return the state that rank *source* has, as this rank's node has it; the *lacking* nodes receive it.

        None: a node cannot. Collective: every rank.
        """
        me, began = self._me, time.monotonic()
        text = None if mine is None or me.rank != source else TO_WORKER.encode(Held(mine.held))
        message = TO_WORKER.decode(self._send(text, source))
        assert isinstance(message, Held)
        assert message.held is not None
        held = message.held
        if not lacking:
            return None if mine is None else replace(mine, held=_with_record(mine.held, held))
        node = self._send(me.node if me.rank == source else None, source)
        is_lacking = self._first in lacking
        problem = self._transfer(held, mine, source, lacking)
        if is_lacking and problem is None:
            mine, damaged = self._client.recall(), None
            if mine is None or mine.age != (held.generation, held.step):
                problem = f"node {me.node} has not received the state"
            elif (damaged := mine.damaged(me.local_rank, me.local_world_size)) is not None:
                problem = f"part {damaged} of the state came to node {me.node} with other bits"
        if self._is_lost(held, problem):
            return None
        assert mine is not None
        if is_lacking and me.local_rank == 0:
            nbytes = sum(shard.shard.nbytes for shard in held.shards)
            seconds = round(time.monotonic() - began, 3)
            me.event(events.HELD_RECEIVED, step=held.step, from_node=node, bytes=nbytes, seconds=seconds)
        return replace(mine, held=_with_record(mine.held, held))

    def _transfer(
        self, held: HeldSet, mine: RecalledState | None, source: int, lacking: Sequence[int]
    ) -> str | None:
        """Broadcast the shards of *held* from rank *source* to the first rank of each *lacking* node, for all of the node.

        Return why this or another rank cannot receive them; then nothing is sent. Collective: every rank.
        """
        me, memories = self._me, [] if mine is None else mine.memories
        is_receiver, problem = me.rank in lacking, ""
        if is_receiver:
            prepared = self._client.prepare_to_receive(held)
            if isinstance(prepared, str):
                problem = f"node {me.node} cannot receive the state: {prepared}"
            else:
                memories = prepared
        if refused := next(filter(None, me.gather_text(problem)), None):
            return refused
        group = dist.new_group([source, *lacking], backend="gloo")
        if is_receiver or me.rank == source:
            self._broadcast(held, memories, source, group)
            dist.destroy_process_group(group)
        if is_receiver:
            self._client.count_received(held, memories)
        me.barrier()
        return None

    def _is_lost(self, held: HeldSet, problem: str | None) -> bool:
        """Return whether a rank has a *problem* with the state, which rank 0 then tells. Collective: every rank."""
        reason = next(filter(None, self._me.gather_text(problem or "")), None)
        if reason is not None and self._me.rank == 0:
            self._me.event(events.HELD_LOST, step=held.step, reason=reason)
        return reason is not None

    def _broadcast(
        self, held: HeldSet, memories: Sequence[mmap.mmap], source: int, group: dist.ProcessGroup
    ) -> None:
        for shard, memory in zip(held.shards, memories, strict=True):
            for begin in range(0, shard.shard.nbytes, _CHUNK):
                fault_injection.reach("tier.mid_broadcast")
                nbytes = min(_CHUNK, shard.shard.nbytes - begin)
                chunk = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=begin)
                dist.broadcast(chunk, source, group=group)
                self._me.heartbeat.beat()

    def _asks(self) -> int:
        """Return 1 if this rank would hold its state now, or does not know yet if all can; else outweigh the other ranks.

        If only a slot is missing, another is asked for.
        """
        if self._share is None or not self._is_committed or not self._client.is_answered:
            return -self._me.world_size
        now = time.monotonic()
        if self.is_settled and not self._share.is_due(now):
            return -self._me.world_size
        if self.is_settled and not self._client.is_free:
            reason = self._client.ask_for_another(now)
            if reason is not None and not self._has_told_pauses:
                self._has_told_pauses = True
                self._me.event(events.HELD_PAUSES, reason=reason)
            return -self._me.world_size
        return 1


def _with_record(mine: HeldSet, held: HeldSet) -> HeldSet:
    """Return *mine* with the record of *held*: all ranks take over the same."""
    return replace(mine, record=held.record, committed=held.committed)


def _committed(catalog: Catalog) -> tuple[tuple[int, int], list[str]]:
    """Return the age of the newest committed snapshot, by names alone, and the names set aside; (0, 0) if the store cannot be read."""
    try:
        aside = [*catalog.quarantined()]
        matches = [SNAPSHOT_NAME.fullmatch(name) for name in catalog.storage.list(catalog.folder())]
    except (OSError, StorageError):
        return (0, 0), []
    ages = [(int(m["generation"]), int(m["step"])) for m in matches if m is not None and m[0] not in aside]
    return max(ages, default=(0, 0)), aside
