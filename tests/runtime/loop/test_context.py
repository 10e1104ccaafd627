"""What hooks may give as an image, read back from the PNG file that was made of it."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch

from elasticflow.runtime.loop.context import png_of


def decoded(png: bytes) -> np.ndarray[Any, Any]:
    """Return the pixels of a PNG file without filters; its checksums hold."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack(">I", png[at + 8 + size : at + 12 + size]) == (zlib.crc32(kind + data),)
        chunks[kind], at = data, at + 12 + size
    width, height, depth, colour_type, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    colours = {0: 1, 2: 3, 6: 4}[colour_type]
    assert depth == 8
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + width * colours)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, colours)


@pytest.mark.parametrize("colours", [1, 3, 4])
def test_pixels_come_back(colours: int) -> None:
    """Tensors have their colours first, arrays last; fractions are of 255."""
    whole = torch.arange(5 * 7 * colours, dtype=torch.uint8).reshape(colours, 5, 7)
    expected = whole.permute(1, 2, 0).numpy()
    for image in (whole, whole / 255, whole.int(), expected, expected / 255, (whole / 255).to(torch.float64)):
        assert (decoded(png_of(image)) == expected).all()


def test_two_dimensions_are_grey() -> None:
    """As a matrix of weights is."""
    assert decoded(png_of(torch.tensor([[0.0, 0.5], [1.0, 2.0]]))).tolist() == [[[0], [128]], [[255], [255]]]
    assert decoded(png_of(np.array([[np.nan, -1.0]]))).tolist() == [[[0], [0]]]


def test_what_saves_itself_is_asked_to() -> None:
    """Images of Pillow have `save`, figures of Matplotlib `savefig`."""

    class Saves:
        def save(self, file: Any, format: str) -> None:  # noqa: A002  # Pillow's name
            file.write(format.encode())

    class Figure:
        savefig = Saves.save

    assert png_of(Saves()) == png_of(Figure()) == b"png"
