"""The argument of a job's hooks, and what it logs: points in this worker's file, images beside it."""

from __future__ import annotations

import io
import math
import struct
import time
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from elasticflow.errors import HookError
from elasticflow.protocol import points, run_files
from elasticflow.runtime.process.sharded_tensors import whole_of
from elasticflow.system import atomic_files
from elasticflow.system.json_lines import AppendedLines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from elasticflow.runtime.process.position import Position

_FORMS = (
    "an image is a tensor of [C, H, W] or [H, W], an array of [H, W, C] or [H, W] (whole numbers to 255, or others from 0 to 1; "
    "C is 1, 3 or 4), an image of Pillow, or a figure of Matplotlib"
)
_COLOUR_TYPES = {1: 0, 3: 2, 4: 6}
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class HookContext:
    """The argument of a hook.

    Attributes:
        hook: Key of the hook in the job file: "on_step".
        step: Number of finished optimizer steps.
        epoch: Number of the pass over the data in which the last step was made, from 1.
        samples: Number of samples trained on.
        dataset: The training data as `dataset.entry` returned it, to look something up (a vocabulary, names of classes).
            Reads by a hook do not affect training. None with `dataset.shards`.
        metrics: `loss` and scalars of the last step and, as `eval`, the last evaluation.
            Empty before the first step of this generation.
        snapshot: In `on_snapshot` the name of the snapshot that is about to be taken; else None.
    """

    def __init__(
        self,
        hook: str,
        position: Position,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        model: nn.Module,
        ema: nn.Module | None,
        dataset: Any,
        metrics: Mapping[str, Any],
        snapshot: str | None,
        writer: PointWriter,
        is_part: bool = False,
    ) -> None:
        self.hook, self.step, self.samples = hook, position.step, position.samples
        self.epoch = position.in_epoch
        self.rank, self.world_size, self.device = rank, world_size, device
        self.metrics, self.snapshot = metrics, snapshot
        self._model, self._ema, self._is_part = model, ema, is_part
        self.dataset, self._writer = dataset, writer
        self._facts = {"step": position.step, "epoch": position.in_epoch, "hook": hook}

    @property
    def model(self) -> nn.Module:
        """The bare model, in evaluation mode, gradients switched off; its modes are restored afterwards.

        Raises:
            HookError: the model is sharded, and the other ranks do not call this hook.
        """
        self._require_all_ranks("model")
        return self._model

    @property
    def ema(self) -> nn.Module | None:
        """The averaged model of `train.ema`; None without it.

        Raises:
            HookError: as by `model`.
        """
        self._require_all_ranks("ema")
        return self._ema

    def _require_all_ranks(self, name: str) -> None:
        if self._is_part:
            raise HookError(
                f"hooks.{self.hook} reads context.{name} on rank 0 alone, which holds a part of it: [parallel] shards the model",
                f"add all_ranks = true to [hooks.{self.hook}], and make the same calls of the model on every rank",
            )

    def log_scalar(self, name: str, value: Any) -> None:
        """Log a number: a Python or NumPy number, or a tensor of one element.

        Raises:
            TypeError: the value has another type.
            ValueError: *name* cannot be used as a name.
        """
        _require_name(name)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise TypeError(
                f"log_scalar({name!r}, ...) was given a tensor of shape {tuple(value.shape)}, and logs one number"
            )
        if not isinstance(value, Tensor) and (isinstance(value, str) or not hasattr(value, "__float__")):
            raise TypeError(
                f"log_scalar({name!r}, ...) was given a {type(value).__name__}, and logs a number"
            )
        value = whole_of(value)
        number = float(value.detach()) if isinstance(value, Tensor) else float(value)
        self._writer.add("scalar", name, number if math.isfinite(number) else None, self._facts)

    def log_text(self, name: str, text: str) -> None:
        """Log a text of at most a million characters.

        Raises:
            TypeError: the value has another type.
            ValueError: it is longer, or *name* is no name.
        """
        _require_name(name)
        given: Any = text
        if not isinstance(given, str):
            raise TypeError(f"log_text({name!r}, ...) was given a {type(text).__name__}, and logs a str")
        if len(text) > points.MOST_CHARACTERS:
            raise ValueError(
                f"log_text({name!r}, ...) was given {len(text):,} characters, and logs {points.MOST_CHARACTERS:,} at most"
            )
        self._writer.add("text", name, text.encode("utf-8", "replace").decode(), self._facts)

    def log_image(self, name: str, image: Any) -> None:
        """Log an image: a tensor, an array, an image of Pillow or a figure of Matplotlib; see `png_of`.

        Raises:
            TypeError: the value has another type.
            ValueError: it has another shape, or *name* is no name.
        """
        _require_name(name)
        self._writer.add_image(name, png_of(whole_of(image)), self._facts)


def _require_name(name: Any) -> None:
    if not (isinstance(name, str) and run_files.is_name(name)):
        raise ValueError(
            f"{name!r} is no name to log under: it begins with a letter, then up to 99 letters, digits and _ . / -"
        )


class PointWriter:
    """The file of one rank in one generation; nothing is made before `begin`."""

    def __init__(self, run_folder: Path, generation: int, rank: int) -> None:
        self._folder, self._generation, self._rank = run_folder / points.FOLDER, generation, rank
        self._lines: AppendedLines | None = None
        self._is_dirty = False

    def begin(self, step: int) -> None:
        """Begin a generation that continues after *step*.

        Raises:
            OSError: the file cannot be written.
        """
        self._lines = AppendedLines(self._folder / points.file_name(self._generation, self._rank))
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
        file = f"{facts['step']:09d}-{facts['hook']}-{name.replace('/', '.')}{of_rank}.png"
        atomic_files.replace(folder / file, (png,))
        self.add("image", name, f"{points.FOLDER}/{points.IMAGES}/{file}", facts)

    def sync(self) -> None:
        """Have all points on the disk: a snapshot that is about to be taken makes them final."""
        if self._is_dirty and self._lines is not None:
            self._lines.sync()
            self._is_dirty = False

    def _append(self, record: dict[str, Any]) -> None:
        assert self._lines is not None, "begin() comes first"
        self._lines.append([record])
        self._is_dirty = True


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
