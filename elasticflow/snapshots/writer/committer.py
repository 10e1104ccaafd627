"""The writer's committing thread: one snapshot after the other, then retention."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import fault_injection
from elasticflow.errors import StorageError
from elasticflow.snapshots.format import manifest, policy, shard_file
from elasticflow.snapshots.format.manifest import Manifest
from elasticflow.snapshots.store.publish import GivenUpError, Publisher, PublishError

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.format.digests import Integrity
    from elasticflow.snapshots.format.shard_file import WrittenFile
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.snapshots.writer.pending import Board, ShareSet

FENCED = "fenced"


class SetAsideError(PublishError):
    """A snapshot was committed and set aside: its files stay for inspection."""


@dataclass(frozen=True)
class Limits:
    """How long the writer waits, in seconds.

    Attributes:
        fence_grace_s: For the workers of the generation that fenced a whole snapshot off.
        settle_s: Before new workers are answered although older snapshots are open.
        shares_s: For other nodes' shares, and for their commit.
    """

    fence_grace_s: float = 10.0
    settle_s: float = 30.0
    shares_s: float = 600.0


@dataclass(frozen=True)
class Config:
    """What the writer is told on its standard input, one JSON line.

    Attributes:
        uri: Snapshot URI; a local one absolute.
        options: For the file system.
        prefix: The run's place under the URI.
        run_id: For the manifest.
        keep_last: As in the job file; so are the next three.
        best_mode: Whether the largest or the smallest metric is the best.
        integrity: Digests that every file gets.
        staging_limit: Most bytes of staging memory on this node.
        limits: See Limits.
        parent: Process id of the process that started the writer.
    """

    uri: str
    run_id: str
    options: dict[str, Any]
    prefix: str = ""
    keep_last: int = 3
    keep_best: int | None = None
    keep_every: str | None = None
    keep_within: str | None = None
    best_mode: policy.Best | None = None
    integrity: Integrity = "crc32"
    staging_limit: int | None = None
    limits: Limits = Limits()
    parent: int | None = None

    @property
    def keep(self) -> policy.Keep:
        """Which snapshots stay."""
        return policy.Keep(
            self.keep_last, self.keep_best, self.keep_every, self.keep_within, best_mode=self.best_mode
        )

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Config:
        """Return the configuration in *content*; absent keys have their defaults."""
        limits = Limits(**(content.get("limits") or {}))
        return cls(**{"options": {}, **content, "limits": limits})


class Committer:
    """Commits what the board holds, in order; `run` is the thread's body."""

    def __init__(self, config: Config, catalog: Catalog, board: Board, report: Callable[..., None]) -> None:
        self._config = config
        self._catalog = catalog
        self._publisher = Publisher(catalog)
        self._board = board
        self._report = report

    def run(self) -> None:
        """Commit until the board is finished; a failure is reported, and the next snapshot is tried."""
        while (share_set := self._board.next_settled()) is not None:
            try:
                committed = self._settle(share_set)
            except Exception as error:  # noqa: BLE001  # whatever the store raises, the next snapshot is tried
                self._give_up(share_set, error)
            else:
                self._board.close(share_set)
                if committed is not None:
                    fault_injection.reach("commit.told")
                    self._retain(share_set, committed)
            for listener in share_set.listeners.values():
                listener.send({"tidied": share_set.name})

    def _settle(self, share_set: ShareSet) -> Manifest | None:
        """Bring the snapshot to its end here; return the manifest if this writer committed it."""
        fault_injection.reach("commit.settled")
        if share_set.error is not None:
            raise PublishError(share_set.error)
        if 0 in share_set.staged:
            return self._commit(share_set)
        for rank, files in sorted(share_set.files.items()):
            self._publisher.announce(share_set.name, rank, {"files": [file.to_json() for file in files]})
        self._publisher.await_commit(
            share_set.name,
            min(share_set.staged),
            self._config.limits.shares_s,
            lambda: self._board.is_current(share_set),
        )
        self._tell(share_set, "snapshot.committed", to_parent=False)
        return None

    def _commit(self, share_set: ShareSet) -> Manifest:
        others = sorted(set(range(share_set.world_size)) - share_set.staged)
        files = [file for files in share_set.files.values() for file in files]
        if others:
            files = files + self._publisher.await_shares(
                share_set.name,
                others,
                self._config.limits.shares_s,
                lambda: self._board.is_current(share_set),
            )
        record = self._manifest(share_set, files)
        fault_injection.reach("commit.before_fence")
        self._check_fence(share_set)
        self._publisher.publish(record)
        if (reason := self._board.published(share_set)) is not None:
            self._catalog.quarantine(share_set.name, reason)
            raise SetAsideError(reason)
        self._tell(
            share_set, "snapshot.committed", bytes=record.size, seconds=record.seconds, trigger=record.trigger
        )
        if others:
            self._publisher.remove_records(share_set.name, others)
        return record

    def _manifest(self, share_set: ShareSet, files: list[WrittenFile]) -> Manifest:
        about = (share_set.record or {}).get("manifest", {})
        metric = about.get("metric")
        return Manifest(
            **{
                "trigger": "unknown",
                **about,
                "metric": None if metric is None else float(metric),
                "run_id": self._config.run_id,
                "name": share_set.name,
                "step": share_set.step,
                "generation": share_set.generation,
                "world_size": share_set.world_size,
                "created": time.time(),
                "seconds": round(time.monotonic() - share_set.began, 4),
                "files": {file.name: file.entry for file in files if not file.is_borrowed},
                "borrowed": {file.name: file.entry for file in files if file.is_borrowed},
                "tensors": {key: place for file in files for key, place in file.tensors.items()},
            }
        )

    def _check_fence(self, share_set: ShareSet) -> None:
        if not self._catalog.is_fenced(share_set.generation):
            return
        successor = self._board.await_successor(share_set, self._config.limits.fence_grace_s)
        if successor is None or self._catalog.is_fenced(successor):
            raise PublishError(FENCED)

    def _give_up(self, share_set: ShareSet, error: Exception) -> None:
        """Clear away what is certain never to be committed, and tell everybody."""
        reason = str(error) if isinstance(error, PublishError) else f"{type(error).__name__}: {error}"
        own = [
            name(rank, share_set.world_size)
            for name in (shard_file.shard_name, shard_file.frozen_name)
            for rank in share_set.staged
        ]
        if isinstance(error, SetAsideError):
            pass
        elif share_set.is_alone:
            self._publisher.discard(share_set.name)
        elif 0 in share_set.staged or share_set.error is not None:
            self._publisher.discard(
                share_set.name, [*own, *([manifest.STATE_FILE] if 0 in share_set.staged else [])]
            )
            with contextlib.suppress(OSError):
                self._publisher.announce(share_set.name, min(share_set.staged), {"failed": reason})
        elif isinstance(error, GivenUpError):
            # In any other case the node of rank 0 may be committing our shares at this moment.
            self._publisher.withdraw(share_set.name, own, share_set.staged)
        if (
            reason == FENCED
        ):  # whoever is told ends this writer, perhaps before it comes to what was staged since
            with contextlib.suppress(OSError, StorageError):
                self._publisher.sweep(share_set.generation + 1, ())
        self._tell(share_set, "snapshot.failed", reason=reason)
        self._board.close(share_set)

    def _tell(self, share_set: ShareSet, event: str, *, to_parent: bool = True, **facts: Any) -> None:
        report = {
            "event": event,
            "name": share_set.name,
            "step": share_set.step,
            "generation": share_set.generation,
            **facts,
        }
        self._report(report, list(share_set.listeners.values()), to_parent=to_parent)

    def _retain(self, share_set: ShareSet, committed: Manifest) -> None:
        """Remove what retention does not keep; its failures never touch the snapshot just committed."""
        config = self._config
        try:
            snapshots = self._catalog.committed()
            in_use = {committed.name, *({committed.parent} if committed.parent else ())}
            keep = policy.keep(snapshots, config.keep, pinned=self._catalog.pinned(), in_use=in_use)
            fault_injection.reach("retention.before")
            for snapshot in snapshots:
                if snapshot.name not in keep and not self._catalog.is_pinned(snapshot.name):
                    self._catalog.remove_snapshot(snapshot.name)
                    self._tell_removed(share_set, snapshot)
            fault_injection.reach("retention.before_sweep")
            self._publisher.sweep(committed.generation, self._board.open_names)
        except (OSError, manifest.DamagedSnapshotError) as error:
            sys.stderr.write(f"snapshot writer: retention failed, the next commit tries again: {error}\n")

    def _tell_removed(self, share_set: ShareSet, snapshot: Manifest) -> None:
        report = {
            "event": "snapshot.removed",
            "name": snapshot.name,
            "step": snapshot.step,
            "generation": snapshot.generation,
        }
        listener = share_set.listeners.get(0)
        self._report(report, [listener] if listener else [], to_parent=True)
