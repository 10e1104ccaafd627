from __future__ import annotations

import math
import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.sinks.sink import Point
from elasticflow.sinks.tensorboard import TensorBoard, size_of_png
from tests.sinks.runs import Written

if TYPE_CHECKING:
    from pathlib import Path

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
)


def read_back(folder: Path) -> Any:
    """Return what TensorBoard's own reader finds in the run's folder."""
    read = accumulator.EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    read.Reload()
    return read


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    """Return step and value of a curve."""
    return [(each.step, each.value) for each in read_back(folder).Scalars(tag)]


def png(width: int, height: int) -> bytes:
    """Return a black picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (height * (width + 1)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_points_texts_and_images_are_read_back(tmp_path: Path) -> None:
    """Step, time and value of a number; a text; an image with its size; the job as a table."""
    written, picture = Written.under(tmp_path), tmp_path / "cat.png"
    picture.write_bytes(png(5, 3))
    sink = TensorBoard({})
    sink.open(written.facts, {})
    sink.points(
        [
            Point(1, 1_700_000_000.5, values={"loss": 0.5}),
            Point(2, 1_700_000_001.5, values={"loss": math.nan}, texts={"sample": "once <b>upon</b>"}),
            Point(2, 1_700_000_002.5, images={"cat": picture}),
        ]
    )
    sink.close()

    read = read_back(written.folder.path / "tensorboard")

    assert (1, 0.5, 1_700_000_000.5) == (
        read.Scalars("loss")[0].step,
        read.Scalars("loss")[0].value,
        read.Scalars("loss")[0].wall_time,
    )
    assert math.isnan(read.Scalars("loss")[1].value)
    assert b"once <b>upon</b>" == read.Tensors("sample/text_summary")[0].tensor_proto.string_val[0]
    assert b"| optimizer.args.lr | 0.01 |" in read.Tensors("job/text_summary")[0].tensor_proto.string_val[0]
    (image,) = read.Images("cat")
    assert (5, 3, png(5, 3)) == (image.width, image.height, image.encoded_image_string)


def test_what_was_written_but_not_recorded_is_not_written_again(tmp_path: Path) -> None:
    """A process is killed before its record, with half a record at its file's end: the next one writes what is missing."""
    written = Written.under(tmp_path)
    folder = tmp_path / "boards" / "toy" / "r1"
    points = [Point(step, 1.0, values={"loss": float(step), "lr": 0.1}) for step in range(1, 6)]
    first = TensorBoard({"folder": "boards"})
    first.open(written.facts, {})
    first.points(points[:2])
    recorded = first.remember()
    first.points(points[2:4])  # killed here: the record has two points
    first.close()
    (file,) = folder.iterdir()
    with file.open("r+b") as torn:
        torn.truncate(file.stat().st_size - 3)

    second = TensorBoard({"folder": "boards"})
    second.open(written.facts, recorded)
    second.points(points[2:])
    recorded = second.remember()
    second.close()
    third = TensorBoard({"folder": "boards"})
    third.open(written.facts, recorded)
    third.points([Point(6, 1.0, values={"loss": 6.0})])
    third.close()

    assert [(step, float(step)) for step in range(1, 7)] == scalars(folder, "loss")
    assert [1, 2, 3, 4, 5] == [step for step, _ in scalars(folder, "lr")]


def test_a_folder_of_ones_own_has_a_folder_for_each_run(tmp_path: Path) -> None:
    """So that one TensorBoard shows all of a project's runs, by name."""
    written = Written.under(tmp_path)
    sink = TensorBoard({"folder": str(tmp_path / "all")})
    sink.open(written.facts, {})
    sink.close()

    assert (tmp_path / "all" / "toy" / "r1").is_dir()


def test_what_is_no_picture_has_no_size() -> None:
    """A file that is called .png and is none."""
    assert (0, 0) == size_of_png(b"GIF89a")
