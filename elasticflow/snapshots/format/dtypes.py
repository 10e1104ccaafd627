"""The dtypes that a snapshot can hold: their names in safetensors and in torch, and their bytes."""

from __future__ import annotations

from typing import NamedTuple


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
