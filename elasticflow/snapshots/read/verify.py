"""Reads files of a snapshot back, or only verifies them: every byte, and the manifest against the files' own headers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.format import state_json
from elasticflow.snapshots.format.manifest import (
    FILE_NAME,
    STATE_FILE,
    DamagedSnapshotError,
    FileEntry,
    Manifest,
    RemovedSnapshotError,
)
from elasticflow.snapshots.format.shard_file import LENGTH, header_entry
from elasticflow.snapshots.read.stream import ABSENT, VerifiedStream
from elasticflow.system import records
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from elasticflow.snapshots.format.pieces import TensorPlace
    from elasticflow.snapshots.read.needed import Partly
    from elasticflow.snapshots.read.stream import Sink
    from elasticflow.snapshots.store.catalog import Catalog
    from elasticflow.storage.storage import Storage

_BORROWED = "; it is borrowed, and no snapshot that borrows it can be loaded"
# safetensors reads no longer header either.
_LONGEST = 100_000_000


class SnapshotStream:
    """Reads and verifies files of a snapshot, and passes their bytes to a sink; for one use.

    Args:
        paths: The files, as `needed_files` names them; None: all that are needed to load the snapshot.
        partly: Blocks to read of files that are not read whole; see `needed_blocks`.
        sink: As for `VerifiedStream`, like *progress* and *to_the_end*.
    """

    def __init__(
        self,
        catalog: Catalog,
        manifest: Manifest,
        paths: Collection[str] | None = None,
        *,
        sink: Sink | None = None,
        partly: Partly | None = None,
        progress: Callable[[int], None] | None = None,
        to_the_end: bool = False,
    ) -> None:
        self._catalog, self.manifest, self._sink = catalog, manifest, sink
        needed = needed_files(catalog, manifest)
        self._files = {path: entry for path, entry in needed.items() if paths is None or path in paths}
        self._headers = Headers(manifest, catalog.folder())
        self._stream = VerifiedStream(
            catalog.storage, self._files, sink=self._take, progress=progress, to_the_end=to_the_end
        )
        self.narrow(partly or {})
        self._to_the_end = to_the_end

    def narrow(self, partly: Partly) -> None:
        """Read no more of the files that *partly* names than it says; from any thread."""
        self._stream.partly = {f"{self._catalog.folder()}/{name}": blocks for name, blocks in partly.items()}

    def read(self) -> list[str]:
        """Return a line for each damaged file, the manifest among them if it contradicts a file's header; empty: all is whole.

        Raises:
            UnreadableSnapshotError: this process may not read a file on a disk of this machine.
            RemovedSnapshotError: files are absent because the snapshot is not there any more.
            SnapshotError: the store could not be read, the sink failed, or `stop` was called.
        """
        damage = self._stream.read()
        if ABSENT in damage.values() and not self._catalog.is_committed(self.manifest.name):
            raise RemovedSnapshotError(self.manifest.name)
        lines = _described(self._catalog, self.manifest, damage)
        # The header of a file that is damaged itself, or was not read to its end, is not known.
        known = self._files.keys() - damage.keys() if self._to_the_end or not damage else set()
        known -= {path for path, blocks in self._stream.partly.items() if not blocks}
        if (text := self._headers.contradiction(known)) is not None:
            lines.append(f"{FILE_NAME}: {text}")
        return lines

    def stop(self) -> None:
        """Have `read` end soon; from any thread."""
        self._stream.stop()

    def _take(self, path: str, offset: int, data: memoryview) -> None:
        self._headers.take(path, offset, data)
        if self._sink is not None:
            self._sink(path, offset, data)


def needed_files(catalog: Catalog, manifest: Manifest) -> dict[str, FileEntry]:
    """Return every file that is needed to load the snapshot, by its path in the storage."""
    return {f"{catalog.folder()}/{location}": entry for location, entry in manifest.locations().items()}


def _described(catalog: Catalog, manifest: Manifest, damage: Mapping[str, str]) -> list[str]:
    """Return a line for each damaged path; that of a borrowed file names its snapshot, and says what that means."""
    own, all_ = f"{catalog.folder(manifest.name)}/", f"{catalog.folder()}/"
    return [
        f"{path.removeprefix(own).removeprefix(all_)}: {text}{'' if path.startswith(own) else _BORROWED}"
        for path, text in damage.items()
    ]


class Headers:
    """Keeps the headers of the files that a stream reads, and compares them with what the manifest says of the tensors."""

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


def read_shard(storage: Storage, path: str, entry: FileEntry) -> bytearray:
    """Return the verified content of a file.

    Raises:
        DamagedSnapshotError: the file is absent, of another size, unreadable, or a block of it is not what was
            written; the text says which.
        SnapshotError: the store could not be reached, which says nothing about the snapshot.
    """
    content = bytearray(entry.size)
    target = memoryview(content)

    def keep(_: str, offset: int, data: memoryview) -> None:
        target[offset : offset + len(data)] = data

    for damage in VerifiedStream(storage, {path: entry}, sink=keep).read().values():
        raise DamagedSnapshotError(f"{path.rpartition('/')[2]}: {damage}")
    return content


def read_state(catalog: Catalog, manifest: Manifest) -> dict[str, Any]:
    """Return the verified content of state.json.

    Raises:
        DamagedSnapshotError: as `read_shard`, and as `state_json.parse`.
        SnapshotError: as `read_shard`.
    """
    entry = manifest.files.get(STATE_FILE)
    if entry is None:
        raise DamagedSnapshotError(f"{STATE_FILE} is not in the manifest")
    content = read_shard(catalog.storage, f"{catalog.folder(manifest.name)}/{STATE_FILE}", entry)
    return state_json.parse(bytes(content), manifest.whole)


def verify(catalog: Catalog, manifest: Manifest, progress: Callable[[int], None] | None = None) -> list[str]:
    """Return a line for each file, the snapshot's own or borrowed, that is damaged; empty: the snapshot is whole.

    Nothing is kept in memory but a block per thread, and the headers.

    Args:
        progress: Called with the bytes read so far, from one thread at a time.

    Raises:
        SnapshotError: as `read_shard`.
    """
    return SnapshotStream(catalog, manifest, progress=progress, to_the_end=True).read()
