"""The orders of samples that a job file declares, as all ranks work them out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from elasticflow import events
from elasticflow.errors import DatasetError, JobKeyError
from elasticflow.runtime.data import notes
from elasticflow.runtime.data.dataset import opened
from elasticflow.runtime.data.mixture import shares_of
from elasticflow.runtime.data.order.bucketed import BucketedOrder
from elasticflow.runtime.data.order.mixed import MixedOrder
from elasticflow.runtime.data.order.weighted import WeightedOrder
from elasticflow.runtime.process import random_streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.process.context import Worker

_MOST_CLASSES_COUNTED = 1 << 20
_HOW = {
    "weights": "return torch.tensor([...]), a list or an array: a number from 0 on for each sample",
    "balance_by": "return a list or an array: the class of each sample, a number or a text",
    "bucket_by": "return a list or an array: the length of each sample, such as [len(tokens) for tokens in dataset.texts]",
}
Declared = TypeVar("Declared", bound="Order")
ValuesSource = str | Callable[[Any], Any]
"""A value for each sample: the name of a column or an attribute, or a function that is called with the dataset."""


def draw_by_weight(
    worker: Worker, dataset: Any, weights: ValuesSource, *, draws: int | None = None
) -> WeightedOrder:
    """Return draws with replacement, each sample as often as its weight says. Collective: every rank.

    Args:
        weights: A column or an attribute of the data, or a function that is called with it: a number for each sample.

    Raises:
        DatasetError: ranks have different weights.
        JobKeyError: there are no weights for the samples.
    """
    return _agreed(
        worker, lambda: WeightedOrder(weights_of(opened(dataset).content, weights), worker.seed, draws)
    )


def draw_by_class(
    worker: Worker, dataset: Any, labels: ValuesSource, *, draws: int | None = None
) -> WeightedOrder:
    """Return draws with replacement, each class as often as any other. Collective: every rank.

    Arguments and errors are those of `draw_by_weight`; *labels* are the samples' classes, numbers or texts.
    """
    return _agreed(
        worker, lambda: WeightedOrder(class_weights_of(opened(dataset).content, labels), worker.seed, draws)
    )


def bucket_by_length(
    worker: Worker, dataset: Any, lengths: ValuesSource, batch: int, *, tail: str
) -> BucketedOrder:
    """Return batches of samples of similar length, each sample once per epoch. Collective: every rank.

    Args:
        lengths: A column or an attribute of the data, or a function that is called with it: a number for each sample.

    Raises:
        DatasetError: ranks have different lengths.
        JobKeyError: there are no lengths for the samples.
    """
    return _agreed(
        worker,
        lambda: BucketedOrder(
            lengths_of(opened(dataset).content, lengths), batch, tail=tail, seed=worker.seed
        ),
    )


def mix(
    worker: Worker, dataset: Any, *, weights: Sequence[float] | None = None, temperature: float = 1.0
) -> MixedOrder:
    """Return the samples of several sets in fixed shares, each set in its own epochs. Collective: every rank.

    Args:
        temperature: Each set's share is its size to the power of 1 / temperature.

    Raises:
        DatasetError: ranks have different sets.
    """
    sizes = opened(dataset).content.sizes
    return _agreed(worker, lambda: MixedOrder(sizes, shares_of(sizes, weights, temperature), worker.seed))


def _agreed(worker: Worker, make: Callable[[], Declared]) -> Declared:
    """Return the order that *make* makes from the job's own values, once all ranks have made the same order."""
    began = time.monotonic()
    random_streams.begin(worker.seed, "sampler")
    order = make()
    require_same(worker, order)
    if worker.rank == 0:
        assert not isinstance(order.record, int)
        facts = {key: value for key, value in order.record.items() if key not in ("version", "places")}
        kind = facts.pop("kind")
        worker.event(
            events.ORDER_DECLARED,
            kind=kind,
            samples=len(order),
            facts=facts,
            seconds=round(time.monotonic() - began, 3),
        )
    worker.reseed()
    return order


def require_same(worker: Worker, order: Order) -> None:
    """Make sure that all ranks read the samples in one order. Collective: every rank.

    Raises:
        DatasetError: some rank has another order than rank 0.
    """
    by_rank = worker.gather_text(json.dumps(order.record))
    for rank, text in enumerate(by_rank):
        if text != by_rank[0]:
            raise DatasetError(
                f"rank {rank} would read the samples in another order than rank 0: {text}, not {by_rank[0]}",
                "make sure that every node sees the same files, and that what is drawn at random is drawn from random, "
                "numpy's global generator or torch's",
            )


def weights_of(dataset: Any, source: ValuesSource) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the weight of each sample.

    Raises:
        JobKeyError: there are none, not one for each sample, or not weights.
    """
    key = "weights"
    weights = _numbers_of(dataset, source, key)
    if not weights.max() > 0:
        raise _error(key, f"{_name(source)} gives every sample the weight 0", "none would ever be drawn")
    return weights


def class_weights_of(dataset: Any, source: ValuesSource) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a weight for each sample such that all classes are drawn equally often.

    Raises:
        JobKeyError: there are no labels, or not one for each sample.
    """
    labels = _values_of(dataset, source, "balance_by")
    if labels.dtype.kind in "biu" and labels.min() >= 0 and labels.max() < _MOST_CLASSES_COUNTED:
        numbers = labels.astype(np.int64, copy=False)
        counts = np.bincount(numbers)
    else:
        _, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = np.zeros(len(counts))
    np.divide(1.0, counts, out=weights, where=counts > 0)
    found: np.ndarray[Any, np.dtype[np.float64]] = weights[numbers]
    return found


def lengths_of(dataset: Any, source: ValuesSource) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the length of each sample.

    Raises:
        JobKeyError: there are none, or not one for each sample.
    """
    return _numbers_of(dataset, source, "bucket_by")


def _numbers_of(dataset: Any, source: ValuesSource, key: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    values = _values_of(dataset, source, key)
    if values.dtype.kind not in "biuf":
        what = notes.name_of(values.reshape(-1)[0].item())
        raise _error(
            key, f"{_name(source)} gives no numbers, but {values.dtype} (sample 0: a {what})", _HOW[key]
        )
    numbers: np.ndarray[Any, np.dtype[np.float64]] = values.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if wrong.size:
        first, more = int(wrong[0]), "" if wrong.size == 1 else f", and {wrong.size - 1:,} more are such"
        message = f"{_name(source)} gives sample {first} the number {numbers[first]}{more}"
        raise _error(key, message, "it must be finite, and 0 or more")
    return numbers


def _values_of(dataset: Any, source: ValuesSource, key: str) -> np.ndarray[Any, Any]:
    found = _named(dataset, source, key) if isinstance(source, str) else source(dataset)
    values = _as_array(found)
    if values is None or values.ndim != 1 or len(values) != len(dataset) or values.dtype.kind not in "biufUS":
        what = (
            f"a {notes.name_of(found)}" if values is None or values.ndim != 1 else f"{len(values):,} values"
        )
        if values is not None and values.ndim == 1 and len(values) == len(dataset):
            what = f"values that are neither numbers nor texts, such as {notes.form(values[0])},"
        message = f"{_name(source)} gives {what} for {len(dataset):,} samples"
        called = "" if isinstance(source, str) else "it is called once, with the dataset: "
        raise _error(key, message, f"{called}{_HOW[key]}")
    return values


def _as_array(found: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(found, torch.Tensor):
        values = found.detach().cpu()
        return (values.float() if values.dtype is torch.bfloat16 else values).numpy()  # numpy has no bfloat16
    if not hasattr(found, "__len__") or isinstance(found, str | bytes | dict):
        return None
    try:
        return np.asarray(found)
    except ValueError:  # lists of different lengths
        return None


def _named(dataset: Any, name: str, key: str) -> Any:
    """Return the values of a column or an attribute; of a part of a dataset, its own part of them."""
    if isinstance(dataset, Subset) and not hasattr(dataset, name):
        values = _of_all(dataset.dataset, name, key)
        return None if values is None else values[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset) and not hasattr(dataset, name):
        parts = [_of_all(part, name, key) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and name in columns:
        # For Hugging Face datasets: raw samples, without the transform.
        return dataset.with_format("numpy")[name][:]
    value = dataset
    for part in name.split("."):
        if not hasattr(value, part):
            raise _error(
                key, f"the {notes.name_of(dataset)} has no column and no attribute `{name}`", _known(dataset)
            )
        value = getattr(value, part)
    return value() if callable(value) else value


def _of_all(dataset: Any, name: str, key: str) -> np.ndarray[Any, Any] | None:
    """Return the values of a dataset that another one is made of: one for each sample, else a part of them would be of other samples."""
    values = _as_array(_named(dataset, name, key))
    if values is not None and values.ndim == 1 and len(values) != len(dataset):
        which = f"`{name}` of the {notes.name_of(dataset)} inside of the dataset"
        raise _error(key, f"{which} gives {len(values):,} values for {len(dataset):,} samples", _HOW[key])
    return values


def _known(dataset: Any) -> str:
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list):
        return f"its columns: {', '.join(map(str, columns))}; or name a function of your own, which gets the dataset"
    names = sorted(name for name in getattr(dataset, "__dict__", ()) if not name.startswith("_"))
    known = f"its attributes: {', '.join(names)}; or " if names else ""
    return f"{known}name a function of your own, which gets the dataset"


def _name(source: ValuesSource) -> str:
    if isinstance(source, str):
        return f"`{source}` of the dataset"
    return f"{source.__module__}:{getattr(source, '__qualname__', source)}"


def _error(key: str, message: str, remedy: str) -> JobKeyError:
    key = f"dataset.sampler.{key}"
    return JobKeyError(key, f"{key}: {message}", remedy)
