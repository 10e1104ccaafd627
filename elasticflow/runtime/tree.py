"""State as JSON plus tensors, without pickle, and back (floor R).

Values of JSON stand for themselves. What JSON lacks is an object with one key: `$tensor` (a stored tensor),
`$scalar` (an element of a packed vector), `$float` (inf, nan), `$tuple`, `$dict` (keys that are not text), `$counter`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elasticflow.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}

_Identity = tuple[int, torch.dtype, torch.Size, tuple[int, ...], str]


class Encoder:
    """Collects tensors while it turns values into JSON.

    Attributes:
        tensors: Tensors by key, live: nothing is copied but packed scalars.
        aliases: Key of a tensor that shares another's memory, to that other's key.
        memory_formats: Keys of tensors that do not lie contiguously, and how they lie.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.memory_formats: dict[str, str] = {}
        self._known: dict[_Identity, str] = {}
        self._scalars: dict[str, list[Tensor]] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return *value* as JSON; *path* names it in keys and messages.

        Raises:
            StateError: something in it can be expressed neither as JSON nor as a tensor of safetensors.
        """
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, Counter):
            return {"$counter": [[self.encode(k, path), v] for k, v in value.items()]}
        if isinstance(value, dict):
            if all(isinstance(key, str) and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{path}/{key}") for key, item in value.items()}
            return {
                "$dict": [[self.encode(k, path), self.encode(v, f"{path}/{k}")] for k, v in value.items()]
            }
        if isinstance(value, tuple):
            return {"$tuple": [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]}
        if isinstance(value, list):
            return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
        raise StateError(
            f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a snapshot cannot hold",
            "state may hold numbers, text, lists, tuples, dicts and tensors",
        )

    def finish(self) -> None:
        """Pack the scalars, one vector per dtype and device: thousands of tiny tensors would be the stall."""
        for key, scalars in self._scalars.items():
            self.tensors[key] = torch.stack(scalars)

    def _tensor(self, value: Tensor, path: str) -> dict[str, Any]:
        tensor = value.detach()
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
            raise StateError(
                f"{path} is a tensor of {tensor.dtype}, {tensor.layout}, which a snapshot cannot hold"
            )
        if tensor.dim() == 0:
            scalars = self._scalars.setdefault(f"scalars/{DTYPES[tensor.dtype]}/{tensor.device.type}", [])
            scalars.append(tensor)
            return {"$scalar": [f"scalars/{DTYPES[tensor.dtype]}/{tensor.device.type}", len(scalars) - 1]}
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), str(tensor.device))
        known = self._known.setdefault(identity, path) if tensor.numel() else path
        if known != path:
            self.aliases[path] = known
            return {"$tensor": known}
        if not tensor.is_contiguous() and (layout := _layout(tensor)):
            self.memory_formats[path] = layout
        self.tensors[path] = tensor
        return {"$tensor": path}


class Decoder:
    """Turns JSON back into values.

    Args:
        tensors: Stored tensors by key.
        memory_formats: How tensors that are not contiguous are to lie.
        copies: Give tensors memory of their own, laid out as they were; False for values that are copied anyway.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], memory_formats: Mapping[str, str], *, copies: bool
    ) -> None:
        self._tensors, self._memory_formats, self._copies = tensors, memory_formats, copies

    def decode(self, value: Any) -> Any:
        """Return what was encoded as *value*.

        Raises:
            StateError: it was written by another version.
        """
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if len(value) != 1 or not (mark := next(iter(value))).startswith("$"):
            return {key: self.decode(item) for key, item in value.items()}
        content = value[mark]
        match mark:
            case "$tensor":
                return self._tensor(content)
            case "$scalar":
                key, index = content
                return self._tensors[key][index].clone()
            case "$float":
                return float(content)
            case "$tuple":
                return tuple(self.decode(item) for item in content)
            case "$counter":
                return Counter({self.decode(key): count for key, count in content})
            case "$dict":
                return {self.decode(key): self.decode(item) for key, item in content}
            case _:
                raise StateError(
                    f"the snapshot holds a value marked {mark}, which this version does not know"
                )

    def _tensor(self, key: str) -> Tensor:
        tensor = self._tensors[key]
        if not self._copies:
            return tensor
        layout = self._memory_formats.get(key)
        return tensor.clone() if layout is None else tensor.clone(memory_format=getattr(torch, layout))


def _layout(tensor: Tensor) -> str | None:
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return "channels_last_3d"
    return None
