"""What the writer does for the memory tier: slots for workers, sets for the store, sets for successors."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow.snapshots.memory.buffers import LimitError
from elasticflow.snapshots.memory.tier import MemoryTierSlots, PersistRequest, RankSlots, SlotSet
from elasticflow.snapshots.writer.pending import PendingSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.memory.buffers import Buffer, BufferPool
    from elasticflow.snapshots.writer.pending import PendingSnapshots

_AT_THE_END = "crash"  # trigger of what is written because its launch ended without a snapshot of it

Message = dict[str, Any]


class Listener(Protocol):
    """A connected rank."""

    rank: int
    world_size: int
    local_world_size: int
    generation: int

    def send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send it a message."""


class MemoryTierService:
    """Serves the memory tier; safe to use from all the writer's threads.

    Args:
        pool: Where slots come from.
        pending_snapshots: Snapshots on their way to the store.
        write: Starts writing a share: rank, set, message (as of `StagingClient.stage`), buffer.
        set_aside: Has a committed snapshot never be restored: name, reason.
    """

    def __init__(
        self,
        pool: BufferPool,
        pending_snapshots: PendingSnapshots,
        write: Callable[[int, PendingSnapshot, Message, Buffer], None],
        set_aside: Callable[[str, str], None],
    ) -> None:
        self._pending_snapshots, self._write, self._set_aside = pending_snapshots, write, set_aside
        pending_snapshots.on_free = self.begin
        self._tier = MemoryTierSlots(pool)
        self._rank_slots: dict[Listener, RankSlots] = {}
        self._beginning = threading.Lock()
        self._begun: dict[str, Message] = {}
        self._committed: Message | None = None  # place of the newest snapshot committed out of the tier
        self._taken: list[
            PendingSnapshot
        ] = []  # of the newest generation: out of the tier, not known to be refused
        self._handlers: dict[str, Callable[[Any, Any], None]] = {
            "slots": self._attach,
            "layout": self._describe,
            "wish": self._request_persist,
            "recall": self._recall,
            "forget": self._forget,
        }

    def handle(self, worker: Listener, message: Message) -> None:
        """Do what *worker* asks for, if it concerns the tier."""
        kind = next(iter(message))
        if kind in self._handlers:
            self._handlers[kind](worker, message[kind])

    def greet(self, *, is_alone: bool) -> None:
        """A worker of the newest generation is here: what older ones ask for is not begun any more."""
        self._tier.request(None)
        if not is_alone:  # a group over several nodes goes on without the tier: what lies here grows old
            self._tier.clear()

    def leave(self, worker: Listener) -> None:
        """*worker* is gone."""
        rank_slots = self._rank_slots.pop(worker, None)
        if rank_slots is not None:
            self._tier.leave(rank_slots)

    def begin(self) -> None:
        """Begin to write the newest set, if one is asked for and the store is free."""
        with self._beginning:
            if not self._pending_snapshots.is_free:
                return
            taken = self._tier.take_for_writing()
            if taken is not None:
                self._begin(*taken)

    def finish(self) -> None:
        """See that the newest set is on the store or on its way: no worker comes any more."""
        self._pending_snapshots.end_open()
        self._pending_snapshots.await_free()
        held = self._tier.newest()
        if held is not None:
            self._tier.request(PersistRequest(*held.place, _AT_THE_END))
            self.begin()

    def note(self, report: Message) -> None:
        """Take note of an outcome."""
        place = self._begun.pop(str(report.get("name")), None)
        if place is not None and report["event"] == "snapshot.committed":
            self._committed = place

    def _begin(self, held: SlotSet, request: PersistRequest) -> None:
        name, record = held.metadata()
        about = record["manifest"]
        about["trigger"] = request.trigger
        world_size = len(held.shares)
        listeners = {w.rank: w for w in tuple(self._rank_slots) if w.generation == held.generation}
        self._begun[name] = {"name": name, "step": held.step, **{k: about[k] for k in ("epoch", "samples")}}
        pending = PendingSnapshot(
            name,
            held.step,
            held.generation,
            world_size,
            world_size,
            staged=set(held.shares),
            record=record,
            listeners=dict(listeners),
        )
        self._taken = [taken for taken in self._taken if taken.generation == held.generation]
        self._taken.append(pending)
        self._pending_snapshots.enter(pending)
        for listener in listeners.values():
            listener.send({"begun": {"name": name, "step": held.step, "trigger": request.trigger}})
        for rank, share in held.shares.items():
            message = {**share.layout, "name": name, "step": held.step, "record": None if rank else record}
            self._write(rank, pending, message, share.buffer)

    def _attach(self, worker: Listener, nbytes: int) -> None:
        try:
            rank_slots = self._tier.attach(
                worker.rank, worker.world_size, worker.generation, nbytes, self._rank_slots.get(worker)
            )
        except LimitError as error:
            worker.send({"over_limit": str(error)})
            return
        except OSError as error:
            worker.send({"no_memory": str(error)})
            return
        self._rank_slots[worker] = rank_slots
        buffers = [buffer for _, buffer in rank_slots.slots]
        worker.send({"slots": [b.size for b in buffers]}, tuple(b.descriptor for b in buffers))

    def _describe(self, worker: Listener, message: Message) -> None:
        rank_slots = self._rank_slots.get(worker)
        if rank_slots is not None:
            self._tier.describe(rank_slots, message["number"], message)

    def _request_persist(self, worker: Listener, message: Message) -> None:
        if (
            worker in self._rank_slots and worker.generation == self._pending_snapshots.newest
        ):  # a zombie has nothing to ask for
            self._tier.request(PersistRequest(worker.generation, message["step"], message["trigger"]))
            self.begin()

    def _forget(self, worker: Listener, message: Message) -> None:
        """The replicas of *worker*'s generation differ: what was taken of them since they were equal is not to be used.

        Every rank says so before it ends. New workers are answered only after this was handled.
        """
        self._tier.invalidate(worker.generation)
        with self._beginning:  # no other set is taken meanwhile, and of all ranks the first sets aside
            doubtful = [
                taken
                for taken in self._taken
                if taken.generation == worker.generation and taken.step > message["equal_at"]
            ]
            self._taken = [taken for taken in self._taken if taken not in doubtful]
            reason = f"the ranks' replicas differ, and were last known to be equal after step {message['equal_at']}"
            for pending in doubtful:
                if not self._pending_snapshots.refuse(pending, reason):
                    self._set_aside(pending.name, reason)

    def _recall(self, worker: Listener, _: None) -> None:
        is_alone = worker.local_world_size == worker.world_size
        held = self._tier.newest(before=worker.generation) if is_alone else None
        if held is None:
            worker.send({"held": None})
            return
        name, record = held.metadata()
        shares = [
            {
                "size": share.buffer.size,
                **{key: value for key, value in share.layout.items() if key in ("tensors", "nbytes")},
            }
            for share in held.shares.values()
        ]
        about = {"name": name, "generation": held.generation, "step": held.step, "record": record}
        worker.send({"held": {**about, "committed": self._committed, "shares": shares}})
        for share in held.shares.values():
            worker.send({"share": None}, (share.buffer.descriptor,))
