"""The memory tier of a rank: its share held at every due step, for the store and for its successors."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticflow import fault_injection
from elasticflow.errors import StorageError
from elasticflow.run_folder import SNAPSHOT_NAME
from elasticflow.runtime.snapshot.rank_shard import view_of
from elasticflow.runtime.snapshot.restore import Found
from elasticflow.runtime.state import codec
from elasticflow.snapshots.client.memory_tier import MemoryTierClient
from elasticflow.snapshots.format.manifest import Manifest
from elasticflow.snapshots.format.policy import Due

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.snapshot.metadata import Recorder
    from elasticflow.runtime.snapshot.rank_shard import Share, Sharing
    from elasticflow.runtime.snapshot.staging_copy import Copier
    from elasticflow.runtime.state.state import State
    from elasticflow.snapshots.client.memory_tier import RecalledState
    from elasticflow.snapshots.client.staging import StagingClient
    from elasticflow.snapshots.format.policy import HasPosition
    from elasticflow.snapshots.memory.slots import Slot
    from elasticflow.snapshots.store.catalog import Catalog

_TRIGGER = "memory"


@dataclass(frozen=True)
class Held:
    """What the generation before held in memory.

    Attributes:
        found: As a snapshot would be found.
        parent: The newest committed snapshot before it, if any.
        last: Its place, if it was committed in this launch.
    """

    found: Found
    parent: str | None
    last: HasPosition | None

    @classmethod
    def of(cls, held: RecalledState, run_id: str) -> Held:
        """Return what the writer told."""
        about, committed = held.record["manifest"], held.committed
        metric = None if about["metric"] is None else float(about["metric"])
        manifest = Manifest(
            run_id=run_id,
            name=held.name,
            step=held.step,
            generation=held.generation,
            world_size=len(held.shares),
            created=0.0,
            files={},
            tensors={},
            **{**about, "metric": metric},
        )
        tensors = {
            entry.key: view_of(memoryview(memory), codec.BY_NAME[entry.dtype], entry.shape, entry.offset)
            for entries, memory in held.shares
            for entry in entries
        }
        found = Found(manifest, held.record["state"], tensors)
        if committed is None:
            return cls(found, about["parent"], None)
        return cls(found, committed.name, committed)


class Tier:
    """Holds this rank's share in the writer's memory. Every rank of a group that is on one node has one.

    Args:
        me: This worker.
        client: To the writer.
        state: What a snapshot holds.
        sharing: What of it is this rank's.
        recorder: Makes records.
        copier: Copies from the device.
        every: When it is due: "1 step".
    """

    def __init__(
        self,
        me: Worker,
        client: StagingClient,
        state: State,
        sharing: Sharing,
        recorder: Recorder,
        copier: Copier,
        every: str,
    ) -> None:
        self._me, self._state, self._sharing, self._recorder = me, state, sharing, recorder
        self._copier = copier
        self._client, self._tier_client = client, MemoryTierClient(client, me.generation)
        self._due = Due((every,))
        self._last: HasPosition | None = None
        self._last_time = time.monotonic()
        self._share: Share | None = None
        self._held: int | None = None  # step
        if me.rank == 0 and self._due.seconds is not None:
            me.vote.memory_wanted = self._is_due_by_time

    def begin(self, position: Position) -> None:
        """Training begins at *position*."""
        self._last, self._last_time = position, time.monotonic()

    def due(self, position: Position) -> bool:
        """True if the state is to be held after this step; the same on every rank."""
        assert self._last is not None, "begin() comes first"
        return self._me.vote.memory or self._due.is_due(self._last, position)

    def reserve(self, share: Share) -> None:
        """Have the writer make slots for *share* ready while training goes on."""
        self._tier_client.reserve(share.nbytes)

    def hold(self, position: Position) -> None:
        """Copy this rank's share into the writer's memory and return; no process is told, and no rank waited for.

        Raises:
            SnapshotError: the writer died, or has no memory.
            StagingLimitError: the limit is too small for the tier.
            StateError: the state holds something that a snapshot cannot; named.
        """
        self._copier.finish()
        captured = self._state.capture()
        share = self._sharing.share_of(captured)
        self._tier_client.reserve(share.nbytes)
        record = self._recorder.record(position, captured, _TRIGGER)
        name = "" if record is None else self._recorder.name(position.step)
        slot = self._tier_client.next_slot()
        self._copier.start(share, memoryview(slot.memory)[: share.nbytes], captured.stepped)
        self._copier.then(partial(self._seal, share, slot, name, position.step, record))
        self._last, self._last_time, self._held = position, time.monotonic(), position.step

    def _seal(self, share: Share, slot: Slot, name: str, step: int, record: dict[str, Any] | None) -> None:
        if share is not self._share:
            self._tier_client.describe(share.entries, share.nbytes, record)
            self._share = share
        if not self._tier_client.commit_slot(slot, name, step, record):
            self._tier_client.describe(share.entries, share.nbytes, record)
            self._tier_client.commit_slot(slot, name, step, record)
        self._me.heartbeat.hold(step)

    def holds(self, position: Position) -> bool:
        """True if the state after *position* is what was held last, by this generation."""
        return self._held == position.step

    def forget(self, equal_at: int) -> None:
        """Have nothing be gone on from that was held, or taken of it after step *equal_at*; no rank is waited for.

        Raises:
            SnapshotError: the writer died, and what was held with it.
        """
        self._tier_client.invalidate(equal_at)

    def recall(self, catalog: Catalog) -> Held | None:
        """Return what the generation before held, if all ranks have it and nothing committed is newer.

        Collective: every rank. No snapshot is read for it.
        """
        me = self._me
        fault_injection.reach("restore.before_recall")
        held = self._tier_client.recall()
        name = held.name if held is not None else ""
        if me.rank == 0 and held is not None and not _is_newest(held, catalog):
            name = ""
        names = me.gather_text(name)
        if held is None or not name or set(names) != {name}:
            return None
        me.heartbeat.hold(held.step)
        return Held.of(held, me.run_id)

    def _is_due_by_time(self) -> bool:
        return self._due.is_due_by_time(time.monotonic() - self._last_time)


def _is_newest(held: RecalledState, catalog: Catalog) -> bool:
    """Return whether nothing committed is newer, by names alone; True also if the store cannot be asked."""
    try:
        set_aside = catalog.quarantined()
        found = [SNAPSHOT_NAME.fullmatch(name) for name in catalog.storage.list(catalog.folder())]
    except (OSError, StorageError):
        return True
    steps = [int(match["step"]) for match in found if match is not None and match[0] not in set_aside]
    return held.name not in set_aside and max(steps, default=0) <= held.step
