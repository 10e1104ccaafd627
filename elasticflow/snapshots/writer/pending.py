"""Which shares have come, and which generation may still commit: the writer's shared memory of itself.

The rule that keeps history in one line: a snapshot of an older generation may be committed only while no worker of a
newer one can have chosen where to start from. Workers learn that their writer is ready by its answer to their greeting,
so the answer waits until older snapshots have an outcome.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.format.shard_file import WrittenFile


@dataclass(eq=False)
class PendingSnapshot:
    """The shares of one snapshot that this node holds.

    Attributes:
        staged: Ranks whose share was handed over.
        done: Ranks whose share is on the store, or failed.
        files: What is on the store, by rank.
        record: What rank 0 gave with its share.
        error: Why the snapshot cannot be committed.
        listeners: Who is told of the outcome, by rank.
        is_over: No more shares can come.
        is_published: Its manifest is there.
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
    record: dict[str, Any] | None = None
    error: str | None = None
    listeners: dict[int, Any] = field(default_factory=dict)
    is_over: bool = False
    is_published: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether all ranks are on this node."""
        return self.local_world_size == self.world_size

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it is still coming or being written."""
        return self.done == self.staged and (self.is_over or len(self.staged) == self.local_world_size)

    def end(self) -> None:
        """No more shares can come: unless all are here, the snapshot cannot be committed."""
        if len(self.staged) < self.local_world_size:
            self.is_over = True
            self.error = self.error or "the generation ended before all shares were staged"


@dataclass
class _Generation:
    is_alone: bool
    answered: bool = False


class PendingSnapshots:
    """Share sets and generations of one writer; safe to use from all its threads.

    Attributes:
        on_free: Called, by the thread that closes a snapshot, whenever no other is open.
    """

    def __init__(self) -> None:
        self.on_free: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._sets: dict[str, PendingSnapshot] = {}
        self._generations: dict[int, _Generation] = {}
        self._is_finishing = False

    @property
    def newest(self) -> int:
        """The newest generation that greeted; 0 before the first."""
        return max(self._generations, default=0)

    @property
    def is_free(self) -> bool:
        """Whether no snapshot is without an outcome."""
        with self._changed:
            return not self._sets

    @property
    def open_names(self) -> set[str]:
        """Names of the snapshots without an outcome."""
        with self._changed:
            return set(self._sets)

    def greet(self, generation: int, *, is_alone: bool) -> bool:
        """Take note of a worker of *generation*; True if it is welcome: no newer generation is here."""
        with self._changed:
            if generation < self.newest:
                return False
            self._generations.setdefault(generation, _Generation(is_alone))
            for pending in self._sets.values():
                if pending.generation < generation:
                    pending.end()
            self._changed.notify_all()
            return True

    def settle(self, generation: int, limit_s: float) -> None:
        """Return when no snapshot before *generation* is open, or after *limit_s*; then none of them is committed."""
        with self._changed:
            self._changed.wait_for(
                lambda: all(s.generation >= generation for s in self._sets.values()), limit_s
            )
            self._generations[generation].answered = True

    def add(
        self, share: PendingSnapshot, rank: int, record: dict[str, Any] | None, listener: Any
    ) -> PendingSnapshot:
        """Note that *rank* handed over a share of the snapshot that *share* describes; return its set."""
        with self._changed:
            pending = self._sets.setdefault(share.name, share)
            pending.staged.add(rank)
            pending.listeners[rank] = listener
            pending.record = record or pending.record
            if pending.generation < self.newest or self._is_finishing:
                pending.end()
            return pending

    def enter(self, pending: PendingSnapshot) -> None:
        """Note a snapshot whose shares are all here."""
        with self._changed:
            self._sets[pending.name] = pending

    def finish(
        self, pending: PendingSnapshot, rank: int, files: list[WrittenFile], error: str | None
    ) -> None:
        """Note that *rank*'s share is on the store or failed."""
        with self._changed:
            pending.done.add(rank)
            pending.files[rank] = files
            pending.error = pending.error or error
            self._changed.notify_all()

    def refuse(self, pending: PendingSnapshot, reason: str) -> bool:
        """Have *pending* not be committed; False if it was: who asks has to set it aside."""
        with self._changed:
            pending.error = pending.error or reason
            return not pending.is_published

    def published(self, pending: PendingSnapshot) -> str | None:
        """Note that the manifest is there; return why it was refused meanwhile: who published has to set it aside."""
        with self._changed:
            pending.is_published = True
            return pending.error

    def end_all(self) -> None:
        """No more shares can come at all: once every open set is settled, `next_settled` has no more."""
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        self.end_open()

    def next_settled(self) -> PendingSnapshot | None:
        """Return the oldest open set once it is settled: snapshots are committed in the order they were staged."""
        with self._changed:
            self._changed.wait_for(self._can_tell_next)
            return next(iter(self._sets.values()), None)

    def _can_tell_next(self) -> bool:
        oldest = next(iter(self._sets.values()), None)
        return self._is_finishing if oldest is None else oldest.is_settled

    def close(self, pending: PendingSnapshot) -> None:
        """The snapshot has an outcome."""
        with self._changed:
            self._sets.pop(pending.name, None)
            is_free = not self._sets
            self._changed.notify_all()
        if is_free:
            self.on_free()

    def end_open(self) -> None:
        """No more shares can come of the snapshots that are open."""
        with self._changed:
            for pending in self._sets.values():
                pending.end()
            self._changed.notify_all()

    def await_free(self) -> None:
        """Return when no snapshot is open."""
        with self._changed:
            self._changed.wait_for(lambda: not self._sets)

    def is_current(self, pending: PendingSnapshot) -> bool:
        """Return whether no newer generation has greeted."""
        with self._changed:
            return pending.generation >= self.newest

    def await_successor(self, pending: PendingSnapshot, limit_s: float) -> int | None:
        """Return the newer generation that waits for this snapshot's outcome, or None if there is none.

        Asked when a newer generation was claimed: by this node's own launcher, whose workers greet in a moment and
        wait for their answer, or by another launch, whose workers never come here.
        """
        if not pending.is_alone:
            return None
        with self._changed:
            self._changed.wait_for(lambda: self.newest > pending.generation, limit_s)
            newer = [n for n in self._generations if n > pending.generation]
            if not newer or any(
                self._generations[n].answered or not self._generations[n].is_alone for n in newer
            ):
                return None
            return max(newer)
