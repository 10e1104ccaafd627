"""Shard files: tensors and pieces of tensors in safetensors layout, checksummed while they are written.

Layout: the length of the header (8 bytes, little-endian), the header as JSON, the tensors. safetensors 0.8 refuses gaps
between tensors. The header is padded to a multiple of 8 bytes, which safetensors does not demand.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow.snapshots.format.digests import Checksums
from elasticflow.snapshots.format.manifest import FileEntry, ManifestFacts
from elasticflow.snapshots.format.pieces import Piece, TensorPlace
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elasticflow.protocol.snapshot_settings import Integrity
    from elasticflow.storage.storage import Storage

LENGTH = struct.Struct("<Q")


class StoredTensor(Protocol):
    """Entry of a tensor in a safetensors header."""

    @property
    def dtype(self) -> str:
        """Its safetensors dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a staging buffer: key, safetensors dtype ("F32"), shape, offset and bytes in the buffer.

    A frozen tensor takes no gradient: it lies in a file that is not written again as long as it stays the same.

    Attributes:
        piece: The larger tensor of which it is some rows, if so; *key* is then the piece's.
        is_copy: A rank on another node stores it; it is held here so that this node has the whole state.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    frozen: bool = False
    piece: Piece | None = None
    is_copy: bool = False


@dataclass(frozen=True)
class SnapshotRecord:
    """Everything in a snapshot but its tensors; rank 0 hands it over with its shard."""

    state: dict[str, Any]
    manifest: ManifestFacts

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON, which has no infinities: the metric as text. Nothing in `state` is copied."""
        metric = None if self.manifest.metric is None else str(float(self.manifest.metric))
        return {"state": self.state, "manifest": {**vars(self.manifest), "metric": metric}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SnapshotRecord:
        """Return the record that `to_json` wrote."""
        facts = content["manifest"]
        metric = None if facts["metric"] is None else float(facts["metric"])
        return cls(content["state"], ManifestFacts(**{**facts, "metric": metric}))


@dataclass(frozen=True)
class StagedShard:
    """One rank's shard of a snapshot, as it lies in shared memory.

    Attributes:
        tensors: Place of each tensor; may be empty.
        record: Rank 0's; None on other ranks.
    """

    tensors: list[TensorEntry]
    nbytes: int
    record: SnapshotRecord | None = None


@dataclass(frozen=True)
class WrittenFile:
    """A file of a snapshot on the store, as the manifest has it.

    The name of a file that is borrowed from an earlier snapshot is a location, "<snapshot>/<file>".
    """

    name: str
    entry: FileEntry
    tensors: dict[str, TensorPlace]

    @property
    def is_borrowed(self) -> bool:
        """True if the file belongs to an earlier snapshot."""
        return "/" in self.name


def shard_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's shard file."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def frozen_name(rank: int, world_size: int) -> str:
    """Return the name of a rank's file of frozen tensors."""
    return f"frozen-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class Packed:
    """A file of a snapshot in memory: its name, its bytes in pieces, and where its tensors lie."""

    name: str
    parts: list[memoryview]
    tensors: dict[str, TensorPlace]

    def sha256(self) -> str:
        """Return the SHA-256 of the file."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(part)
        return digest.hexdigest()

    def borrowed(self, location: str, entry: FileEntry) -> WrittenFile:
        """Return the file as the manifest has it if *location* has the same bytes already."""
        tensors = {key: replace(place, file=location) for key, place in self.tensors.items()}
        return WrittenFile(location, entry, tensors)


def pack(name: str, *, tensors: Sequence[TensorEntry], staged: memoryview, about: dict[str, str]) -> Packed:
    """Return *tensors*, which lie in *staged*, as a file in safetensors layout; their bytes stay where they are."""
    ordered = sorted(tensors, key=lambda t: (t.offset, t.nbytes))
    front, offsets = header(about, {tensor.key: tensor for tensor in ordered})
    places = {t.key: TensorPlace(name, t.dtype, t.shape, offsets[t.key], t.nbytes, t.piece) for t in ordered}
    return Packed(name, [memoryview(front), *_runs(ordered, staged)], places)


def header(metadata: dict[str, str], tensors: Mapping[str, StoredTensor]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the tensors of a safetensors file, and where each tensor begins in the file.

    Args:
        metadata: Texts about the file.
        tensors: By key, in the order of their bytes.
    """
    content: dict[str, Any] = {"__metadata__": metadata}
    begins, end = {}, 0
    for key, tensor in tensors.items():
        begins[key], end = end, end + tensor.nbytes
        content[key] = header_entry(tensor, begins[key])
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = LENGTH.pack(len(text)) + text
    return front, {key: len(front) + begin for key, begin in begins.items()}


def header_entry(tensor: StoredTensor, begin: int) -> dict[str, Any]:
    """Return what a safetensors header says of a tensor whose bytes begin at *begin*, counted from the header's end."""
    return {
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "data_offsets": [begin, begin + tensor.nbytes],
    }


def write_shard(storage: Storage, folder: str, shard: Packed, integrity: Integrity = "crc32") -> WrittenFile:
    """Write *shard* to *folder* and return the file as the manifest has it.

    Raises:
        OSError: the store failed; nothing half written is at the name.
    """
    fault_injection.reach("shares.before_write")
    written = _write(storage, folder, shard, integrity)
    fault_injection.reach("shares.after_write")
    return written


def write_json(
    storage: Storage, folder: str, name: str, content: Any, integrity: Integrity = "crc32"
) -> WrittenFile:
    """Write *content* as JSON to *folder* and return the file as the manifest has it; raises as `write_shard`."""
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    fault_injection.reach("shares.before_state")
    written = _write(storage, folder, Packed(name, [memoryview(data)], {}), integrity)
    fault_injection.reach("shares.after_state")
    return written


def _write(storage: Storage, folder: str, packed: Packed, integrity: Integrity) -> WrittenFile:
    sums = Checksums(integrity)

    def parts() -> Iterator[memoryview]:
        nonlocal sums
        # A write that failed begins again with the first part.
        sums = Checksums(integrity)
        return _with_fault_points(sums.through(packed.parts))

    size = storage.write(f"{folder}/{packed.name}", parts)
    if size != sums.size:
        raise OSError(f"{packed.name}: {size} of {sums.size} bytes were written")
    return WrittenFile(packed.name, sums.entry(), packed.tensors)


def _with_fault_points(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        fault_injection.reach("shares.mid_write")
        yield piece


def _runs(ordered: Sequence[TensorEntry], staged: memoryview) -> Iterator[memoryview]:
    """Yield the bytes of the tensors; those without a gap between them as one piece."""
    start = end = 0
    for tensor in ordered:
        if tensor.offset != end:
            yield staged[start:end]
            start = tensor.offset
        end = tensor.offset + tensor.nbytes
    yield staged[start:end]
