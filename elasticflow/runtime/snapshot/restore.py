"""Finding the newest snapshot that every rank can read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow import events, fault_injection
from elasticflow.errors import SnapshotError, StateError, StorageError
from elasticflow.runtime.data import index_schedule
from elasticflow.runtime.process import random_streams, stopping
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.replica_checks import checksums
from elasticflow.runtime.state.lazy_tensors import Fresh
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.state.state import State
    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.read.load import LoadedSnapshot
    from elasticflow.snapshots.store.catalog import Catalog

_OUTAGE, _UNREAD, _LEAVING = "outage: ", "unread: ", "asked to leave"
_REPLICATED = ("model/", "ema/", "optimizer/", "optimizer.")  # objects of the job's own may differ by design


@dataclass(frozen=True)
class Found:
    """A verified snapshot.

    Attributes:
        manifest: What it holds.
        state: Content of state.json.
        tensors: By key: in memory, or read when they are looked at (`Fresh`).
    """

    manifest: Manifest
    state: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, loaded: LoadedSnapshot) -> Found:
        """Return *loaded*, of whose tensors none is read yet."""
        return cls(loaded.manifest, loaded.state, Fresh(loaded))


class Loads(Protocol):
    """Where snapshots come from: the node's writer (`NodeLoader`)."""

    def load(self, name: str) -> LoadedSnapshot:
        """Return snapshot *name*, verified.

        Raises:
            DamagedSnapshotError: it is not what was written.
            UnreadableSnapshotError: this process may not read it.
            SnapshotError: it cannot be read, which says nothing about it.
        """

    def release(self) -> None:
        """Give up what was loaded."""


def newest_good(me: Worker, catalog: Catalog, loads: Loads) -> Found | None:
    """Return the newest snapshot that all ranks read and verified, or None if there is none. Collective: every rank.

    One that any rank finds damaged is set aside with the reason, and all go on to the next older one; so is one that a
    rank may not read, while an older one can be read. Its tensors can be read until `loads.release` is called.

    Raises:
        SnapshotError: the storage cannot be read on this rank or another, or a node has no memory for the snapshot.
    """
    unread: dict[str, str] = {}
    refused = 0
    for name in candidates(me, catalog):
        found, problem = None, ""
        fault_injection.reach("restore.before_read")
        try:
            found = Found.of(loads.load(name))
        except UnreadableSnapshotError as error:
            problem = _UNREAD + error.message
        except DamagedSnapshotError as error:
            problem = error.message
        except (OSError, SnapshotError, StorageError) as error:
            problem = _OUTAGE + _text(error)
        except stopping.Leaving:
            problem = _LEAVING
        told = _told_by_all(me, problem)
        problems = [text for text in told if text]
        if _LEAVING in problems:
            me.leave_untrained()
        if not problems:
            _set_all_aside(me, catalog, unread)  # since this one can be read, it is they that are damaged
            return found
        found = None
        loads.release()
        if all(text.startswith(_UNREAD) for text in problems):
            unread[name] = problems[0].removeprefix(_UNREAD)
            refused = told.index(problems[0])
        else:
            damage = next(text for text in problems if not text.startswith(_UNREAD))
            _set_all_aside(me, catalog, {name: damage})
    if unread:
        raise SnapshotError(f"rank {refused} cannot read snapshots: {next(iter(unread.values()))}")
    return None


def apply(me: Worker, state: State, found: Found, loads: Loads) -> None:
    """Make the live objects what was found, give it back and see that all ranks did. Collective: every rank.

    All of it is read before anything live is touched.

    Raises:
        SnapshotError: a file of it changed since it was verified, or cannot be read any more; nothing was touched.
        StateError: the snapshot is of another model or optimizer, or the ranks differ now.
    """
    state.apply(found.state["state"], found.tensors, found.manifest.memory_formats)
    loads.release()
    tensors = state.capture().tensors
    checksums.require_same(me, {key: tensors[key] for key in tensors if key.startswith(_REPLICATED)})


def candidates(me: Worker, catalog: Catalog) -> list[str]:
    """Return the committed snapshots, newest first, as rank 0 sees them: a listing can differ between nodes.

    Collective: every rank.

    Raises:
        SnapshotError: rank 0 cannot list them.
    """
    text = ""
    if me.rank == 0:
        try:
            for name, reason in catalog.damaged().items():
                _set_aside(me, catalog, name, reason)
            text = "\n".join(manifest.name for manifest in catalog.committed())
        except (OSError, StorageError) as error:
            text = _OUTAGE + _text(error)
    return _told_by_all(me, text)[0].split()


def _told_by_all(me: Worker, text: str) -> list[str]:
    """Return every rank's *text*.

    Raises:
        SnapshotError: one of them tells of an outage, which says nothing about any snapshot.
    """
    texts = me.gather_text(text)
    for rank, told in enumerate(texts):
        if told.startswith(_OUTAGE):
            raise SnapshotError(f"rank {rank} cannot read snapshots: {told.removeprefix(_OUTAGE)}")
    return texts


def position_of(content: dict[str, Any]) -> Position:
    """Return the position that state.json states.

    Raises:
        StateError: it counts in an order of samples that this version does not know.
    """
    found = content.get("order", 1)  # older snapshots do not say it
    if found != index_schedule.VERSION:
        raise StateError(
            f"the snapshot's position counts in order {found} of the samples, and this version of elasticflow knows order {index_schedule.VERSION} only",
            "go on with the version of elasticflow that took it, or start a new run",
        )
    position = content["position"]
    return Position(**{**position, "cursors": tuple(position.get("cursors", ()))})  # JSON has no tuples


def complete_evaluation(content: dict[str, Any], manifest: Manifest) -> None:
    """Have the evaluation's state in *content* say what data it was measured on; older snapshots said it beside it."""
    state = content["state"].get("evaluation")
    if isinstance(state, dict):
        state.setdefault("data", manifest.fingerprints.get("evaluation"))


def random_version_of(content: dict[str, Any]) -> int:
    """Return the version of the rules for random states that state.json states; see `streams.VERSION`.

    Raises:
        StateError: this version does not know them.
    """
    found = content.get("random", 1)  # older snapshots do not say it
    if found not in range(1, random_streams.VERSION + 1):
        raise StateError(
            f"the snapshot's random states follow rules {found}, and this version of elasticflow knows rules up to {random_streams.VERSION}",
            "go on with the version of elasticflow that took it, or start a new run",
        )
    return int(found)


def _text(error: Exception) -> str:
    return getattr(error, "message", None) or f"{type(error).__name__}: {error}"


def _set_all_aside(me: Worker, catalog: Catalog, damages: Mapping[str, str]) -> None:
    """Set these snapshots aside; every rank goes on once that is done."""
    if damages:
        if me.rank == 0:
            for name, reason in damages.items():
                _set_aside(me, catalog, name, reason)
        me.barrier()


def _set_aside(me: Worker, catalog: Catalog, name: str, reason: str) -> None:
    catalog.quarantine(name, reason)
    me.event(events.SNAPSHOT_REJECTED, name=name, reason=reason)
