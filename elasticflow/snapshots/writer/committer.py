"""The writer's committing thread: one snapshot after the other, then retention."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.errors import StorageError
from elasticflow.snapshots.client.messages import FENCED, RetentionDone, SnapshotReport
from elasticflow.snapshots.format import manifest, pieces, policy, shard_file
from elasticflow.snapshots.format.manifest import Manifest
from elasticflow.snapshots.store.publish import CommitAbandonedError, CommitRefusedError, Publisher
from elasticflow.snapshots.writer.pending import Role, State
from elasticflow.snapshots.writer.threads import thread
from elasticflow.system import fault_injection
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.client.writer_process import WriterStart
    from elasticflow.snapshots.format.shard_file import WrittenFile
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.writer.pending import PendingSnapshot, PendingSnapshots


_AGAIN_S = 1.0


class CommittedButSetAsideError(CommitRefusedError):
    """A snapshot was committed and set aside: its files stay for inspection."""


class Committer:
    """Commits the snapshots of `PendingSnapshots`, in order; `run` is the thread's body."""

    def __init__(
        self,
        start: WriterStart,
        catalog: Catalog,
        pending_snapshots: PendingSnapshots,
        report: Callable[..., None],
    ) -> None:
        self._start = start
        self._catalog = catalog
        self._publisher = Publisher(catalog)
        self._pending_snapshots = pending_snapshots
        self._report = report

    def run(self) -> None:
        """Commit snapshots until no more can come; a failure is reported, and the next snapshot follows."""
        while (pending := self._pending_snapshots.next_settled()) is not None:
            try:
                committed = self._settle(pending)
            except Exception as error:  # noqa: BLE001  # whatever the store raises, the next snapshot follows
                self._give_up(pending, error)
            else:
                self._pending_snapshots.close(pending)
                if committed is not None:
                    fault_injection.reach("commit.told")
                    self._retain(pending, committed)
            for listener in pending.listeners.values():
                listener.send(RetentionDone(pending.name))

    def _settle(self, pending: PendingSnapshot) -> Manifest | None:
        """Commit the snapshot, or wait until another node did; return the manifest if this writer committed it."""
        fault_injection.reach("commit.settled")
        if pending.state is State.ABANDONED:
            raise CommitRefusedError(pending.reason)
        if pending.role is not Role.PARTICIPANT:
            return self._commit(pending)
        for rank, files in sorted(pending.files.items()):
            self._publisher.announce(pending.name, rank, {"files": files})
        self._publisher.await_commit(
            pending.name,
            min(pending.staged),
            self._start.limits.shares_s,
            lambda: self._pending_snapshots.is_current(pending),
            pending.world_size // pending.local_world_size,
        )
        self._pending_snapshots.published(pending)
        self._tell(pending, events.SNAPSHOT_COMMITTED, to_parent=False)
        return None

    def _commit(self, pending: PendingSnapshot) -> Manifest:
        others = [] if pending.is_alone else sorted(set(range(pending.world_size)) - pending.staged)
        files = [file for files in pending.files.values() for file in files]
        if others:
            files = files + self._publisher.await_shards(
                pending.name,
                others,
                self._start.limits.shares_s,
                lambda: self._may_come(pending),
            )
        record = self._manifest(pending, files)
        fault_injection.reach("commit.before_fence")
        self._check_fence(pending)
        self._publisher.publish(record)
        if (reason := self._pending_snapshots.published(pending)) is not None:
            self._catalog.quarantine(pending.name, reason)
            raise CommittedButSetAsideError(reason)
        self._tell(
            pending,
            events.SNAPSHOT_COMMITTED,
            bytes=record.size,
            seconds=record.seconds,
            trigger=record.trigger,
        )
        if others:
            self._publisher.remove_records(pending.name, others)
        return record

    def _may_come(self, pending: PendingSnapshot) -> bool:
        """Return whether the shards of other nodes may still come; raise CommitRefusedError if one of these nodes has said no."""
        if pending.lost is not None:
            raise CommitRefusedError(pending.lost)
        return self._pending_snapshots.is_current(pending)

    def _manifest(self, pending: PendingSnapshot, files: list[WrittenFile]) -> Manifest:
        assert pending.record is not None, "rank 0 hands the record over with its shard"
        tensors = {key: place for file in files for key, place in file.tensors.items()}
        if len(tensors) != sum(len(file.tensors) for file in files):
            [(twice, _)] = Counter(key for file in files for key in file.tensors).most_common(1)
            raise CommitRefusedError(
                f"{twice} was stored twice, and a snapshot holds each tensor and each row once"
            )
        pieces.whole_tensors(tensors)  # a snapshot without some rows must never exist
        return Manifest(
            run_id=self._start.run_id,
            name=pending.name,
            step=pending.step,
            generation=pending.generation,
            world_size=pending.world_size,
            created=time.time(),
            seconds=round(time.monotonic() - pending.began, 4),
            files={file.name: file.entry for file in files if not file.is_borrowed},
            borrowed={file.name: file.entry for file in files if file.is_borrowed},
            tensors=tensors,
            format=manifest.format_of(tensors),
            **vars(pending.record.manifest),
        )

    def _check_fence(self, pending: PendingSnapshot) -> None:
        if not self._catalog.is_fenced(pending.generation):
            return
        successor = self._pending_snapshots.await_successor(pending, self._start.limits.fence_grace_s)
        if successor is None or self._catalog.is_fenced(successor):
            raise CommitRefusedError(FENCED)

    def _give_up(self, pending: PendingSnapshot, error: Exception) -> None:
        """Remove the files that are certain never to be committed, and report the failure."""
        reason = str(error) if isinstance(error, CommitRefusedError) else f"{type(error).__name__}: {error}"
        own = [
            name(rank, pending.world_size)
            for name in (shard_file.shard_name, shard_file.frozen_name)
            for rank in pending.staged
        ]
        if isinstance(error, CommittedButSetAsideError):
            pass
        elif pending.role is Role.LOCAL:
            self._publisher.discard(pending.name)
        elif pending.role is Role.COORDINATOR or pending.state is State.ABANDONED:
            self._publisher.discard(
                pending.name, [*own, *([manifest.STATE_FILE] if 0 in pending.staged else [])]
            )
            if not self._has_announced(pending, reason):
                # The node that commits would wait for this node's shards until its limit, and training for it.
                thread(self._announce_later, pending, reason).start()
        elif isinstance(error, CommitAbandonedError):
            # In any other case the node of rank 0 may be committing our shards at this moment.
            self._publisher.withdraw(pending.name, own, pending.staged)
        with contextlib.suppress(OSError, StorageError):
            if reason == FENCED:
                # The parent ends a fenced writer, perhaps before it comes to the snapshots staged since.
                self._publisher.sweep(pending.generation + 1, ())
            elif self._catalog.storage.is_local:
                # A disk may be full of what dead writers left, and no commit would come that sweeps it.
                self._publisher.sweep(pending.generation, self._pending_snapshots.open_names)
        self._tell(pending, events.SNAPSHOT_FAILED, reason=reason)
        self._pending_snapshots.close(pending)

    def _announce_later(self, pending: PendingSnapshot, reason: str) -> None:
        """Return once the other nodes can read why *pending* failed here, or wait for it no more."""
        for _ in attempts(self._start.limits.shares_s, _AGAIN_S):
            if not self._pending_snapshots.is_current(pending) or self._has_announced(pending, reason):
                return

    def _has_announced(self, pending: PendingSnapshot, reason: str) -> bool:
        try:
            self._publisher.announce(pending.name, min(pending.staged), {"failed": reason})
        except (OSError, StorageError):
            return False
        return True

    def _tell(self, pending: PendingSnapshot, event: str, *, to_parent: bool = True, **figures: Any) -> None:
        report = SnapshotReport(event, pending.name, pending.step, pending.generation, **figures)
        self._report(report, list(pending.listeners.values()), to_parent=to_parent)

    def _retain(self, pending: PendingSnapshot, committed: Manifest) -> None:
        """Remove the snapshots that retention does not keep; failures never touch the snapshot just committed."""
        try:
            snapshots = self._catalog.committed()
            in_use = {committed.name, *({committed.parent} if committed.parent else ())}
            staying = policy.reasons(
                snapshots, self._start.settings.keep, pinned=self._catalog.pinned(), in_use=in_use
            )
            fault_injection.reach("retention.before")
            going = [snapshot for snapshot in snapshots if snapshot.name not in staying]
            self._catalog.do_all(
                [
                    *(partial(self._remove, pending, snapshot) for snapshot in going),
                    partial(self._sweep, committed),
                ]
            )
        except (OSError, manifest.DamagedSnapshotError) as error:
            sys.stderr.write(f"snapshot writer: retention failed, the next commit tries again: {error}\n")

    def _sweep(self, committed: Manifest) -> None:
        fault_injection.reach("retention.before_sweep")
        self._publisher.sweep(committed.generation, self._pending_snapshots.open_names)

    def _remove(self, pending: PendingSnapshot, snapshot: Manifest) -> None:
        if self._catalog.is_pinned(snapshot.name):
            return
        self._catalog.remove_snapshot(snapshot.name)
        report = SnapshotReport(events.SNAPSHOT_REMOVED, snapshot.name, snapshot.step, snapshot.generation)
        listener = pending.listeners.get(0)
        self._report(report, [listener] if listener else [], to_parent=True)
