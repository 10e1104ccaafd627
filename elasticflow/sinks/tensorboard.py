"""TensorBoard: writes event files record by record.

Guarantee: each point is written once, even after a crash between a write and the record of it: points written after the
last record are found in the event files themselves. Each process writes a new file; where a file was cut, TensorBoard
continues with the next.
"""

from __future__ import annotations

import os
import struct
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.sinks.sink import Sink

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.sinks.sink import Options, Point, Remembered, RunFacts

_TEXT = "/text_summary"  # suffix of texts in TensorBoard's own writer
_JOB = "job"
_FILES = "events.out.tfevents.*"
_HEADER, _FOOTER = 12, 4  # bytes around a record: its length with a checksum, and the checksum of the record


class TensorBoard(Sink):
    """Writes a run's event files."""

    look_every_s = 5.0  # TensorBoard itself reads no more often

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._Event, self._summary, self._text = event_pb2.Event, summary_pb2, metadata
        self._Writer = RecordWriter
        self._written: Counter[tuple[int, str]] = Counter()

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin a new event file; points written after the last record are not written again."""
        self._folder = run.folder / "tensorboard"
        if (given := self.options.get("folder")) is not None:
            self._folder = run.project_root / Path(given).expanduser() / run.job / run.run_id
        self._folder.mkdir(parents=True, exist_ok=True)
        before = remembered.get("sizes", {})
        self._written = Counter(
            (event.step, value.tag)
            for path in sorted(self._folder.glob(_FILES))
            for event in self._events_in(path, before.get(path.name, 0))
            for value in event.summary.value
        )
        name = f"events.out.tfevents.{time.time():.6f}.{run.run_id}.{os.getpid()}"
        self._file = (self._folder / name).open("xb")
        self._writer = self._Writer(self._file)
        self._write(self._Event(wall_time=time.time(), file_version="brain.Event:2"))
        if not remembered and not self._was_written(0, f"{_JOB}{_TEXT}"):
            rows = "".join(f"| {key} | {value} |\n" for key, value in {**run.tags, **run.parameters}.items())
            summary = self._summary.Summary(
                value=[self._text_value(_JOB, f"| key | value |\n|---|---|\n{rows}")]
            )
            self._write(self._Event(wall_time=time.time(), step=0, summary=summary))
        self._file.flush()

    def remember(self) -> Remembered:
        """Return the present length of each event file; later data is of a process that could not record it."""
        return {"sizes": {path.name: path.stat().st_size for path in sorted(self._folder.glob(_FILES))}}

    def points(self, batch: Sequence[Point]) -> None:
        """Append a record for each point; readers see only whole records."""
        for point in batch:
            values = [value for value in self._values(point) if not self._was_written(point.step, value.tag)]
            if values:
                summary = self._summary.Summary(value=values)
                self._write(self._Event(wall_time=point.time, step=point.step, summary=summary))
        self._file.flush()

    def close(self) -> None:
        """Close the event file."""
        self._file.close()

    def _was_written(self, step: int, tag: str) -> bool:
        """Return True if an earlier process wrote this point; each call for a step and tag uses up one written point."""
        if self._written.get((step, tag), 0) == 0:
            return False
        self._written[step, tag] -= 1
        return True

    def _values(self, point: Point) -> Iterator[Any]:
        value_of = self._summary.Summary.Value
        for name, number in point.values.items():
            yield value_of(tag=name, simple_value=number)
        for name, text in point.texts.items():
            yield self._text_value(name, text)
        for name, path in point.images.items():
            png = path.read_bytes()
            width, height = size_of_png(png)
            image = self._summary.Summary.Image(
                height=height, width=width, colorspace=3, encoded_image_string=png
            )
            yield value_of(tag=name, image=image)

    def _text_value(self, name: str, text: str) -> Any:
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        metadata = self._text.create_summary_metadata(display_name=None, description=None)
        return self._summary.Summary.Value(tag=f"{name}{_TEXT}", metadata=metadata, tensor=tensor)

    def _write(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _events_in(self, path: Path, begin: int) -> Iterator[Any]:
        """Yield the events of a file from byte *begin* to its end, or to the place where it was cut."""
        with path.open("rb") as file:
            file.seek(begin)
            while len(header := file.read(_HEADER)) == _HEADER:
                (length,) = struct.unpack_from("<Q", header)
                record = file.read(length + _FOOTER)
                if len(record) < length + _FOOTER:
                    return
                yield self._Event.FromString(record[:length])


def size_of_png(data: bytes) -> tuple[int, int]:
    """Return width and height of a PNG file; zeros for other data."""
    if data[:8] != b"\x89PNG\r\n\x1a\n" or len(data) < 24:
        return 0, 0
    width, height = struct.unpack(">II", data[16:24])
    return int(width), int(height)
