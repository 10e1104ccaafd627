"""Images as PNG files: of tensors, arrays, Pillow's images and Matplotlib's figures."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from torch import Tensor

_FORMS = (
    "an image is a tensor of [C, H, W] or [H, W], an array of [H, W, C] or [H, W] (whole numbers to 255, or others from 0 to 1; "
    "C is 1, 3 or 4), an image of Pillow, or a figure of Matplotlib"
)
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png_of(image: Any) -> bytes:
    """Return *image* as a PNG file.

    Raises:
        TypeError: the value is no image.
        ValueError: it has another shape, or nothing in it.
    """
    if callable(getattr(image, "savefig", None)):
        return _saved(image.savefig)
    if callable(getattr(image, "save", None)) and not isinstance(image, Tensor | np.ndarray):
        return _saved(image.save)
    if isinstance(image, Tensor):
        pixels = (
            image.detach().float().cpu().numpy()
            if image.is_floating_point()
            else image.detach().cpu().numpy()
        )
        if pixels.ndim == 3:
            pixels = pixels.transpose(1, 2, 0)
    elif isinstance(image, np.ndarray):
        pixels = image
    else:
        raise TypeError(f"log_image was given a {type(image).__name__}: {_FORMS}")
    return _encoded(_bytes_of(pixels[..., None] if pixels.ndim == 2 else pixels))


def _saved(save: Any) -> bytes:
    buffer = io.BytesIO()
    save(buffer, format="png")
    return buffer.getvalue()


def _bytes_of(pixels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if pixels.ndim != 3 or pixels.shape[2] not in _COLOUR_TYPES or pixels.size == 0:
        raise ValueError(f"log_image was given the shape {pixels.shape} (height, width, colours): {_FORMS}")
    if pixels.dtype == np.uint8:
        return pixels
    if np.issubdtype(pixels.dtype, np.floating):
        pixels = np.rint(np.nan_to_num(pixels, nan=0.0, posinf=1.0, neginf=0.0) * 255)
    whole: np.ndarray[Any, Any] = np.clip(pixels, 0, 255).astype(np.uint8)
    return whole


def _encoded(pixels: np.ndarray[Any, Any]) -> bytes:
    height, width, colours = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[colours], 0, 0, 0)
    rows = np.zeros((height, 1 + width * colours), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b"")]
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
