"""Detects a loss that depends on how a batch is split between workers.

A loss that is a mean over something else than the samples, such as tokens without padding, is another loss at another
number of workers, unless the step says over how many items it is (`loss.parse_loss`).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elasticflow import events
from elasticflow.errors import StopTraining
from elasticflow.runtime.data.rows import cut, has_rows, leaves
from elasticflow.runtime.process import torch_private
from elasticflow.runtime.training.loss import HALVES, parse_loss
from elasticflow.runtime.training.scalars import LOSS_KEYS, scalars_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker

REMEDY = (
    'name model.loss_count = "module:function" (batch -> over how many items its loss is a mean), '
    "or let the step return (loss_sum, count); with a model of transformers: "
    'model.step = "elasticflow.hugging_face:training_step", which counts its tokens'
)
IGNORED = -100  # what torch's losses leave out of their mean
_LABELS = ("label", "target")
_TOLERANCE = 1e-5
_TOLERANCE_OF_HALVES = 5e-3


class FirstLook:
    """Looks at what the job's step returns in the first step of a run; the step is not called for it. Rank 0.

    Warns of keys of a dict that are not read, and if samples of the batch have different numbers of ignored labels while
    the loss is weighed by samples.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._seen: set[float] = set()
        self._has_logged_keys = False

    def __call__(self, result: Any, batch: Any, num_samples: int) -> None:
        """Look at what the step returned for one micro-batch."""
        if isinstance(result, dict) and not self._has_logged_keys and (unused := unused_keys(result)):
            self._has_logged_keys = True
            self._worker.event(events.LOSS_UNUSED, keys=unused)
        if not is_counted(result) and len(self._seen) < 2:
            self._seen |= counts_of_labels(batch, num_samples)
            if len(self._seen) > 1:
                warn(
                    self._worker, "samples of a batch have different numbers of labels that count (not -100)"
                )


def first_look(worker: Worker, batch: Batch) -> FirstLook | None:
    """Return the `FirstLook` for the first step of a run; None in other steps and on other ranks."""
    return FirstLook(worker) if batch.end.step == 1 and worker.rank == 0 else None


def warn(worker: Worker, reason: str) -> None:
    """Log that the loss depends on how a batch is cut, once in this process; rank 0 does."""
    if worker.rank == 0:
        worker.event_once(events.LOSS_UNWEIGHED, reason=reason, help=REMEDY)


def unused_keys(result: dict[Any, Any]) -> list[str]:
    """Return the keys of a step's result that are not read."""
    read = scalars_in(result).keys() | LOSS_KEYS
    return [str(key) for key, value in result.items() if key not in read and value is not None]


def is_counted(result: Any) -> bool:
    """True if a step's result states its number of items."""
    return isinstance(result, tuple | list) or (isinstance(result, dict) and result.get("count") is not None)


def counts_of_labels(batch: Any, num_samples: int) -> set[float]:
    """Return the numbers of labels per sample that are not ignored; nothing where none is ignored."""
    numbers: set[float] = set()
    for labels in _labels_in(batch):
        if labels.dim() and len(labels) == num_samples and not labels.is_floating_point():
            counts = (labels != IGNORED).reshape(num_samples, -1).sum(1).tolist()
            if min(counts) < labels[0].numel():
                numbers |= {float(count) for count in counts}
    return numbers


def _labels_in(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, dict):
        named = (value for key, value in batch.items() if any(name in str(key).lower() for name in _LABELS))
        yield from (value for value in named if isinstance(value, Tensor))
    elif isinstance(batch, list | tuple):
        for value in batch[1:]:
            if isinstance(value, Tensor):
                yield value
        for value in batch:
            if isinstance(value, dict):
                yield from _labels_in(value)


def difference(
    worker: Worker | None,
    model: nn.Module,
    step: Callable[[nn.Module, Any], Any],
    batch: Any,
    num_samples: int,
    dtype: torch.dtype | None = None,
) -> str | None:
    """Return in words how the loss of a batch differs from the mean of its parts', weighed by samples; None if it does not.

    The model is in evaluation mode, and gradients are off. The step is called six times at most. A step that counts its
    items, that draws random numbers, fails on a part, or whose batch cannot be cut, gives None.

    Args:
        dtype: Dtype of autocast, which the caller has switched on.

    Raises:
        StopTraining: the step did.
    """

    def loss(of: Any, seed: int = 1) -> float:
        torch.manual_seed(seed) if worker is None else worker.generators.seed_model(seed)
        result = step(model, of)
        value = None if is_counted(result) else parse_loss(result).value
        return math.nan if value is None else float(value)

    halves = dtype is not None or any(p.dtype in HALVES for p in model.parameters())
    try:
        with _uncompiled(model):
            return _difference(loss, batch, num_samples, _TOLERANCE_OF_HALVES if halves else _TOLERANCE)
    except StopTraining:
        raise
    except Exception:  # noqa: BLE001  # the step itself is tried elsewhere
        return None


def _difference(loss: Callable[..., float], batch: Any, num_samples: int, tolerance: float) -> str | None:
    whole = loss(batch)
    if math.isnan(whole) or not all(has_rows(leaf, num_samples) for leaf in leaves(batch)):
        return None
    # Two cuts: in one of them both parts may count as much per sample.
    for at in {1, num_samples // 2} if num_samples > 1 else ():
        first, second = (cut(batch, num_samples, *part) for part in ((0, at), (at, num_samples)))
        mean = (loss(first) * at + loss(second) * (num_samples - at)) / num_samples
        if abs(whole - mean) > tolerance * abs(whole):
            if abs(whole - loss(batch, seed=2)) > tolerance * abs(whole):
                return None
            return f"the loss of a batch is {whole:.6g}, but the mean over its parts, weighed by their samples, {mean:.6g}"
    return None


def _uncompiled(model: nn.Module) -> AbstractContextManager[Any]:
    """Have nothing compiled for the shapes of parts, which do not come again."""
    is_compiled = any(map(torch_private.is_compiled, model.modules()))
    return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
