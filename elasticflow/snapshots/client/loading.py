"""A worker's side of loading: the node's writer verifies a snapshot and hands its files over."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, assert_never, cast

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.client.messages import Load, LoadFailed, LoadProgress, LoadReady, Unload
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.snapshots.read.load import LoadedSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.client.staging import StagingClient


class NodeLoader:
    """Loads snapshots for one rank through its node's writer, which verifies each snapshot once for all ranks.

    Args:
        beat: Called when the writer reports that it has read more.
    """

    def __init__(self, link: StagingClient, beat: Callable[[], None]) -> None:
        self._link = link
        self._loaded: list[LoadedSnapshot] = []
        link.handlers[LoadProgress] = lambda _: beat()

    def load(self, name: str) -> LoadedSnapshot:
        """Return snapshot *name*, verified as far as this node's ranks need it; call `release` once its tensors have been read.

        Raises:
            DamagedSnapshotError: the snapshot is not what was written; the text says where.
            UnreadableSnapshotError: this node's writer may not read the snapshot.
            SnapshotError: the store cannot be read, the node has no memory for the snapshot, or the writer died; that
                says nothing about the snapshot.
        """
        return self._ask(Load(name))

    def _ask(self, request: Load) -> LoadedSnapshot:
        name = request.name
        asked = self._link.ask(request, LoadReady, LoadFailed, complaint=f"{name} was not loaded")
        answer = cast("LoadReady | LoadFailed", asked)
        match answer:
            case LoadReady():
                descriptors = [self._link.descriptors.popleft() for _ in range(answer.descriptors)]
                whole = cache(lambda: self._ask(Load(name, is_whole=True)))
                loaded = LoadedSnapshot.from_json(answer.snapshot, descriptors, whole)
                self._loaded.append(loaded)
                return loaded
            case LoadFailed(kind="damaged"):
                raise DamagedSnapshotError(answer.reason)
            case LoadFailed(kind="forbidden"):
                raise UnreadableSnapshotError(answer.reason)
            case LoadFailed():
                raise SnapshotError(answer.reason)
            case _:
                assert_never(answer)

    def release(self) -> None:
        """Close the loaded snapshot, if there is one, and tell the writer that this rank does not need it any more."""
        for loaded in self._loaded:
            loaded.files.close()
        self._loaded.clear()
        self._link.send(Unload())
