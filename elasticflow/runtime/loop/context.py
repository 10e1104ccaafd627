"""The argument of a job's hooks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from elasticflow.errors import HookError
from elasticflow.protocol import points, run_files
from elasticflow.runtime.loop.images import png_of
from elasticflow.runtime.process.sharded_tensors import whole_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import nn

    from elasticflow.runtime.loop.point_writer import PointWriter
    from elasticflow.runtime.process.position import Position


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
        """Log an image: a tensor, an array, an image of Pillow or a figure of Matplotlib; see `images.png_of`.

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
