"""Snapshots on their way to the store, and the rule for generations that may still commit.

The rule that keeps the history of a run one line: a snapshot of an older generation may be committed only while no
worker of a newer generation can have chosen where to start from. Workers choose after the writer has answered their
greeting, so the answer waits until older snapshots have an outcome.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from elasticflow.snapshots.client.staging import MOST_OPEN

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.format.shard_file import SnapshotRecord, WrittenFile
    from elasticflow.snapshots.writer.connected_rank import ConnectedRank


class State(Enum):
    """The progress of a snapshot on this node."""

    STAGING = "its shards are being handed over or written"
    WRITTEN = "its shards are on the store"
    COMMITTED = "its manifest is on the store"
    ABANDONED = "it will not be committed"


class Role(Enum):
    """This node's part in committing a snapshot."""

    LOCAL = "all ranks are here: it commits"
    COORDINATOR = "rank 0 is here: it commits when the other nodes have written their shards"
    PARTICIPANT = "rank 0 is elsewhere: it announces its shards and waits for the commit"


@dataclass(eq=False)
class PendingSnapshot:
    """The shards of one snapshot that this node holds.

    Attributes:
        done: Ranks whose shard is on the store, or failed.
        record: Record that rank 0 handed over with its shard.
        listeners: Ranks that receive the outcome.
        is_complete: No more shards can come.
        is_alone: This node writes the shards of all ranks, though the group was on several nodes.
        lost: The reason why the shards of another node do not come; None: they may come.
    """

    name: str
    step: int
    generation: int
    world_size: int
    local_world_size: int
    began: float = field(default_factory=time.monotonic)
    staged: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    files: dict[int, list[WrittenFile]] = field(default_factory=dict)
    record: SnapshotRecord | None = None
    listeners: dict[int, ConnectedRank] = field(default_factory=dict)
    state: State = State.STAGING
    reason: str = ""
    is_complete: bool = False
    is_alone: bool = False
    lost: str | None = None

    @property
    def role(self) -> Role:
        """This node's part; PARTICIPANT until rank 0 has staged."""
        if self.is_alone or self.local_world_size == self.world_size:
            return Role.LOCAL
        return Role.COORDINATOR if 0 in self.staged else Role.PARTICIPANT

    @property
    def is_settled(self) -> bool:
        """True if no shard is being written, and no more can come."""
        return self.done == self.staged and (self.is_complete or len(self.staged) == self.local_world_size)

    def abandon(self, reason: str) -> None:
        """Give the snapshot up; the first reason stands."""
        if self.state is not State.ABANDONED:
            self.state, self.reason = State.ABANDONED, reason

    def end(self) -> None:
        """Note that no more shards can come: unless all are here, the snapshot is abandoned."""
        if len(self.staged) < self.local_world_size:
            self.is_complete = True
            self.abandon("the generation ended before all shares were staged")


@dataclass
class _Generation:
    is_single_node: bool
    is_answered: bool = False


class PendingSnapshots:
    """Snapshots without an outcome, and generations, of one writer; safe to use from all its threads.

    Attributes:
        on_room: Called, by the thread that writes or closes a snapshot, whenever there may be room for another.
    """

    def __init__(self) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._open: dict[str, PendingSnapshot] = {}
        self._generations: dict[int, _Generation] = {}
        self._has_all_workers = self._is_finishing = False

    @property
    def newest(self) -> int:
        """The newest generation of which a worker greeted; 0 before the first."""
        return max(self._generations, default=0)

    @property
    def has_room(self) -> bool:
        """True if every open snapshot is on the store or given up, and more may wait for their commit."""
        with self._changed:
            return len(self._open) < MOST_OPEN and all(pending.is_settled for pending in self._open.values())

    @property
    def open_names(self) -> set[str]:
        """Names of the snapshots without an outcome."""
        with self._changed:
            return set(self._open)

    def greet(self, generation: int, *, is_single_node: bool) -> bool:
        """Note a worker of *generation*; False if a newer generation is here: the worker is to be refused."""
        with self._changed:
            if generation < self.newest:
                return False
            self._generations.setdefault(generation, _Generation(is_single_node))
            for pending in self._open.values():
                if pending.generation < generation:
                    pending.end()
            self._changed.notify_all()
            return True

    def await_older(self, generation: int, limit_s: float) -> None:
        """Wait until no snapshot before *generation* is open; after *limit_s*, none of them is committed any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(s.generation >= generation for s in self._open.values()), limit_s
            )
            self._generations[generation].is_answered = True

    def add(
        self,
        pending: PendingSnapshot,
        rank: int,
        record: SnapshotRecord | None,
        listener: ConnectedRank | None,
    ) -> PendingSnapshot:
        """Note that *rank* handed over a shard; return the snapshot of that name: *pending*, or the one that is open."""
        with self._changed:
            pending = self._open.setdefault(pending.name, pending)
            pending.staged.add(rank)
            if listener is not None:
                pending.listeners[rank] = listener
            pending.record = record or pending.record
            if pending.generation < self.newest or self._is_finishing:
                pending.end()
            return pending

    def add_complete(self, pending: PendingSnapshot) -> None:
        """Add a snapshot whose shards are all here."""
        with self._changed:
            self._open[pending.name] = pending

    def finish(
        self, pending: PendingSnapshot, rank: int, files: list[WrittenFile], error: str | None
    ) -> None:
        """Note that *rank*'s shard is on the store, or failed with *error*."""
        with self._changed:
            pending.done.add(rank)
            pending.files[rank] = files
            if error is not None:
                pending.abandon(error)
            if pending.is_settled and pending.state is State.STAGING:
                pending.state = State.WRITTEN
            self._changed.notify_all()
        self.on_room()

    def give_up(self, name: str, reason: str) -> None:
        """Note that another node's shards of snapshot *name* do not come, if it is open."""
        with self._changed:
            if (pending := self._open.get(name)) is not None:
                pending.lost = reason

    def refuse(self, pending: PendingSnapshot, reason: str) -> bool:
        """Forbid the commit of *pending*; False if it is committed already: the caller has to set it aside."""
        with self._changed:
            if pending.state is State.COMMITTED:
                return False
            pending.abandon(reason)
            return True

    def published(self, pending: PendingSnapshot) -> str | None:
        """Note that the manifest is on the store; if *pending* was refused meanwhile, return why: set it aside then."""
        with self._changed:
            if pending.state is State.ABANDONED:
                return pending.reason
            pending.state = State.COMMITTED
            return None

    def end_greetings(self) -> None:
        """Note that no worker will greet any more: nothing waits for a successor."""
        with self._changed:
            self._has_all_workers = True
            self._changed.notify_all()

    def end_all(self) -> None:
        """Note that no more shards can come at all: `next_settled` returns None after the snapshots that are open."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        self.end_open()

    def next_settled(self) -> PendingSnapshot | None:
        """Wait for the oldest open snapshot to be settled and return it; None: no more can come.

        So snapshots are committed in the order in which they were staged.
        """
        with self._changed:
            self._changed.wait_for(self._is_next_known)
            return next(iter(self._open.values()), None)

    def _is_next_known(self) -> bool:
        oldest = next(iter(self._open.values()), None)
        return self._is_finishing if oldest is None else oldest.is_settled

    def close(self, pending: PendingSnapshot) -> None:
        """Note that the snapshot has an outcome."""
        with self._changed:
            self._open.pop(pending.name, None)
            self._changed.notify_all()
        self.on_room()

    def end_open(self) -> None:
        """Note that no more shards of the open snapshots can come."""
        with self._changed:
            for pending in self._open.values():
                pending.end()
            self._changed.notify_all()

    def await_free(self) -> None:
        """Wait until no snapshot is open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open)

    def is_current(self, pending: PendingSnapshot) -> bool:
        """Return whether no newer generation has greeted."""
        with self._changed:
            return pending.generation >= self.newest

    def await_successor(self, pending: PendingSnapshot, limit_s: float) -> int | None:
        """Return the newer generation that waits for this snapshot's outcome; None after *limit_s*, or once no worker can come.

        To be called when a newer generation was claimed: by this node's own launcher, whose workers greet in a moment
        and wait for their answer, or by another launch, whose workers never come here.
        """
        if pending.role is not Role.LOCAL:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self._has_all_workers or self.newest > pending.generation, limit_s)
            newer = [n for n in self._generations if n > pending.generation]
            if not newer or any(
                self._generations[n].is_answered or not self._generations[n].is_single_node for n in newer
            ):
                return None
            return max(newer)
