"""Metrics of `evaluation.metrics`: each takes batch after batch and returns a number."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from elasticflow.errors import MetricError
from elasticflow.runtime.data import notes
from elasticflow.system.free_memory import available

Over = Literal["batch", "set", "loss"]
Entry = Callable[..., Any]
OF_LOSS = "is_of_loss"
"""An attribute that is true of our own functions that take the loss over the whole set (`elasticflow/metrics.py`)."""

_SHARE = 0.5  # of the free memory, for what a function over the whole set is called with


@dataclass(frozen=True)
class Metric:
    """One entry of `evaluation.metrics`.

    Attributes:
        entry: A function, or a class whose objects have update(outputs, targets) and compute().
        over: Argument of the function: a batch (its value is a mean over the batch), the set (outputs and targets
            of all its samples, in their order), or the loss (the mean over the whole set). None: a batch.
        outputs: The key, attribute or place in what the model returns that is meant; None: all of it.
        targets: The same in the batch's targets; where the job has a step of its own, in the batch.
    """

    entry: Entry
    args: Mapping[str, Any] = field(default_factory=dict)
    over: Over | None = None
    outputs: str | int | None = None
    targets: str | int | None = None

    @property
    def is_class(self) -> bool:
        """True if the entry is a class whose objects take in the model's outputs."""
        return isinstance(self.entry, type)

    @property
    def is_of_loss(self) -> bool:
        """True if it follows from the mean loss."""
        return self.over == "loss" or bool(getattr(self.entry, OF_LOSS, False))

    @property
    def is_of_set(self) -> bool:
        """True if it takes in the outputs of the whole set, on rank 0."""
        return self.is_class or self.over == "set"

    @property
    def takes_outputs(self) -> bool:
        """True if it is called with the outputs of the training step's own forward, where the job has such a step."""
        return self.is_of_set or self.outputs is not None or self.targets is not None

    def called(self) -> Entry:
        """Return the function, with its arguments."""
        return functools.partial(self.entry, **self.args) if self.args else self.entry

    def chosen(self, outputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return the parts of the outputs and targets that the metric is called with.

        Raises:
            MetricError: the outputs or the targets do not have the named part.
        """
        return _part(outputs, self.outputs, "outputs"), _part(targets, self.targets, "targets")


def metric_of(entry: Entry | Metric) -> Metric:
    """Return an entry as a metric; train.py names a function or a class alone where nothing else is to be said."""
    return entry if isinstance(entry, Metric) else Metric(entry)


def outputs_and_targets(result: Any) -> tuple[Any, Any]:
    """Return the pair that `evaluation.step` returned.

    Raises:
        MetricError: it is no pair.
    """
    if isinstance(result, tuple | list) and len(result) == 2:
        return result[0], result[1]
    raise MetricError(
        f"evaluation.step returned {notes.form(result)}",
        "return a pair, (outputs, targets): every metric is called with it",
    )


@contextmanager
def noting_arguments(name: str, first: Any, second: Any) -> Iterator[None]:
    """Note in an exception of a metric what the metric was called with."""
    try:
        yield
    except MetricError:
        raise
    except Exception as error:
        if isinstance(first, nn.Module):
            told = f"(model, batch), a {type(first).__name__} and {notes.form(second)}"
            more = "; with `outputs` or `targets`, a class or evaluation.step it would get what the model returned"
        else:
            told, more = f"(outputs, targets), {notes.form(first)} and {notes.form(second)}", ""
        error.add_note(f"evaluation.metrics.{name} was called with {told}{more}")
        raise


def of_loss(name: str, metric: Metric, loss: float) -> float:
    """Return a metric that follows from the mean loss over the whole set; infinite if it is too large for a float."""
    try:
        return number(name, metric.called()(loss))
    except OverflowError:
        return math.inf


def number(name: str, value: Any) -> float:
    """Return the one number that a metric has given.

    Raises:
        MetricError: the result is not a number.
    """
    size = getattr(value, "numel", None)
    try:
        if not callable(size) or size() == 1:
            return float(value)
    except (TypeError, ValueError):
        pass
    what, remedy = notes.form(value), "a metric is one number: name one entry for each"
    if not isinstance(value, dict):
        remedy = 'a metric is one number: give it an average over classes, such as average = "macro", or a function of yours'
    raise MetricError(f"evaluation.metrics.{name} gave {what}", remedy)


class OverSet:
    """One metric over the whole set, on rank 0: takes in every batch in the order of the samples.

    Args:
        is_first: This is rank 0; on others no object is made.
    """

    def __init__(self, name: str, metric: Metric, samples: int, *, is_first: bool = True) -> None:
        self._name, self._metric, self._samples = name, metric, samples
        self._held: list[tuple[Any, Any]] = []
        self._object = metric.entry(**metric.args) if metric.is_class and is_first else None
        if self._object is not None:
            lacking = [each for each in ("update", "compute") if not hasattr(self._object, each)]
            if lacking:
                message = f"evaluation.metrics.{name}: {type(self._object).__name__} has no {' and no '.join(lacking)}"
                remedy = 'a class has update(outputs, targets) and compute(); a function over all outputs has over = "set"'
                raise MetricError(message, remedy)

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Take in one batch of *count* samples.

        Raises:
            MetricError: all batches would need more memory than there is.
        """
        if self._object is not None:
            self._object.update(outputs, targets)
            return
        if not self._held:
            whole = num_bytes((outputs, targets)) * self._samples // max(1, count)
            if whole > (limit := int(available() * _SHARE)):
                message = (
                    f"evaluation.metrics.{self._name} is called with the outputs of all {self._samples:,} samples, which are "
                    f"{_gib(whole)}: more than half of rank 0's free memory ({_gib(limit)})"
                )
                remedy = (
                    "name a class with update(outputs, targets) and compute(), which takes in batch by batch;\n"
                    "or measure fewer samples (`samples`), or return less from the forward (`outputs`)"
                )
                raise MetricError(message, remedy)
        self._held.append((outputs, targets))

    def value(self) -> float:
        """Return the metric's value over all batches."""
        if self._object is not None:
            return number(self._name, self._object.compute())
        try:
            outputs, targets = (joined([batch[part] for batch in self._held]) for part in (0, 1))
        except ValueError as error:
            remedy = "name a class with update(outputs, targets) and compute(), which takes in batch by batch"
            raise MetricError(
                f"evaluation.metrics.{self._name} is over the whole set: {error}", remedy
            ) from None
        return number(self._name, self._metric.called()(outputs, targets))


def _part(value: Any, part: str | int | None, what: str) -> Any:
    if part is None:
        return value
    if isinstance(part, int):
        if isinstance(value, list | tuple) and -len(value) <= part < len(value):
            return value[part]
    elif isinstance(value, Mapping) and part in value:
        return value[part]
    elif hasattr(value, part):
        return getattr(value, part)
    raise MetricError(
        f"a metric names {part!r} as its {what}, and these are {notes.form(value)}",
        f"`{what}` is a key, an attribute or a place in a list or tuple of them",
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"


def num_bytes(value: Any) -> int:
    """Return the bytes that the tensors and arrays in a value take."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return 0


def joined(batches: list[Any]) -> Any:
    """Return the values of several batches as one value: tensors and lists are concatenated, inside dicts and tuples, too.

    Raises:
        ValueError: the values have other types, or do not fit together; the message says why.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        _require_fitting(batches)
        return torch.cat(batches)
    if isinstance(first, np.ndarray):
        _require_fitting(batches)
        return np.concatenate(batches)
    if isinstance(first, dict):
        # A model's output of transformers, too: a dict whose keys are attributes.
        return type(first)(**{key: joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, tuple):
        parts = [joined(list(parts)) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list):
        return [each for batch in batches for each in batch]
    raise ValueError(f"{notes.form(first)} of several batches cannot be put together")


def _require_fitting(batches: list[Any]) -> None:
    first = batches[0]
    if first.ndim == 0:
        raise ValueError("one number for each batch is nothing that has samples")
    odd = next((each for each in batches if each.shape[1:] != first.shape[1:]), None)
    if odd is not None:
        what = f"{notes.form(first)} of one batch and {notes.form(odd)} of another"
        raise ValueError(f"{what} cannot be put one behind the other")


@contextmanager
def hearing(model: nn.Module) -> Iterator[Callable[[], Any]]:
    """Context with a function that returns the outputs of the last call of *model*, and forgets them.

    Raises:
        MetricError: by that function: the model was not called since the last look.
    """
    heard: list[Any] = []

    def hear(_model: nn.Module, _args: Any, outputs: Any) -> None:
        heard[:] = [outputs]

    def outputs() -> Any:
        if not heard:
            raise MetricError(
                "a metric is called with the model's outputs, and the training step does not call the model itself",
                "let the step call model(...), or name a function of (model, batch)",
            )
        return heard.pop()

    handle = model.register_forward_hook(hear)
    try:
        yield outputs
    finally:
        handle.remove()
