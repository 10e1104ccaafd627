"""A worker's side of loading: the node's writer verifies a snapshot and hands its files over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.snapshots.read.load import LoadedSnapshot

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.snapshots.client.channel import Message
    from elasticflow.snapshots.client.connection import WriterConnection


class NodeLoader:
    """Loads snapshots through this node's writer, which verifies each once for all ranks that ask. For one rank.

    Args:
        link: The connection to the writer.
        beat: Called whenever the writer has read on.
    """

    def __init__(self, link: WriterConnection, beat: Callable[[], None]) -> None:
        self._link, self._beat = link, beat
        self._name = ""
        self._answer: dict[str, Any] | None = None
        self._loaded: LoadedSnapshot | None = None
        link.handlers["load"] = self._hear

    def load(self, name: str) -> LoadedSnapshot:
        """Return snapshot *name*; `release` must follow once nothing more of it is to be read.

        Raises:
            DamagedSnapshotError: it is not what was written; says what.
            UnreadableSnapshotError: this machine's writer may not read it.
            SnapshotError: the store cannot be read, the node has no memory for it, or the writer died; that says
                nothing about the snapshot.
        """
        self._name, self._answer = name, None
        self._link.send({"load": name})
        while self._answer is None:
            self._link.receive_one(None, f"{name} was not loaded")
        answer = self._answer
        match answer["state"]:
            case "ready":
                descriptors = [self._link.descriptors.popleft() for _ in answer["files"]["stat_marks"]]
                self._loaded = LoadedSnapshot.from_json(answer, descriptors)
                return self._loaded
            case "damaged":
                raise DamagedSnapshotError(answer["reason"])
            case "refused":
                raise UnreadableSnapshotError(answer["reason"])
            case _:
                raise SnapshotError(answer["reason"])

    def release(self) -> None:
        """Close what was loaded, if anything was, and tell the writer that this rank has no use for it.

        Raises:
            SnapshotError: the writer died.
        """
        if self._loaded is not None:
            self._loaded.files.close()
            self._loaded = None
        self._link.send({"unload": self._name})

    def _hear(self, message: Message) -> None:
        told = message["load"]
        if told["state"] == "reading":
            self._beat()
        else:
            self._answer = told
