"""Finds the newest snapshot that every rank can read, and applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.errors import SnapshotError, StorageError, in_words
from elasticflow.runtime.process import checksums, stopping
from elasticflow.runtime.state.codec import LazyTensors
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.snapshot.metadata import StateRecord
    from elasticflow.runtime.state.options import OptionChange
    from elasticflow.runtime.state.state import State
    from elasticflow.snapshots.client.loading import NodeLoader
    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.read.load import LoadedSnapshot
    from elasticflow.snapshots.store.catalog import Catalog

_OUTAGE, _UNREAD, _LEAVING = "outage: ", "unread: ", "asked to leave"
# Objects of the job's own may differ by design.
_REPLICATED = ("model/", "ema/", "optimizer/", "optimizer.")


@dataclass(frozen=True)
class SnapshotContent:
    """A verified snapshot, ready to be applied.

    Attributes:
        tensors: Tensors by key, in memory or read at each lookup (`LazyTensors`).
    """

    manifest: Manifest
    state: dict[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, loaded: LoadedSnapshot) -> SnapshotContent:
        """Return the content of *loaded*; reads no tensor yet."""
        return cls(loaded.manifest, loaded.state, LazyTensors(loaded))


def newest_good(me: Worker, catalog: Catalog, loader: NodeLoader) -> SnapshotContent | None:
    """Return the newest snapshot that all ranks have read and verified; None if no snapshot exists. Collective: every rank.

    A snapshot that any rank finds damaged is set aside with the reason, and all ranks try the next older one. A snapshot
    that a rank may not read is set aside, too, if an older one can be read. The returned
    snapshot's tensors can be read until `loader.release` is called.

    Raises:
        SnapshotError: the storage cannot be read on this rank or another, or a node has no memory for the snapshot.
    """
    unread: dict[str, str] = {}
    refused = 0
    for name in candidates(me, catalog):
        content, problem = None, ""
        fault_injection.reach("restore.before_read")
        try:
            content = SnapshotContent.of(loader.load(name))
        except UnreadableSnapshotError as error:
            problem = _UNREAD + error.message
        except DamagedSnapshotError as error:
            problem = error.message
        except (OSError, SnapshotError, StorageError) as error:
            problem = _OUTAGE + in_words(error)
        except stopping.Leaving:
            problem = _LEAVING
        by_rank = _gather_unless_outage(me, problem)
        problems = [text for text in by_rank if text]
        if _LEAVING in problems:
            me.leave_if_asked()
        if not problems:
            # Since this snapshot can be read, the unreadable snapshots are damaged.
            _set_all_aside(me, catalog, unread)
            return content
        # Its tensors hold the files open.
        content = None
        loader.release()
        if all(text.startswith(_UNREAD) for text in problems):
            unread[name] = problems[0].removeprefix(_UNREAD)
            refused = by_rank.index(problems[0])
        else:
            damage = next(text for text in problems if not text.startswith(_UNREAD))
            _set_all_aside(me, catalog, {name: damage})
    if unread:
        raise SnapshotError(f"rank {refused} cannot read snapshots: {next(iter(unread.values()))}")
    return None


def option_changes(me: Worker, state: State, record: StateRecord, world_size: int) -> list[OptionChange]:
    """Return the options of optimizers and schedules that the job has changed since the snapshot was taken.

    The list is empty for an older snapshot, which does not record the job's options. It is also empty for the same job at
    another number of workers: there the job's code derives a difference from that number, and the run keeps its options.
    """
    is_resized = record.job_digest == me.job_digest and world_size != me.world_size
    return [] if record.options is None or is_resized else state.options.changes_since(record.options)


def apply(
    me: Worker,
    state: State,
    content: SnapshotContent,
    loader: NodeLoader,
    changes: Sequence[OptionChange] = (),
) -> None:
    """Apply the snapshot's state to the live objects, and make sure that all ranks have the same. Collective: every rank.

    The whole snapshot is read before any live object is changed, and released once it is applied. Options in *changes*
    keep the job's current values.

    Raises:
        SnapshotError: a file changed since it was verified, or cannot be read any more; no live object was changed.
        StateError: the snapshot belongs to another model or optimizer, or the ranks differ now.
    """
    formats, made = content.manifest.memory_formats, content.state.get("options")
    state.apply(content.state["state"], content.tensors, formats, changes, made)
    loader.release()
    captured = state.capture()
    compared = {key: tensor for key, tensor in captured.tensors.items() if key.startswith(_REPLICATED)}
    whole = {key: tensor for key, tensor in compared.items() if key not in captured.boxes}
    checksums.require_same(me, whole)
    if captured.boxes:
        parts = {key: tensor for key, tensor in compared.items() if key in captured.boxes}
        checksums.require_same(me, parts, captured.shards.holders)


def candidates(me: Worker, catalog: Catalog) -> list[str]:
    """Return the names of the committed snapshots, newest first, from rank 0's listing: listings can differ between nodes.

    Collective: every rank.

    Raises:
        SnapshotError: rank 0 cannot list them.
    """
    text = ""
    if me.rank == 0:
        try:
            names = []
            for name, content in catalog.scan():
                if isinstance(content, str):
                    _set_aside(me, catalog, name, content)
                else:
                    # The loader refuses the snapshot of another version, where it is the newest.
                    names.append(name)
            text = "\n".join(names)
        except (OSError, StorageError) as error:
            text = _OUTAGE + in_words(error)
    return _gather_unless_outage(me, text)[0].split()


def _gather_unless_outage(me: Worker, text: str) -> list[str]:
    """Return every rank's *text*."""
    texts = me.gather_text(text)
    for rank, of_rank in enumerate(texts):
        if of_rank.startswith(_OUTAGE):
            raise SnapshotError(f"rank {rank} cannot read snapshots: {of_rank.removeprefix(_OUTAGE)}")
    return texts


def complete_evaluation(tree: dict[str, Any], manifest: Manifest) -> None:
    """Add the fingerprint of the evaluation's data to its state in *tree*; older snapshots have it in the manifest alone."""
    state = tree.get("evaluation")
    if isinstance(state, dict):
        state.setdefault("data", manifest.fingerprints.get("evaluation"))


def _set_all_aside(me: Worker, catalog: Catalog, damages: Mapping[str, str]) -> None:
    """Set the snapshots in *damages* aside; every rank waits until that is done."""
    if damages:
        if me.rank == 0:
            for name, reason in damages.items():
                _set_aside(me, catalog, name, reason)
        me.barrier()


def _set_aside(me: Worker, catalog: Catalog, name: str, reason: str) -> None:
    catalog.quarantine(name, reason)
    me.event(events.SNAPSHOT_REJECTED, name=name, reason=reason)
    me.tell(f"snapshot {name} is set aside: {reason}")
