from __future__ import annotations

import gzip
import struct
from typing import TYPE_CHECKING

import pytest

from examples.mnist import idx

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_dumped_is_parsed() -> None:
    """Shape and bytes survive writing and reading."""
    assert idx.parse(idx.dump((2, 1, 3), b"abcdef"), 3) == ((2, 1, 3), b"abcdef")


def test_dump_is_deterministic_and_bears_no_time() -> None:
    """The same data gives the same file: gzip's time field is nought."""
    first = idx.dump((3,), b"abc")
    assert first == idx.dump((3,), b"abc")
    assert first[4:8] == b"\0\0\0\0"


def test_plain_files_are_parsed_too() -> None:
    """A file that was unpacked by hand is read as it is."""
    assert idx.parse(gzip.decompress(idx.dump((3,), b"abc")), 1) == ((3,), b"abc")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with 0x instead of 0x00000801"),
        (b"\x89PNG....", "starts with 0x89504e47 instead of 0x00000801"),
        (idx.dump((1, 1, 1), b"a"), "starts with 0x00000803 instead of 0x00000801"),
        (
            bytes([0, 0, 0x0D, 1]) + struct.pack(">I", 1) + b"1234",
            "starts with 0x00000d01 instead of 0x00000801",
        ),
        (bytes([0, 0, 8, 1, 0]), "cut short inside its header: 5 bytes"),
        (
            bytes([0, 0, 8, 1]) + struct.pack(">I", 3) + b"ab",
            "its header promises 3 bytes of data, 2 are there",
        ),
        (
            bytes([0, 0, 8, 1]) + struct.pack(">I", 1) + b"ab",
            "its header promises 1 bytes of data, 2 are there",
        ),
        (idx.dump((3,), b"abc")[:-6], "damaged gzip file"),
    ],
)
def test_what_is_not_idx_is_refused(content: bytes, message: str) -> None:
    """A wrong magic number, a short header, missing or surplus data and damaged gzip are named."""
    with pytest.raises(ValueError, match=message):
        idx.parse(content, 1)


def test_missing_file_is_named_with_its_folder(tmp_path: Path) -> None:
    """The error says which two names were looked for, and where."""
    with pytest.raises(FileNotFoundError) as error:
        idx.read(str(tmp_path), "train-labels-idx1-ubyte", 1)
    assert (
        str(error.value) == f"neither train-labels-idx1-ubyte.gz nor train-labels-idx1-ubyte is in {tmp_path}"
    )


def test_wrong_file_is_named_with_its_path(tmp_path: Path) -> None:
    """The error of a file that is not IDX starts with its path."""
    (tmp_path / "labels.gz").write_bytes(b"<html>")
    with pytest.raises(ValueError, match=r"labels\.gz: not an IDX file") as error:
        idx.read(str(tmp_path), "labels", 1)
    assert str(error.value).startswith(str(tmp_path))


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("s3://bucket/mnist", True),
        ("memory://mnist", True),
        ("simplecache::s3://bucket", True),
        ("data/mnist", False),
        ("/data/mnist", False),
        ("odd:name", False),
    ],
)
def test_url_and_folder_are_told_apart(root: str, *, expected: bool) -> None:
    """Only what bears a scheme is handed to fsspec."""
    assert idx.is_url(root) is expected


def test_secrets_of_a_url_are_not_shown() -> None:
    """User and password before the host never reach a message."""
    assert idx.without_secrets("sftp://anna:secret@host/mnist/") == "sftp://host/mnist"
