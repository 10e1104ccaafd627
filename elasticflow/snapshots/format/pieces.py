"""Places of tensors, whole or in pieces: each rank of a sharded model stores its own rows of a tensor.

Only the first dimension is ever cut. So the bytes of a tensor are those of its pieces, one after the other, and any
range of rows is a range of bytes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import SnapshotError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Dtype(NamedTuple):
    """A dtype: its name in torch, and the bytes of one element."""

    torch_name: str
    nbytes: int


# By name in safetensors: the dtypes that safetensors 0.8 and torch have in common.
DTYPES: dict[str, Dtype] = {
    "F64": Dtype("float64", 8),
    "F32": Dtype("float32", 4),
    "F16": Dtype("float16", 2),
    "BF16": Dtype("bfloat16", 2),
    "F8_E4M3": Dtype("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": Dtype("float8_e4m3fnuz", 1),
    "F8_E5M2": Dtype("float8_e5m2", 1),
    "F8_E5M2FNUZ": Dtype("float8_e5m2fnuz", 1),
    "C64": Dtype("complex64", 8),
    "I64": Dtype("int64", 8),
    "I32": Dtype("int32", 4),
    "I16": Dtype("int16", 2),
    "I8": Dtype("int8", 1),
    "U64": Dtype("uint64", 8),
    "U32": Dtype("uint32", 4),
    "U16": Dtype("uint16", 2),
    "U8": Dtype("uint8", 1),
    "BOOL": Dtype("bool", 1),
}


class Part(NamedTuple):
    """The rows of each sharded tensor that a rank holds: those of one shard, as `torch.chunk` cuts them.

    Attributes:
        shard: Number of the shard, from 0.
    """

    shard: int
    degree: int

    def rows(self, count: int) -> tuple[int, int]:
        """Return the first row of *count*, and the row after the last; the last shards may have fewer rows, or none."""
        size = -(-count // self.degree)
        return min(count, self.shard * size), min(count, (self.shard + 1) * size)


@dataclass(frozen=True)
class Piece:
    """The place of a stored tensor that is some rows of a larger one. Fields are named as in torch's `CheckpointableTensor`.

    Attributes:
        global_offsets: Place of the first element in the whole tensor: zeros but for the first dimension.
    """

    of: str
    global_shape: tuple[int, ...]
    global_offsets: tuple[int, ...]

    @classmethod
    def of_rows(cls, key: str, shape: tuple[int, ...], begin: int) -> Piece:
        """Return the piece of tensor *key* whose first row is *begin*."""
        return cls(key, shape, (begin, *(0,) * (len(shape) - 1)))

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Piece:
        """Return the piece whose fields are *content*."""
        return cls(content["of"], tuple(content["global_shape"]), tuple(content["global_offsets"]))

    @property
    def begin(self) -> int:
        """Its first row in the whole tensor."""
        return self.global_offsets[0]

    @property
    def key(self) -> str:
        """Key of the piece itself: `model/weight@128`."""
        return f"{self.of}@{self.begin}"


@dataclass(frozen=True)
class TensorPlace:
    """Place of a tensor: file, safetensors dtype, shape, offset from the start of the file, bytes.

    The file is one of the snapshot's own, or a key of `Manifest.borrowed`; see `Manifest.location`.

    Attributes:
        piece: Place in a larger tensor; None: the tensor is whole.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    piece: Piece | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, with those of a piece among them."""
        content = asdict(self)
        piece = content.pop("piece")
        return content if piece is None else {**content, **piece}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> TensorPlace:
        """Return the place that `to_json` wrote."""
        piece = Piece.from_json(content) if "of" in content else None
        own = (
            content["file"],
            content["dtype"],
            tuple(content["shape"]),
            content["offset"],
            content["nbytes"],
        )
        return cls(*own, piece)


class Span(NamedTuple):
    """Consecutive bytes of a file: the file's name in the manifest, the first byte, and the number of bytes."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of a snapshot, wherever its bytes lie.

    Attributes:
        dtype: Name of the dtype in safetensors.
        pieces: Places of its pieces, in the order of their rows; the one place of a tensor that is not cut.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[TensorPlace, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return sum(place.nbytes for place in self.pieces)

    def fill(self, target: memoryview, begin: int, read: Callable[[Span, memoryview], None]) -> None:
        """Fill *target* with bytes of the whole tensor from *begin* on; *read* fills a part of it with those of a span.

        Raises:
            SnapshotError: the tensor ends before *target* is full.
        """
        done = 0
        for span in self.spans(begin, begin + len(target)):
            read(span, target[done : done + span.nbytes])
            done += span.nbytes
        if done != len(target):
            raise SnapshotError(
                f"a tensor of {self.nbytes} bytes has no {len(target)} bytes from byte {begin} on"
            )

    def spans(self, begin: int, end: int) -> Iterator[Span]:
        """Yield where bytes `[begin, end)` of the whole tensor lie, in their order."""
        first = 0
        for place in self.pieces:
            low, high = max(begin, first), min(end, first + place.nbytes)
            if low < high:
                yield Span(place.file, place.offset + low - first, high - low)
            first += place.nbytes


class PiecesError(SnapshotError):
    """Pieces of tensors that do not fit together."""


def whole_tensors(places: Mapping[str, TensorPlace]) -> dict[str, WholeTensor]:
    """Return all tensors by the keys that state.json uses, from the *places* of tensors and pieces by their own keys.

    Raises:
        PiecesError: pieces of a tensor overlap, leave a gap, or differ in dtype or shape; the text names tensor and rows.
    """
    whole: dict[str, WholeTensor] = {}
    cut: dict[str, list[TensorPlace]] = {}
    for key, place in places.items():
        if place.piece is None:
            whole[key] = WholeTensor(place.dtype, place.shape, (place,))
        else:
            if place.piece.key != key:
                raise PiecesError(
                    f"{key} is called a piece of {place.piece.of} from row {place.piece.begin} on"
                )
            cut.setdefault(place.piece.of, []).append(place)
    for key, pieces in cut.items():
        if key in whole:
            raise PiecesError(f"{key} is there as a whole and in pieces")
        whole[key] = _joined(key, pieces)
    return whole


def _joined(key: str, places: list[TensorPlace]) -> WholeTensor:
    pieces = sorted(((place.piece, place) for place in places if place.piece), key=lambda pair: pair[0].begin)
    first, dtype = pieces[0][0], pieces[0][1].dtype
    shape, end = first.global_shape, 0
    for piece, place in pieces:
        if piece.global_shape != shape or place.dtype != dtype or not shape:
            raise PiecesError(f"the pieces of {key} are of several shapes or dtypes")
        expected = Piece.of_rows(key, shape, piece.begin)
        if piece != expected or place.shape[1:] != shape[1:] or len(place.shape) != len(shape):
            raise PiecesError(f"piece {piece.key} is cut along another dimension than the first")
        if piece.begin > end:
            raise PiecesError(f"rows {end} to {piece.begin} of {key} are missing")
        if piece.begin < end:
            raise PiecesError(f"rows {piece.begin} to {end} of {key} are there twice")
        end += place.shape[0]
    if end != shape[0] or math.prod(shape) == 0:
        raise PiecesError(f"rows {end} to {shape[0]} of {key} are missing")
    return WholeTensor(dtype, shape, tuple(place for _, place in pieces))
