"""Appends what hooks log to this worker's file, and writes images beside it."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from elasticflow.protocol import points

if TYPE_CHECKING:
    from pathlib import Path


class PointWriter:
    """The file of one rank in one generation; nothing is made before `begin`."""

    def __init__(self, run_folder: Path, generation: int, rank: int) -> None:
        self._folder = run_folder / points.FOLDER
        self._path = self._folder / points.file_name(generation, rank)
        self._rank, self._file = rank, -1
        self._is_dirty = False

    def begin(self, step: int) -> None:
        """Begin a generation that continues after *step*.

        Raises:
            OSError: the file cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._append({"from": step, "rank": self._rank})
        self.sync()

    def add(self, kind: points.Kind, name: str, value: Any, facts: dict[str, Any]) -> None:
        """Append a point in a single write, so that a killed worker never writes half a line."""
        self._append({**facts, "kind": kind, "name": name, "time": round(time.time(), 3), "value": value})

    def add_image(self, name: str, png: bytes, facts: dict[str, Any]) -> None:
        """Write an image, whole or not at all, and append its point. If the step is repeated, the new image replaces the old."""
        folder = self._folder / points.IMAGES
        folder.mkdir(exist_ok=True)
        of_rank = f"-rank{self._rank}" if self._rank else ""
        plain = name.replace("/", ".")
        target = folder / f"{facts['step']:09d}-{facts['hook']}-{plain}{of_rank}.png"
        hidden = folder / f".{target.name}.{os.getpid()}"
        with hidden.open("wb") as file:
            file.write(png)
            file.flush()
            os.fsync(file.fileno())
        hidden.replace(target)
        path = f"{points.FOLDER}/{points.IMAGES}/{target.name}"
        self.add("image", name, path, facts)

    def sync(self) -> None:
        """Have all points on the disk: a snapshot that is about to be taken makes them final."""
        if self._is_dirty:
            os.fsync(self._file)
            self._is_dirty = False

    def _append(self, record: dict[str, Any]) -> None:
        data = json.dumps(record, allow_nan=False).encode() + b"\n"
        while data:
            data = data[os.write(self._file, data) :]
        self._is_dirty = True
