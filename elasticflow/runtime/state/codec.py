"""State as JSON plus tensors, without pickle, and back; tensors of a snapshot are read when they are asked for.

Values of JSON stand for themselves; objects with a `StateMark` as their only key stand for values that JSON lacks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping
from enum import Enum
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import box_among, box_of, is_sharded, local_of
from elasticflow.runtime.process.sharded_tensors import like as like_dtensor
from elasticflow.runtime.state.tensors import (
    BY_NAME,
    DTYPES,
    copy_with_layout,
    identity_of,
    layout_of,
    refusal,
)
from elasticflow.snapshots.format import state_json
from elasticflow.snapshots.format.state_json import Ref, StateMark, UnknownMarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.process.sharded_tensors import Box
    from elasticflow.runtime.state.tensors import Identity
    from elasticflow.snapshots.format.pieces import WholeTensor
    from elasticflow.snapshots.read.load import LoadedSnapshot

# Subclasses of these would come back as plain ones.
_DICTS: dict[type, str] = {
    dict: StateMark.DICT,
    OrderedDict: StateMark.ORDERED,
    Counter: StateMark.COUNTER,
}
_REMEDY = "state may hold numbers, text, lists, tuples, dicts and tensors; NumPy's by .tolist(); bytes as torch.frombuffer(bytearray(data), dtype=torch.uint8)"


class Encoder:
    """Collects tensors while it turns values into JSON.

    Args:
        in_place: The tensors will be restored by copying into the live ones.

    Attributes:
        tensors: Live tensors by key: nothing is copied but packed scalars.
        aliases: Maps the key of a tensor that shares its memory with an earlier tensor to the earlier key.
        scalars: The tensors that each packed vector is made of, by its key in `tensors`.
        boxes: Rows of a sharded tensor that this rank holds, by key; `tensors` has the local part.
    """

    def __init__(self, *, in_place: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.boxes: dict[str, Box] = {}
        self.aliases: dict[str, str] = {}
        self.memory_formats: dict[str, str] = {}
        self.scalars: dict[str, list[Tensor]] = {}
        self._in_place = in_place
        self._known: dict[Identity, dict[str, Any]] = {}
        self._packed: dict[tuple[torch.dtype, str], str] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return *value* as JSON; *path* names it in keys and messages.

        Raises:
            StateError: something in it can be expressed neither as JSON nor as a tensor of safetensors, or it holds itself.
        """
        try:
            return self._encode(value, path)
        except RecursionError:
            raise StateError(f"{path} is nested too deeply, or holds itself") from None

    def finish(self) -> None:
        """Pack the scalars, one vector per dtype and device: thousands of tiny tensors would be the stall."""
        for key, scalars in self.scalars.items():
            self.tensors[key] = torch.stack(scalars)

    def _encode(self, value: Any, path: str) -> Any:
        if value is None or isinstance(value, Tensor):
            return None if value is None else self._tensor(value, path)
        cls = type(value)
        if cls is bool or cls is int or _is_text(value):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {StateMark.FLOAT: str(float(value))}
        if cls is dict and all(_is_text(key) and not key.startswith("$") for key in value):
            return {key: self._encode(item, f"{path}/{key}") for key, item in value.items()}
        if (mark := _DICTS.get(cls)) is not None:
            return {mark: [[_key(k, path), self._encode(v, f"{path}/{k}")] for k, v in value.items()]}
        if cls is tuple:
            return {StateMark.TUPLE: [self._encode(item, f"{path}/{i}") for i, item in enumerate(value)]}
        if cls is list:
            return [self._encode(item, f"{path}/{i}") for i, item in enumerate(value)]
        raise StateError(f"{path} is a {_named(cls)}, which a snapshot cannot hold", _REMEDY)

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        refused = refusal(value, in_place=self._in_place)
        if refused is not None:
            raise StateError(f"{path} is {refused[0]}, which a snapshot cannot hold", refused[1])
        box = box_of(value, path)
        # Once: a DTensor's takes twenty times as long as another tensor's.
        detached = value.detach()
        identity, tensor = identity_of(detached), local_of(detached)
        if (box or tensor.numel()) and (known := self._known.get(identity)):
            if StateMark.TENSOR in known:
                self.aliases[self._free(path)] = known[StateMark.TENSOR]
            return known
        if tensor.dim() == 0:
            reference = self._scalar(tensor, path)
        else:
            key = self._free(path)
            if layout := layout_of(tensor):
                self.memory_formats[key] = layout
            self.tensors[key] = tensor
            if box is not None and box.shards.degree > 1:
                self.boxes[key] = box
            reference = {StateMark.TENSOR: key}
        self._known[identity] = reference
        return reference

    def _scalar(self, tensor: Tensor, path: str) -> dict[str, Any]:
        packed_by = (tensor.dtype, tensor.device.type)
        key = self._packed.get(packed_by)
        if key is None:
            part = path.partition("/")[0]
            key = self._packed[packed_by] = self._free(
                f"{part}/scalars/{DTYPES[tensor.dtype]}/{tensor.device.type}"
            )
            self.scalars[key] = []
        self.scalars[key].append(tensor)
        return {StateMark.SCALAR: [key, len(self.scalars[key]) - 1]}

    def _free(self, path: str) -> str:
        """Return *path*, or a longer one if it is taken: the paths in {"a/b": x, "a": {"b": y}} are the same."""
        while path in self.tensors or path in self.scalars or path in self.aliases:
            path += "'"
        return path


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a stored state, wherever their pieces lie; a tensor looked up is whole."""

    def __init__(self, whole: Mapping[str, WholeTensor]) -> None:
        self._whole = whole

    @abstractmethod
    def read_into(self, key: str, target: memoryview, begin: int) -> None:
        """Fill *target* with bytes of a tensor from *begin* on."""

    def shape_of(self, key: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return self._whole[key].shape

    def is_in_pieces(self, key: str) -> bool:
        """True if the tensor was sharded when it was stored."""
        return self._whole[key].pieces[0].piece is not None

    def rows(self, key: str, begin: int, end: int) -> Tensor:
        """Return rows `[begin, end)` of a tensor, in memory of their own: no other rows are read."""
        whole = self._whole[key]
        row = whole.nbytes // whole.shape[0]
        return self._read(key, (end - begin, *whole.shape[1:]), begin * row)

    def __getitem__(self, key: str) -> Tensor:
        """Return the whole tensor."""
        return self._read(key, self._whole[key].shape, 0)

    def _read(self, key: str, shape: tuple[int, ...], begin: int) -> Tensor:
        # Torch's own memory: with large pages (MADV_HUGEPAGE) a load of 0.6 GB once took 4 s, not 0.6: they must be found.
        tensor = torch.empty(shape, dtype=BY_NAME[self._whole[key].dtype])
        if tensor.numel():
            self.read_into(key, tensor.view(-1).view(torch.uint8).numpy().data, begin)
        return tensor

    def __iter__(self) -> Iterator[str]:
        """Go through the keys."""
        return iter(self._whole)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._whole)


class LazyTensors(StoredTensors):
    """Tensors of a verified snapshot, each read anew when it is looked up: contiguous, in memory of its own, to be kept.

    Raises:
        SnapshotError: when a tensor is looked up, its file has changed since it was verified, or cannot be read.
    """

    def __init__(self, loaded: LoadedSnapshot) -> None:
        super().__init__(loaded.manifest.whole)
        self._loaded = loaded

    def read_into(self, key: str, target: memoryview, begin: int) -> None:
        """Read bytes of a tensor from the snapshot's files."""
        self._loaded.read_into(key, target, begin)


class Decoder:
    """Turns JSON back into values.

    Args:
        copies: Give tensors memory of their own, laid out as they were; False for values that are copied anyway.
            A tensor that stood in two places is one tensor again.
        sharded: A sharded tensor of the job, if it has any: a tensor that lies in pieces, and whose place no tensor of the job
            has yet, is shared out among the same ranks.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        memory_formats: Mapping[str, str],
        *,
        copies: bool,
        sharded: Tensor | None = None,
    ) -> None:
        self._tensors, self._memory_formats, self._copies = tensors, memory_formats, copies
        self._sharded = sharded
        self._made: dict[tuple[str, int | None, bool], Tensor] = {}
        self._packed: dict[str, Tensor] = {}

    def decode(self, value: Any, like: Any = None) -> Any:
        """Return the value that was encoded as *value*.

        Args:
            like: A tensor of the job, anything else counts as None; if it is sharded, tensors of its shape are shared out as it is,
                and only this rank's rows of them are read. If it is not, every rank has all of them.

        Raises:
            StateError: another version of elasticflow wrote it.
        """
        return self._decode(value, lambda ref: self._tensor(ref.key, ref.index, like))

    def decode_over(self, value: Any, live: Callable[[], Any]) -> Any:
        """Return the value that was encoded as *value*; its tensors are shared out as those at the same places of *live* are.

        Args:
            live: Reads the state of the job that the value will take the place of; called only if the job is sharded and the value
                has tensors.

        Raises:
            StateError: as by `decode`.
        """
        if self._sharded is None:
            return self.decode(value)
        found = self._decode(value, lambda ref: ref)
        if all(ref.index is not None for _, ref in state_json.refs(found)):
            return self.decode(value)
        return self._filled(found, live())

    def _decode(self, value: Any, tensor: Callable[[Ref], Any]) -> Any:
        try:
            return state_json.decode(value, tensor)
        except UnknownMarkError as error:
            raise StateError(error.message) from None

    def _filled(self, value: Any, live: Any) -> Any:
        match value:
            case Ref():
                return self._tensor(value.key, value.index, live)
            case dict():
                inside = live if isinstance(live, dict) else {}
                return type(value)({key: self._filled(item, inside.get(key)) for key, item in value.items()})
            case list() | tuple():
                rest = live if isinstance(live, list | tuple) else ()
                pairs = zip_longest(value, rest[: len(value)])
                return type(value)(self._filled(item, other) for item, other in pairs)
            case _:
                return value

    def _sharded_like(self, key: str, index: int | None, like: Tensor | None) -> Tensor | None:
        """Return the tensor among whose ranks a stored one is shared out; None: every rank has all of it."""
        if index is not None or (like is not None and not is_sharded(like)):
            return None
        if like is not None and self._shape_of(key) == tuple(like.shape):
            return like
        is_in_pieces = isinstance(self._tensors, StoredTensors) and self._tensors.is_in_pieces(key)
        return self._sharded if is_in_pieces else None

    def _tensor(self, key: str, index: int | None, like: Any) -> Tensor:
        sharded = self._sharded_like(key, index, like if isinstance(like, Tensor) else None)
        made = self._made.get((key, index, sharded is not None))
        if made is None:
            if sharded is not None:
                made = self._part(key, sharded)
            else:
                made = self._whole(key) if index is None else self._element(key, index)
            self._made[key, index, sharded is not None] = made
        return made

    def _shape_of(self, key: str) -> tuple[int, ...]:
        if isinstance(self._tensors, StoredTensors):
            return self._tensors.shape_of(key)
        return tuple(self._tensors[key].shape)

    def _part(self, key: str, sharded: Tensor) -> Tensor:
        shape = self._shape_of(key)
        box = box_among(sharded, key, shape)
        if isinstance(self._tensors, StoredTensors):
            rows = self._tensors.rows(key, box.begin, box.end)
        else:
            rows = self._tensors[key][box.begin : box.end].clone()
        return like_dtensor(rows.to(local_of(sharded).device), sharded, shape)

    def _whole(self, key: str) -> Tensor:
        stored, layout = self._tensors[key], self._memory_formats.get(key)
        is_done = layout is None and isinstance(self._tensors, LazyTensors)
        return copy_with_layout(stored, layout) if self._copies and not is_done else stored

    def _element(self, key: str, index: int) -> Tensor:
        if key not in self._packed:
            self._packed[key] = self._tensors[key]
        element = self._packed[key][index]
        return element.clone() if self._copies else element


def _key(key: Any, path: str) -> Any:
    """Return a dict's key as JSON."""
    if key is None or type(key) in (bool, int) or _is_text(key):
        return key
    if isinstance(key, float):
        return float(key) if math.isfinite(key) else {StateMark.FLOAT: str(float(key))}
    if type(key) is tuple:
        return {StateMark.TUPLE: [_key(item, path) for item in key]}
    raise StateError(f"{path} has a key that is a {_named(type(key))}, which a snapshot cannot hold", _REMEDY)


def _is_text(value: Any) -> bool:
    # A member of an enumeration would come back as another object: `phase is Phase.WARMUP` would be false.
    return isinstance(value, str) and not isinstance(value, Enum)


def _named(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
