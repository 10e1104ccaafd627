"""Moves a node's cache to its place beside the snapshots, or from there: `python -m elasticflow.launcher.compiler_cache.transfer`.

A process of its own: libraries for stores are large, and what goes wrong here must end no run. It reads one line of JSON
and writes one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from elasticflow.errors import ElasticflowError
from elasticflow.launcher.compiler_cache import archive
from elasticflow.launcher.compiler_cache.machine_kind import MachineKind
from elasticflow.launcher.compiler_cache.node_folder import NodeFolder
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.storage.retry import Patience
from elasticflow.storage.storage import Storage
from elasticflow.system.processes import die_with_parent

# Workers wait for a cache that is loaded; no one waits for one that is saved.
_LOAD_PATIENCE, _SAVE_PATIENCE = Patience(total_s=15.0), Patience()
_IDLE = 19

Action = Literal["load", "save"]
Outcome = Literal["loaded", "saved", "none", "busy", "failed"]


@dataclass(frozen=True)
class Transfer:
    """A request to load or save.

    Attributes:
        parent: Process whose end also ends this one.
        is_first: The node has rank 0; others save only where there is no cache of their kind.
    """

    action: Action
    parent: int
    folder: str
    kind: str
    facts: dict[str, str]
    uri: str
    prefix: str
    options: dict[str, Any]
    is_first: bool = False


@dataclass(frozen=True)
class Transferred:
    """Result of a request.

    Attributes:
        outcome: `none`: there was nothing to do; `busy`: a compiler is writing, so try again.
    """

    outcome: Outcome
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    reason: str = ""


def main() -> None:
    """Carry out the request on standard input, and write the result to standard output."""
    asked = from_json(Transfer, json.loads(sys.stdin.readline()))
    die_with_parent(asked.parent)
    began = time.monotonic()
    try:
        done = load(asked) if asked.action == "load" else save(asked)
    except (OSError, ElasticflowError) as error:
        done = Transferred("failed", reason=str(error) or type(error).__name__)
    done = replace(done, seconds=round(time.monotonic() - began, 3))
    sys.stdout.write(to_json(done) + "\n")
    sys.stdout.flush()


def load(asked: Transfer) -> Transferred:
    """Fill the node's folder from beside the snapshots, and seal it.

    Raises:
        OSError: the store does not answer, or the folder cannot be written.
        ElasticflowError: what lies there is not what was written, or the store cannot be opened.
    """
    folder = NodeFolder(Path(asked.folder))
    stored = _store(asked, _LOAD_PATIENCE).load()
    if stored is None:
        return Transferred("none")
    files = archive.unpack(stored.data, folder.path)
    folder.seal(files, is_stored=True)
    return Transferred("loaded", len(files), len(stored.data))


def save(asked: Transfer) -> Transferred:
    """Seal the node's folder, and put its files beside the snapshots.

    Raises:
        OSError: the store does not answer, or the folder cannot be read.
        ElasticflowError: the cache is too large, or the store cannot be opened.
    """
    os.nice(_IDLE)
    folder = NodeFolder(Path(asked.folder))
    if folder.is_being_written():
        return Transferred("busy")
    states = folder.files()
    files = {name: state.size for name, state in states.items()}
    if (size := sum(files.values())) > archive.MOST_BYTES:
        if folder.is_being_written() or not folder.has_still(states):
            return Transferred("busy")
        folder.seal(files, is_stored=True)  # as good as: it is not tried again
        raise archive.BadArchiveError(
            f"it has {size >> 20} MB, and at most {archive.MOST_BYTES >> 20} MB are put beside the snapshots"
        )
    try:
        data = archive.pack(folder.path, files)
    except FileNotFoundError:  # the workers of a generation have ended, and the folder is being repaired
        return Transferred("busy")
    if folder.is_being_written() or not folder.has_still(states):
        return Transferred("busy")
    folder.seal(files, is_stored=False)
    store = _store(asked, _SAVE_PATIENCE)
    if asked.is_first or not store.has_one():
        store.save(data, files)
        folder.seal(files, is_stored=True)
        return Transferred("saved", len(files), len(data))
    folder.seal(files, is_stored=True)
    return Transferred("none")


def _store(asked: Transfer, patience: Patience) -> archive.CacheStore:
    storage = Storage(asked.uri, asked.options, patience=patience)
    return archive.CacheStore(storage, asked.prefix, MachineKind(asked.kind, asked.facts))


if __name__ == "__main__":
    main()
