"""MANIFEST.json, the commit record of a snapshot: the snapshot exists when this file does."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from elasticflow.errors import SnapshotError
from elasticflow.run_folder import SNAPSHOT_NAME
from elasticflow.snapshots.format.pieces import DTYPES, PiecesError, TensorPlace, WholeTensor, whole_tensors
from elasticflow.system import records
from elasticflow.system.records import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Format 2 is format 1 with tensors in pieces, and is written only if there are any: older versions read all others.
FORMAT, WITH_PIECES = 1, 2
FILE_NAME = "MANIFEST.json"
STATE_FILE = "state.json"
# Bytes under one checksum: few enough to say where the damage is.
BLOCK = 8 << 20


class DamagedSnapshotError(SnapshotError):
    """A file of a snapshot is absent, short, or not what was written."""

    failure_class = "snapshot_corrupt"


class RemovedSnapshotError(DamagedSnapshotError):
    """Files are absent because the snapshot was removed, by retention perhaps, while it was read."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"snapshot {name} was removed while it was read",
            "elasticflow snapshots list shows those that are left",
        )


class OtherVersionError(SnapshotError):
    """A manifest has a format of another version of elasticflow, which this version does not know; it is not damaged."""

    def __init__(self, difference: str) -> None:
        super().__init__(
            f"{FILE_NAME} {difference}, which only another version of elasticflow reads",
            "continue with that version, or start a new run",
        )


class UnreadableSnapshotError(SnapshotError):
    """This process may not read a file of a snapshot: damage if another snapshot can be read, else an outage."""


_SOURCE = " (source "


@dataclass(frozen=True)
class FileEntry:
    """A file of a snapshot: its bytes, the CRC-32 of each BLOCK, and its SHA-256 if that was taken."""

    size: int
    crc32: tuple[int, ...]
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class ManifestFacts:
    """Rank 0's facts for the manifest of a snapshot that it hands over.

    Attributes:
        trigger: Reason for the snapshot: steps, time, epoch, best, drain, end ...
        parent: Name of the snapshot this generation was restored from, if any.
        metric: Value that `keep.best` ranks by, if an evaluation preceded.
        ranked_by: Identity of *metric*, as `measure_of` writes it; None in older snapshots.
        epoch: Finished epochs.
        aliases: Tensors that share another's memory (tied weights): key to key.
        memory_formats: Tensors stored contiguous that live in another format.
        versions: Versions of libraries, and of everything else that bits depend on.
    """

    trigger: str
    parent: str | None = None
    metric: float | None = None
    ranked_by: str | None = None
    epoch: int = 0
    samples: int = 0
    aliases: dict[str, str] = field(default_factory=dict)
    memory_formats: dict[str, str] = field(default_factory=dict)
    fingerprints: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Manifest(ManifestFacts):
    """Content and origin of a snapshot.

    Attributes:
        created: Unix time of the commit.
        tensors: Place of each tensor, by key, or of each piece of a tensor, by the piece's key; see `whole`.
        seconds: From the first staged shard to the commit.
        borrowed: Files of earlier snapshots that hold tensors unchanged since: "<snapshot>/<file>". Never a file that
            snapshot borrowed itself.
    """

    run_id: str
    name: str
    step: int
    generation: int
    world_size: int
    created: float
    files: dict[str, FileEntry]
    tensors: dict[str, TensorPlace]
    seconds: float = 0.0
    borrowed: dict[str, FileEntry] = field(default_factory=dict)
    format: int = FORMAT

    @cached_property
    def whole(self) -> dict[str, WholeTensor]:
        """The tensors by the keys that state.json uses, whether they lie in pieces or not.

        Raises:
            PiecesError: pieces do not fit together; never in a manifest that `parse` gave.
        """
        return whole_tensors(self.tensors)

    @property
    def size(self) -> int:
        """Bytes of its own files, without the manifest."""
        return sum(entry.size for entry in self.files.values())

    @property
    def measured_by(self) -> tuple[str | None, str | None, str | None]:
        """Identity of *metric*, its source, and the identity of its data; each None if not recorded."""
        name, _, source = (self.ranked_by or "").partition(_SOURCE)
        return name or None, source.rstrip(")") or None, self.fingerprints.get("evaluation")

    @property
    def borrowed_from(self) -> frozenset[str]:
        """Names of the snapshots that hold its borrowed files: without them it cannot be loaded."""
        return frozenset(location.partition("/")[0] for location in self.borrowed)

    def location(self, file: str) -> str:
        """Return the path of *file*, relative to the folder of all snapshots: "<snapshot>/<file>"."""
        return file if file in self.borrowed else f"{self.name}/{file}"

    def locations(self) -> dict[str, FileEntry]:
        """Return by `location` every file that is needed to load the snapshot: its own and the borrowed ones."""
        return {self.location(file): entry for file, entry in (self.files | self.borrowed).items()}

    def to_bytes(self) -> bytes:
        """Return the content of MANIFEST.json, with the digest over the rest."""
        content = asdict(self)
        content["tensors"] = {key: place.to_json() for key, place in self.tensors.items()}
        if self.metric is not None and not math.isfinite(self.metric):
            # JSON has no infinities.
            content["metric"] = str(self.metric)
        return _canonical({**content, "digest": _digest(content)}) + b"\n"


def measure_of(name: str, source: str | None) -> str:
    """Return the identity of a metric: "max accuracy by metrics:accuracy (source 0f3a...)", without the source if None."""
    return name if source is None else f"{name}{_SOURCE}{source})"


def format_of(tensors: Mapping[str, TensorPlace]) -> int:
    """Return the format of a manifest with these tensors."""
    return WITH_PIECES if any(place.piece for place in tensors.values()) else FORMAT


def parse(data: bytes) -> Manifest:
    """Return the manifest in *data*; its names, places and sizes fit together.

    Raises:
        OtherVersionError: its format is unknown, or it has fields that are.
        DamagedSnapshotError: *data* is not JSON, incomplete, or differs from its digest; or a
            value has the wrong type or is out of range, a name leads out of the folder, or tensors overlap, leave
            gaps or reach beyond their file; or the pieces of a tensor do not make it whole.
    """
    try:
        content = records.parse(data)
        if content.pop("digest", None) != _digest(content):
            raise DamagedSnapshotError(f"{FILE_NAME} does not match its digest")
        # From here on it is what was written.
        if content["format"] not in (FORMAT, WITH_PIECES) or isinstance(content["format"], bool):
            raise OtherVersionError(f"has format {printable(content['format'])}")
        if unknown := content.keys() - {each.name for each in fields(Manifest)}:
            raise OtherVersionError(f"has {printable(min(unknown))}")
        return _checked(content)
    except records.BadJsonError as error:
        raise DamagedSnapshotError(f"{FILE_NAME} {error}") from None
    except RecursionError:
        raise DamagedSnapshotError(f"{FILE_NAME} is nested too deeply") from None
    except _Wrong as error:
        raise DamagedSnapshotError(f"{FILE_NAME}: {error}") from None
    except PiecesError as error:
        raise DamagedSnapshotError(f"{FILE_NAME}: {printable(error.message)}") from None
    except (KeyError, TypeError, ValueError) as error:
        text = printable(f"{type(error).__name__}: {error}")
        raise DamagedSnapshotError(f"{FILE_NAME} is incomplete: {text}") from None


class _Wrong(Exception):  # noqa: N818  # becomes a DamagedSnapshotError at once
    """A value that no manifest can have."""


def _checked(content: dict[str, Any]) -> Manifest:
    for name, is_right in _FIELDS.items():
        if name in content and not is_right(content[name]):
            raise _Wrong(f"{name} is {printable(content[name])}")
    match = SNAPSHOT_NAME.fullmatch(content["name"])
    if match is None or (int(match["step"]), int(match["generation"])) != (
        content["step"],
        content["generation"],
    ):
        raise _Wrong(f"its name {printable(content['name'])} is not that of its step and generation")
    files = {name: _file(name, entry, _OWN_FILE) for name, entry in content["files"].items()}
    borrowed = {name: _file(name, e, _LENT_FILE) for name, e in content.get("borrowed", {}).items()}
    tensors = {key: _tensor(key, place) for key, place in content["tensors"].items()}
    _check_extents(tensors, files | borrowed)
    if content["format"] != format_of(tensors):
        raise _Wrong(f"its format is {content['format']}, and that of its tensors {format_of(tensors)}")
    metric = None if content["metric"] is None else float(content["metric"])
    read = {"files": files, "borrowed": borrowed, "tensors": tensors, "metric": metric}
    manifest = Manifest(**{**content, **read})
    whole = manifest.whole
    for key, other in manifest.aliases.items():
        if other not in whole:
            raise _Wrong(f"{printable(key)} is another name of {printable(other)}, which it does not hold")
    return manifest


def _file(name: str, content: Any, pattern: re.Pattern[str]) -> FileEntry:
    if not pattern.fullmatch(name) or name.endswith(FILE_NAME):
        raise _Wrong(f"{printable(name)} is no name of a file of a snapshot")
    if type(content) is not dict or not content.keys() <= {"size", "crc32", "sha256"}:
        raise _Wrong(f"what it says of {name} is no entry")
    size, sums, sha256 = content["size"], content["crc32"], content.get("sha256")
    if not _is_count(size) or type(sums) is not list or len(sums) != -(-size // BLOCK):
        raise _Wrong(f"{name} has {printable(size)} bytes and not as many checksums as those have blocks")
    if not all(type(crc32) is int and 0 <= crc32 < 1 << 32 for crc32 in sums):
        raise _Wrong(f"{name}: a CRC-32 is not an unsigned 32-bit number")
    if sha256 is not None and (type(sha256) is not str or not _SHA256.fullmatch(sha256)):
        raise _Wrong(f"{name}: the SHA-256 is not 64 hexadecimal digits")
    return FileEntry(size, tuple(sums), sha256)


def _tensor(key: str, content: Any) -> TensorPlace:
    if type(content) is not dict or content.keys() not in (_PLACE, _PLACE | _PIECE):
        raise _Wrong(f"what it says of tensor {printable(key)} is no place")
    shape, dtype, nbytes, offset = content["shape"], content["dtype"], content["nbytes"], content["offset"]
    if type(dtype) is not str or dtype not in DTYPES:
        raise _Wrong(f"tensor {printable(key)} is of {printable(dtype)}, which this version does not know")
    if not _is_shape(shape):
        raise _Wrong(f"tensor {printable(key)}: the shape is not a list of counts")
    # Without the zeros: torch multiplies the other dimensions, too.
    if math.prod(filter(None, shape)) > _LARGEST or not _is_count(nbytes) or not _is_count(offset):
        raise _Wrong(f"tensor {printable(key)}: the size or offset is not a possible count of bytes")
    if nbytes != math.prod(shape) * DTYPES[dtype].nbytes:
        raise _Wrong(f"tensor {printable(key)} has {nbytes} bytes, and its shape and type another number")
    if type(content["file"]) is not str:
        raise _Wrong(f"tensor {printable(key)}: the file is not named by a text")
    if "of" in content:
        of, whole, offsets = content["of"], content["global_shape"], content["global_offsets"]
        if type(of) is not str or not (
            _is_shape(whole) and _is_shape(offsets) and len(whole) == len(offsets) > 0
        ):
            raise _Wrong(f"tensor {printable(key)}: of which tensor it is a piece, and where, is not told")
    return TensorPlace.from_json(content)


def _check_extents(tensors: Mapping[str, TensorPlace], files: Mapping[str, FileEntry]) -> None:
    """Raise _Wrong unless the tensors of each file fill it, from its header to its end, without gap or overlap."""
    places: dict[str, list[tuple[int, int]]] = {}
    for key, place in tensors.items():
        if place.file not in files:
            raise _Wrong(f"tensor {printable(key)} lies in {printable(place.file)}, which it does not hold")
        places.setdefault(place.file, []).append((place.offset, place.nbytes))
    for file, extents in places.items():
        extents.sort()
        end = max(extents[0][0], _LEAST_HEADER)
        for offset, nbytes in extents:
            if offset != end:
                raise _Wrong(f"tensors in {file} overlap, or leave a gap, at byte {min(offset, end)}")
            end += nbytes
        if end != files[file].size:
            raise _Wrong(f"tensors in {file} end at byte {end}, and the file at byte {files[file].size}")


def _is_shape(value: object) -> bool:
    return type(value) is list and len(value) <= _MOST_DIMENSIONS and all(map(_is_count, value))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast("float", value) <= _LATEST


def _is_word(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= _LONGEST and value.isprintable()


def _is_texts(value: object) -> bool:
    return type(value) is dict and all(type(text) is str for text in value.values())


def _is_object(value: object) -> bool:
    return type(value) is dict


_PLACE = {"file", "dtype", "shape", "offset", "nbytes"}
_PIECE = {"of", "global_shape", "global_offsets"}
_LARGEST = (1 << 63) - 1
# The last second of the year 9999: later ones have no date.
_LATEST = 253_402_300_799.0
_LONGEST = 1000
# A safetensors file begins with 8 bytes: the length of its header.
_LEAST_HEADER = 8
# torch allows no more.
_MOST_DIMENSIONS = 64
_OWN_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_LENT_FILE = re.compile(rf"{SNAPSHOT_NAME.pattern}/{_OWN_FILE.pattern}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS: dict[str, Callable[[object], bool]] = {
    "run_id": _is_word,
    "name": _is_word,
    "trigger": _is_word,
    "step": _is_count,
    "generation": _is_count,
    "world_size": _is_count,
    "epoch": _is_count,
    "samples": _is_count,
    "created": _is_time,
    "seconds": _is_time,
    "metric": lambda value: value is None or type(value) in (int, float) or value in ("inf", "-inf", "nan"),
    "ranked_by": lambda value: value is None or type(value) is str,
    "parent": lambda value: value is None or (type(value) is str and bool(SNAPSHOT_NAME.fullmatch(value))),
    "files": _is_object,
    "tensors": _is_object,
    "borrowed": _is_object,
    "aliases": _is_texts,
    "memory_formats": _is_texts,
    "fingerprints": _is_object,
    "versions": _is_object,
}


def _canonical(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()
