"""The worker's side of loading: a snapshot that the node's writer verified, read where it is held."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format import manifest
from elasticflow.snapshots.format.manifest import DamagedSnapshotError, UnreadableSnapshotError
from elasticflow.snapshots.read.verified_files import Held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from elasticflow.snapshots.client.channel import Message
    from elasticflow.snapshots.client.connection import Link
    from elasticflow.snapshots.format.manifest import Manifest


@dataclass(frozen=True)
class Loaded:
    """A verified snapshot, whose tensors are read one by one into memory of the reader's own.

    Attributes:
        manifest: What it holds.
        state: Content of state.json.
        held: Its files.
    """

    manifest: Manifest
    state: dict[str, Any]
    held: Held

    @classmethod
    def of(cls, told: Mapping[str, Any], descriptors: Sequence[int]) -> Loaded:
        """Return what `loading.Answer.facts` tells of; the descriptors are its own from now on."""
        about = manifest.parse(told["manifest"].encode())
        return cls(about, json.loads(told["content"]), Held.of(told["held"], descriptors))

    def read_into(self, key: str, target: memoryview) -> None:
        """Fill *target* with the bytes of tensor *key*, as they were verified.

        Raises:
            SnapshotError: its file changed meanwhile, or cannot be read.
        """
        place = self.manifest.tensors[key]
        self.held.read_into(self.manifest.location(place.file), place.offset, target)


class NodeLoader:
    """Loads snapshots through this node's writer, which verifies each once for all ranks that ask. For one rank.

    Args:
        link: The connection to the writer.
        beat: Called whenever the writer has read on.
    """

    def __init__(self, link: Link, beat: Callable[[], None]) -> None:
        self._link, self._beat = link, beat
        self._name = ""
        self._answer: dict[str, Any] | None = None
        self._loaded: Loaded | None = None
        link.handlers["load"] = self._hear

    def load(self, name: str) -> Loaded:
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
                descriptors = [self._link.descriptors.popleft() for _ in answer["held"]["marks"]]
                self._loaded = Loaded.of(answer, descriptors)
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
            self._loaded.held.close()
            self._loaded = None
        self._link.send({"unload": self._name})

    def _hear(self, message: Message) -> None:
        told = message["load"]
        if told["state"] == "reading":
            self._beat()
        else:
            self._answer = told
