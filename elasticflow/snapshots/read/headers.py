"""Headers of shard files, compared with the manifest.

A manifest may fit together and match its digest, and still call some bytes by another tensor's name, by other rows or by
another type. The header of a shard file was made with the file, so the two must tell the same.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.format.shard_file import LENGTH, header_entry
from elasticflow.system import records
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Collection

    from elasticflow.snapshots.format.manifest import Manifest
    from elasticflow.snapshots.format.pieces import TensorPlace

# safetensors reads no longer header either.
_LONGEST = 100_000_000


class Headers:
    """Keeps the headers of the files that a stream reads, and compares them with what the manifest says of the tensors.

    Args:
        folder: The folder of all snapshots.
    """

    def __init__(self, manifest: Manifest, folder: str) -> None:
        self._places: dict[str, dict[str, TensorPlace]] = defaultdict(dict)
        for key, place in manifest.tensors.items():
            self._places[f"{folder}/{manifest.location(place.file)}"][key] = place
        # A tensor's bytes follow the header, without a gap.
        begins = {path: min(p.offset for p in places.values()) for path, places in self._places.items()}
        self._headers = {path: bytearray(min(begin, _LONGEST + 1)) for path, begin in begins.items()}

    def take(self, path: str, offset: int, data: memoryview) -> None:
        """Keep what *data*, which begins at *offset* of a file, has of its header."""
        header = self._headers.get(path)
        if header is not None and offset < len(header):
            part = data[: len(header) - offset]
            header[offset : offset + len(part)] = part

    def contradiction(self, paths: Collection[str]) -> str | None:
        """Return the first difference between the manifest and the headers of the files at *paths*, which were read."""
        for path in sorted(self._places.keys() & set(paths)):
            if (text := self._contradiction(path)) is not None:
                return text
        return None

    def _contradiction(self, path: str) -> str | None:
        header, places = self._headers[path], self._places[path]
        file, begin = path.rpartition("/")[2], min(place.offset for place in places.values())
        if begin > _LONGEST or (end := LENGTH.size + LENGTH.unpack_from(header)[0]) != begin:
            told = "" if begin > _LONGEST else f", and its header ends at byte {end}"
            return f"the tensors of {file} begin at byte {begin}{told}"
        try:
            content = records.parse(bytes(header[LENGTH.size :]))
        except records.BadJsonError as error:
            return f"{file} holds tensors, and its header {error}"
        for key, place in places.items():
            if (found := content.get(key)) != (expected := header_entry(place, place.offset - begin)):
                told = f"its header tells {'nothing of them' if found is None else _text(found, begin)}"
                return f"{_named(key, place)} are {_text(expected, begin)} of {file}, and {told}"
        return None


def _text(entry: Any, begin: int) -> str:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(first), int(end)]}:
            return f"{printable(dtype)} of shape {printable(shape)} at bytes {begin + first} to {begin + end}"
        case _:
            return printable(entry)


def _named(key: str, place: TensorPlace) -> str:
    if place.piece is None:
        return f"the elements of {printable(key)}"
    rows = f"rows {place.piece.begin} to {place.piece.begin + place.shape[0]}"
    return f"{rows} of {printable(place.piece.of)}"
