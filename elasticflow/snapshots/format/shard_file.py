"""Shards: whole tensors in safetensors layout, checksummed while they are written.

Layout: 8 bytes little-endian header length, JSON header, tensors without gaps. Source: safetensors 0.8, which
refuses gaps and headers that do not end on a multiple of 8 bytes are legal but never made.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from elasticflow import fault_injection
from elasticflow.snapshots.format.digests import Checksums
from elasticflow.snapshots.format.manifest import FileEntry, TensorPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from elasticflow.snapshots.format.digests import Integrity
    from elasticflow.storage.storage import Storage

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a staging buffer: key, safetensors dtype ("F32"), shape, offset and bytes in the buffer.

    A frozen one takes no gradient: if its file is the same as before, it is not written again.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    frozen: bool = False


@dataclass(frozen=True)
class WrittenFile:
    """A file of a snapshot that is on the store: what the manifest says about it.

    Its name is a location, "<snapshot>/<file>", if it is borrowed from an earlier snapshot.
    """

    name: str
    entry: FileEntry
    tensors: dict[str, TensorPlace]

    @property
    def is_borrowed(self) -> bool:
        """Whether the snapshot refers to the file and did not write it."""
        return "/" in self.name

    def to_json(self) -> dict[str, Any]:
        """Return the record another node's writer reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> WrittenFile:
        """Return the file a record tells of."""
        tensors = {key: TensorPlace.from_json(place) for key, place in content["tensors"].items()}
        return cls(content["name"], FileEntry.from_json(content["entry"]), tensors)


def shard_name(rank: int, world_size: int) -> str:
    """Return the file name of a rank's share."""
    return f"shard-{rank:05d}-of-{world_size:05d}.safetensors"


def frozen_name(rank: int, world_size: int) -> str:
    """Return the file name of what a rank stores of the frozen tensors."""
    return f"frozen-{rank:05d}-of-{world_size:05d}.safetensors"


@dataclass(frozen=True)
class Packed:
    """A file of a snapshot in memory: name, its bytes in pieces, and where in it tensors lie."""

    name: str
    parts: list[memoryview]
    tensors: dict[str, TensorPlace]

    def sha256(self) -> str:
        """Return the SHA-256 of the file, which is not written."""
        digest = hashlib.sha256()
        for part in self.parts:
            digest.update(part)
        return digest.hexdigest()

    def borrowed(self, location: str, entry: FileEntry) -> WrittenFile:
        """Return what the manifest says when the same bytes are at *location* already."""
        tensors = {key: replace(place, file=location) for key, place in self.tensors.items()}
        return WrittenFile(location, entry, tensors)


def pack(name: str, *, tensors: Sequence[TensorEntry], staged: memoryview, about: dict[str, str]) -> Packed:
    """Return a share as a file in safetensors layout; the tensors' bytes stay where they are.

    Args:
        name: File name.
        tensors: What lies where in *staged*.
        staged: The staging buffer.
        about: The header's metadata.
    """
    ordered = sorted((t for t in tensors), key=lambda t: (t.offset, t.nbytes))
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for tensor in ordered:
        header[tensor.key] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    front = _LENGTH.pack(len(text)) + text
    places = {
        t.key: TensorPlace(name, t.dtype, t.shape, len(front) + header[t.key]["data_offsets"][0], t.nbytes)
        for t in ordered
    }
    return Packed(name, [memoryview(front), *_runs(ordered, staged)], places)


def write_shard(storage: Storage, folder: str, shard: Packed, integrity: Integrity = "crc32") -> WrittenFile:
    """Write *shard* to *folder* and return what the manifest says about it.

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
    """Write *content* as JSON to *folder* and return what the manifest says about it."""
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    fault_injection.reach("shares.before_state")
    written = _write(storage, folder, Packed(name, [memoryview(data)], {}), integrity)
    fault_injection.reach("shares.after_state")
    return written


def _write(storage: Storage, folder: str, packed: Packed, integrity: Integrity) -> WrittenFile:
    sums = Checksums(integrity)

    def parts() -> Iterator[memoryview]:
        nonlocal sums
        sums = Checksums(integrity)  # a store in trouble may be given all of it again
        return _on_cue(sums.through(packed.parts))

    size = storage.write(f"{folder}/{packed.name}", parts)
    if size != sums.size:
        raise OSError(f"{packed.name}: {size} of {sums.size} bytes were written")
    return WrittenFile(packed.name, sums.entry(), packed.tensors)


def _on_cue(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        fault_injection.reach("shares.mid_write")
        yield piece


def _runs(ordered: Sequence[TensorEntry], staged: memoryview) -> Iterator[memoryview]:
    """Yield the tensors' bytes; neighbours without a gap between them as one piece."""
    start = end = 0
    for tensor in ordered:
        if tensor.offset != end:
            yield staged[start:end]
            start = tensor.offset
        end = tensor.offset + tensor.nbytes
    yield staged[start:end]
