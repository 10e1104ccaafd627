"""The commit record of a snapshot: a snapshot exists when its MANIFEST.json does (floor 1, pure)."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from elasticflow.errors import SnapshotError

FORMAT = 1
FILE_NAME = "MANIFEST.json"
STATE_FILE = "state.json"
BLOCK = 8 << 20  # bytes under one checksum: small enough to say where the damage is


class DamagedSnapshotError(SnapshotError):
    """A file of a snapshot is absent, short, or not what was written."""

    failure_class = "snapshot_corrupt"


@dataclass(frozen=True)
class FileEntry:
    """A file of a snapshot: its bytes, the CRC-32 of each BLOCK of it, and its SHA-256 where that was asked for."""

    size: int
    crc32: tuple[int, ...]
    sha256: str | None = None

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FileEntry:
        """Return the entry that `dataclasses.asdict` turned into JSON."""
        return cls(size=content["size"], crc32=tuple(content["crc32"]), sha256=content.get("sha256"))


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies: file, safetensors dtype, shape, offset from the start of the file, bytes.

    The file is one of the snapshot's own, or a key of `Manifest.borrowed`; `Manifest.location` tells where it is.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TensorPlace:
        """Return the place that `dataclasses.asdict` turned into JSON."""
        return cls(**{**content, "shape": tuple(content["shape"])})


@dataclass(frozen=True)
class Manifest:
    """What a snapshot holds and where it comes from.

    Attributes:
        name: Folder name: step, generation and id.
        trigger: Why it was taken: steps, time, epoch, drain, end ...
        created: Unix time of the commit.
        parent: Name of the snapshot this generation was restored from, if any.
        metric: Value that `keep.best` ranks by, if an evaluation preceded.
        ranked_by: What *metric* is, such as "max accuracy by metrics:accuracy"; None: older snapshots do not say it.
        samples: Samples consumed.
        aliases: Tensors that share another's memory (tied weights): key to key.
        memory_formats: Tensors stored contiguous that live in another format.
        fingerprints: Identities of the data sets.
        seconds: From the first staged share to the commit.
        borrowed: Files of earlier snapshots that hold tensors unchanged since: "<snapshot>/<file>". Never a file that
            snapshot borrowed itself.
    """

    run_id: str
    name: str
    step: int
    generation: int
    world_size: int
    trigger: str
    created: float
    files: dict[str, FileEntry]
    tensors: dict[str, TensorPlace]
    parent: str | None = None
    metric: float | None = None
    ranked_by: str | None = None
    epoch: int = 0
    samples: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    memory_formats: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    borrowed: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of its own files but the manifest; what it borrows is not counted."""
        return sum(entry.size for entry in self.files.values())

    @property
    def measured_by(self) -> tuple[str | None, str | None]:
        """What *metric* is and the identity of the data it was measured on; None matches any, it was not recorded."""
        return self.ranked_by, self.fingerprints.get("evaluation")

    @property
    def lenders(self) -> frozenset[str]:
        """Names of the snapshots it borrows from: without them it cannot be loaded."""
        return frozenset(location.partition("/")[0] for location in self.borrowed)

    def location(self, file: str) -> str:
        """Return where *file* is, relative to the folder of all snapshots: "<snapshot>/<file>"."""
        return file if file in self.borrowed else f"{self.name}/{file}"

    def locations(self) -> dict[str, FileEntry]:
        """Return every file that is needed to load the snapshot, its own and the borrowed ones, by `location`."""
        return {self.location(file): entry for file, entry in (self.files | self.borrowed).items()}

    def to_bytes(self) -> bytes:
        """Return MANIFEST.json's content, with the digest over the rest."""
        content = asdict(self)
        if self.metric is not None and not math.isfinite(self.metric):
            content["metric"] = str(self.metric)  # JSON has no infinities
        return _canonical({**content, "digest": _digest(content)}) + b"\n"


def parse(data: bytes) -> Manifest:
    """Return the manifest in *data*.

    Raises:
        DamagedSnapshotError: not JSON, of a format unknown here, incomplete, or not what its digest says.
    """
    try:
        content = json.loads(data)
        digest = content.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedSnapshotError(f"{FILE_NAME} is cut or not a manifest") from None
    if content.get("format") != FORMAT:
        raise DamagedSnapshotError(
            f"{FILE_NAME} has format {content.get('format')}, this version reads {FORMAT}"
        )
    if digest != _digest(content):
        raise DamagedSnapshotError(f"{FILE_NAME} does not match its digest")
    try:
        files = {name: FileEntry.from_json(f) for name, f in content["files"].items()}
        borrowed = {name: FileEntry.from_json(f) for name, f in content.get("borrowed", {}).items()}
        tensors = {key: TensorPlace.from_json(place) for key, place in content["tensors"].items()}
        metric = None if content["metric"] is None else float(content["metric"])
        read = {"files": files, "borrowed": borrowed, "tensors": tensors, "metric": metric}
        return Manifest(**{**content, **read})
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedSnapshotError(f"{FILE_NAME} is incomplete: {error}") from None


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()
