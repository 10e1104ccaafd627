"""Samples drawn exactly as the job declares, through kills, drains and resizes: by weights, in batches of similar length, of several sets."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from elasticflow.errors import StateError
from elasticflow.runtime.data.order.bucketed import BucketedOrder
from elasticflow.runtime.data.order.mixed import MixedOrder
from elasticflow.runtime.data.order.order import VERSION, ShuffledOrder, require_same_order
from elasticflow.runtime.data.order.weighted import WeightedOrder
from tests.runtime.state.test_schedules import SEED, Run, draw_launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.data.order.order import Order, OrderRecord

RUNS = 60


def trained(
    draw: random.Random, samples: int, tail: str, order: Callable[[int], Order], *, may_change_batch: bool
) -> tuple[list[list[int]], Run, int]:
    """Train through launches drawn at random; return the samples of each step, the run and the size of a batch."""
    shards, batch = draw.choice([None, None, 5]), draw.randint(1, 24)
    run = Run(samples, draw.randint(1, 3), tail, shards, order)
    launches = [draw_launch(draw) for _ in range(draw.randint(2, 8))]
    if not may_change_batch:
        launches = [replace(launch, batch=batch) for launch in launches]
    for launch in launches:
        if run.launch(launch, is_last=launch is launches[-1]):
            break
    steps = [run.steps[step] for step in range(1, len(run.steps) + 1)]
    return [step.samples for step in steps], run, steps[0].batch_size


def _always(order: Order, _: int) -> Order:
    return order


def test_weights_are_drawn_as_declared_through_random_schedules() -> None:
    """The draw at each place is what the declared weights give there: none is lost, made twice, or made otherwise."""
    for number in range(RUNS):
        draw = random.Random(f"{SEED} weighted {number}")
        draws = draw.randint(24, 100)
        samples = draw.randint(1, draws)
        weights = np.array([draw.choice([0.0, 1.0, draw.random()]) for _ in range(samples)])
        weights[draw.randrange(samples)] = 1.0
        order = WeightedOrder(weights, SEED, draws)
        steps, run, _ = trained(draw, draws, "spill", partial(_always, order), may_change_batch=True)
        flat = [sample for step in steps for sample in step]
        assert len(flat) % draws == 0
        assert order.indices(np.arange(len(flat))).tolist() == flat
        assert not weights[sorted(set(flat))].tolist().count(0.0)
        assert np.bincount(flat, minlength=draws).tolist() == run.counts.tolist()


@pytest.mark.parametrize("tail", ["spill", "short", "drop"])
def test_buckets_hold_each_sample_once_through_random_schedules(tail: str) -> None:
    """Each sample once per epoch, in the order that is worked out at once; of 72 runs in all."""
    for number in range(RUNS // 3 + 4):
        draw = random.Random(f"{SEED} bucketed {tail} {number}")
        samples = draw.randint(24, 100)
        lengths = np.array([float(draw.randint(1, 9)) for _ in range(samples)])

        def order(batch: int, lengths: np.ndarray = lengths, tail: str = tail) -> BucketedOrder:
            return BucketedOrder(lengths, batch, tail=tail, seed=SEED)

        steps, run, batch = trained(draw, samples, tail, order, may_change_batch=False)
        of_epoch = samples - samples % batch if tail == "drop" else samples
        flat = [sample for step in steps for sample in step]
        whole = order(batch).indices(np.arange(len(flat) // of_epoch * samples)).reshape(-1, samples)
        assert [sample for epoch in whole.tolist() for sample in epoch[:of_epoch]] == flat
        assert all(sorted(epoch) == list(range(samples)) for epoch in whole.tolist())
        assert np.bincount(flat, minlength=samples).tolist() == run.counts.tolist()


def test_mixtures_are_drawn_as_declared_through_random_schedules() -> None:
    """Each set in its own epochs, in exact shares, in the order that is worked out at once."""
    for number in range(RUNS):
        draw = random.Random(f"{SEED} mixed {number}")
        sizes = [draw.randint(8, 40) for _ in range(draw.randint(2, 4))]
        order = MixedOrder(sizes, [draw.randint(1, 9) for _ in sizes], SEED)
        steps, run, _ = trained(draw, len(order), "spill", partial(_always, order), may_change_batch=True)
        flat = np.array([sample for step in steps for sample in step])
        assert order.indices(np.arange(len(flat))).tolist() == flat.tolist()
        assert np.bincount(flat, minlength=len(order)).tolist() == run.counts.tolist()
        begin = 0
        for size, count in zip(sizes, order._counts(0, len(sizes), len(flat)), strict=True):
            drawn = flat[(flat >= begin) & (flat < begin + size)]
            assert len(drawn) == count
            times = np.bincount(drawn - begin, minlength=size)
            assert times.max() - times.min() <= 1
            begin += size


WEIGHTED = WeightedOrder(np.ones(8), 1).record
BUCKETED = BucketedOrder(np.arange(8.0), 4, tail="spill", seed=1).record
MIXED = MixedOrder([4, 4], [1, 1], 1).record
REFUSED = [
    (VERSION, WEIGHTED, "how they are drawn: shuffled, not weighted"),
    (
        BUCKETED,
        VERSION,
        "how they are drawn: bucketed, not shuffled",
    ),
    (
        WeightedOrder(np.arange(8.0), 1).record,
        WEIGHTED,
        "another order than the snapshot's \\(the numbers of the samples",
    ),
    (WeightedOrder(np.ones(8), 1, 9).record, WEIGHTED, "as many samples make an epoch: 9, not 8"),
    (
        BucketedOrder(np.arange(8.0), 2, tail="spill", seed=1).record,
        BUCKETED,
        "dataset.global_batch_size: 2, not 4",
    ),
    (
        BucketedOrder(np.arange(8.0), 4, tail="short", seed=1).record,
        BUCKETED,
        "dataset.tail: short, not spill",
    ),
    (MixedOrder([4, 4], [1, 2], 1).record, MIXED, "the shares of the sets: \\[1, 2\\], not \\[1, 1\\]"),
    (MixedOrder([4, 5], [1, 1], 1).record, MIXED, "how many samples the sets of the mixture have"),
    (VERSION, MIXED, "how they are drawn: shuffled, not mixed"),
    (
        WEIGHTED,
        {**WEIGHTED, "version": 9},  # type: ignore[dict-item]
        "weighted order 9 of the samples, and this version of elasticflow knows weighted order 1 only",
    ),
    (VERSION, 7, "order 7 of the samples, and this version of elasticflow knows shuffled order 1 only"),
]


@pytest.mark.parametrize(("now", "then", "message"), REFUSED)
def test_a_position_in_another_order_is_refused(now: OrderRecord, then: OrderRecord, message: str) -> None:
    """It would mean other samples: what differs is named."""
    with pytest.raises(StateError, match=message):
        require_same_order(now, then)


def test_weights_that_differ_by_a_factor_draw_alike() -> None:
    """What is declared are shares."""
    require_same_order(WEIGHTED, WeightedOrder(np.full(8, 4.0), 1).record)
    require_same_order(ShuffledOrder(8, 1).record, VERSION)
