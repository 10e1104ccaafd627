"""MNIST's IDX files: read from a folder or any fsspec URL, and written, without torch or numpy.

An IDX file of bytes is: two zero bytes, 0x08 (unsigned byte), the number of dimensions, each dimension
as a big-endian 32-bit number, then the bytes. MNIST ships four of them, each compressed with gzip.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_GZIP = b"\x1f\x8b"
_UNSIGNED_BYTES = 0x08


def read(root: str, name: str, dimensions: int) -> tuple[tuple[int, ...], bytes]:
    """Return shape and bytes of the IDX file *name*, with or without `.gz`, under a folder or fsspec URL.

    Raises:
        FileNotFoundError: neither `NAME.gz` nor `NAME` is there.
        ValueError: the file is damaged or holds something else.
    """
    fetch = _fetch_from_url(root) if is_url(root) else _fetch_from_folder(root)
    for candidate in (f"{name}.gz", name):
        try:
            content = fetch(candidate)
        except FileNotFoundError:
            continue
        try:
            return parse(content, dimensions)
        except ValueError as error:
            raise ValueError(f"{without_secrets(root)}/{candidate}: {error}") from None
    raise FileNotFoundError(f"neither {name}.gz nor {name} is in {without_secrets(root)}")


def parse(content: bytes, dimensions: int) -> tuple[tuple[int, ...], bytes]:
    """Return shape and bytes of one IDX file of unsigned bytes, compressed with gzip or not.

    Raises:
        ValueError: not gzip after all, not IDX, another number of dimensions, or cut short.
    """
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError) as error:
            raise ValueError(f"damaged gzip file ({error})") from None
    expected = bytes([0, 0, _UNSIGNED_BYTES, dimensions])
    if content[:4] != expected:
        raise ValueError(
            f"not an IDX file of unsigned bytes in {dimensions} dimension(s): "
            f"starts with 0x{content[:4].hex()} instead of 0x{expected.hex()}"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"cut short inside its header: {len(content)} bytes")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"its header promises {math.prod(shape)} bytes of data, {len(content) - start} are there"
        )
    return shape, content[start:]


def dump(shape: tuple[int, ...], data: bytes) -> bytes:
    """Return a compressed IDX file of unsigned bytes; the same input gives the same bytes."""
    header = bytes([0, 0, _UNSIGNED_BYTES, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    return gzip.compress(header + data, mtime=0)


def is_url(root: str) -> bool:
    """Tell an fsspec URL (`s3://bucket/mnist`) from a folder."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)", root) is not None


def without_secrets(root: str) -> str:
    """Return *root* as it may stand in a log: no user or password before the host."""
    return re.sub(r"://[^/@]*@", "://", root).rstrip("/")


def _fetch_from_folder(root: str) -> Callable[[str], bytes]:
    folder = Path(root)
    return lambda name: (folder / name).read_bytes()


def _fetch_from_url(root: str) -> Callable[[str], bytes]:
    # Only here: data in a folder needs no fsspec, and an S3 client must be made after workers are forked.
    from fsspec.core import url_to_fs

    system, path = url_to_fs(root, skip_instance_cache=True, use_listings_cache=False)

    def fetch(name: str) -> bytes:
        content: bytes = system.cat_file(f"{path.rstrip('/')}/{name}")
        return content

    return fetch
