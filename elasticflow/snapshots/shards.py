"""Shards: whole tensors in safetensors layout, checksummed while they are written (floor 1).

Layout: 8 bytes little-endian header length, JSON header, tensors without gaps. Source: safetensors 0.8, which
refuses gaps and headers that do not end on a multiple of 8 bytes are legal but never made.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from elasticflow import faults
from elasticflow.snapshots.digests import Checksums
from elasticflow.snapshots.manifest import FileEntry, TensorPlace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from elasticflow.snapshots.staging import TensorEntry
    from elasticflow.storage import Storage

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class WrittenFile:
    """A file of a snapshot that is on the store: what the manifest says about it."""

    name: str
    entry: FileEntry
    tensors: dict[str, TensorPlace]

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


def write_shard(
    storage: Storage,
    folder: str,
    name: str,
    *,
    tensors: Sequence[TensorEntry],
    staged: memoryview,
    about: dict[str, str],
) -> WrittenFile:
    """Write a share to *folder* and return what the manifest says about it.

    Args:
        storage: Where.
        folder: The snapshot's folder in it.
        name: File name.
        tensors: What lies where in *staged*.
        staged: The staging buffer.
        about: The header's metadata.

    Raises:
        OSError: the store failed; nothing half written is at the name.
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
    faults.reach("shares.before_write")
    written = _write(storage, folder, name, [memoryview(front), *_runs(ordered, staged)], places)
    faults.reach("shares.after_write")
    return written


def write_json(storage: Storage, folder: str, name: str, content: Any) -> WrittenFile:
    """Write *content* as JSON to *folder* and return what the manifest says about it."""
    data = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    faults.reach("shares.before_state")
    written = _write(storage, folder, name, [memoryview(data)], {})
    faults.reach("shares.after_state")
    return written


def _write(
    storage: Storage, folder: str, name: str, parts: Iterable[memoryview], places: dict[str, TensorPlace]
) -> WrittenFile:
    sums = Checksums()
    size = storage.write(f"{folder}/{name}", _on_cue(sums.through(parts)))
    if size != sums.size:
        raise OSError(f"{name}: {size} of {sums.size} bytes were written")
    return WrittenFile(name, sums.entry(), places)


def _on_cue(pieces: Iterable[memoryview]) -> Iterator[memoryview]:
    for piece in pieces:
        faults.reach("shares.mid_write")
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
