"""The orders of samples that a job file declares, as all ranks work them out."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, TypeVar

from elasticflow import events
from elasticflow.errors import DatasetError
from elasticflow.runtime.data.dataset import opened
from elasticflow.runtime.data.mixture import shares_of
from elasticflow.runtime.data.order.bucketed import BucketedOrder
from elasticflow.runtime.data.order.mixed import MixedOrder
from elasticflow.runtime.data.order.weighted import WeightedOrder
from elasticflow.runtime.data.sample_values import class_weights_of, lengths_of, weights_of
from elasticflow.runtime.process import random_streams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.runtime.data.order.order import Order
    from elasticflow.runtime.data.sample_values import ValuesSource
    from elasticflow.runtime.process.context import Worker

_FACTORY = "sampler"
Declared = TypeVar("Declared", bound="Order")


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
    random_streams.begin(worker.seed, _FACTORY)
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
