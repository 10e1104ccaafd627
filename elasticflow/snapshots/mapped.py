"""The worker's side of loading: a snapshot that the node's writer read and verified, mapped (floor 1, no torch)."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots import manifest
from elasticflow.snapshots.manifest import DamagedSnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.snapshots.link import Link
    from elasticflow.snapshots.manifest import Manifest
    from elasticflow.snapshots.wire import Message


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot in memory.

    The memory is shared with the node's other ranks, and what is written to it stays this process' own. It is given
    back when the last view of it is gone; a view that somebody keeps stays good.

    Attributes:
        manifest: What it holds.
        state: Content of state.json.
        files: Bytes of every file, by location (`Manifest.location`).
    """

    manifest: Manifest
    state: dict[str, Any]
    files: dict[str, memoryview]

    @classmethod
    def of(cls, told: Mapping[str, Any], descriptor: int) -> Loaded:
        """Return what `loading.Answer.facts` tells of; the descriptor of its memory may be closed then.

        Raises:
            OSError: the memory cannot be mapped.
        """
        # Private: a rank that wrote into its views by mistake would not change the others'.
        access = mmap.PROT_READ | mmap.PROT_WRITE
        memory = memoryview(mmap.mmap(descriptor, told["size"], flags=mmap.MAP_PRIVATE, prot=access))
        files = {
            location: memory[offset : offset + size] for location, (offset, size) in told["files"].items()
        }
        return cls(manifest.parse(told["manifest"].encode()), json.loads(told["content"]), files)


class NodeLoader:
    """Loads snapshots through this node's writer, which reads each once for all ranks that ask. For one rank.

    Args:
        link: The connection to the writer.
        beat: Called whenever the writer has read on.
    """

    def __init__(self, link: Link, beat: Callable[[], None]) -> None:
        self._link, self._beat = link, beat
        self._name = ""
        self._answer: dict[str, Any] | None = None
        link.handlers["load"] = self._hear

    def load(self, name: str) -> Loaded:
        """Return snapshot *name*; `release` must follow once nothing of it is used any more.

        Raises:
            DamagedSnapshotError: it is not what was written; says what.
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
                descriptor = self._link.descriptors.popleft()
                try:
                    return Loaded.of(answer, descriptor)
                finally:
                    os.close(descriptor)
            case "damaged":
                raise DamagedSnapshotError(answer["reason"])
            case _:
                raise SnapshotError(answer["reason"])

    def release(self) -> None:
        """Tell the writer that this rank has no use for what it loaded.

        Raises:
            SnapshotError: the writer died.
        """
        self._link.send({"unload": self._name})

    def _hear(self, message: Message) -> None:
        told = message["load"]
        if told["state"] == "reading":
            self._beat()
        else:
            self._answer = told
