"""Batches of similar length: each sample once per epoch, less padding, no length left out more often than another."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.runtime.data.order import bucketed
from elasticflow.runtime.data.order.bucketed import BucketedOrder
from elasticflow.runtime.data.order.order import ShuffledOrder

TAILS = st.sampled_from(["spill", "short", "drop"])


def lengths_of(samples: int, seed: int = 0) -> np.ndarray:
    """Return lengths as those of texts are: most short, a few long."""
    return np.random.default_rng(seed).lognormal(5, 0.8, samples).astype(np.int64).astype(np.float64)


def padding(order: BucketedOrder | ShuffledOrder, lengths: np.ndarray, batch: int) -> float:
    """Return the share of an epoch's padded batches that is padding."""
    found = lengths[order.indices(np.arange(len(lengths)))]
    batches = [found[begin : begin + batch] for begin in range(0, len(found), batch)]
    return 1 - float(found.sum() / sum(each.max() * len(each) for each in batches))


def test_order_is_the_same_for_ever() -> None:
    """Golden values: a position in a snapshot means these samples on every machine and in every version."""
    order = BucketedOrder(np.array([5.0, 1, 9, 3, 7, 2, 8, 4, 6, 10, 11, 12]), 2, tail="short", seed=7)
    assert order.indices(np.arange(24)).tolist() == GOLDEN


GOLDEN = [3, 5, 2, 4, 7, 0, 9, 6, 8, 1, 11, 10, 3, 1, 4, 2, 9, 11, 6, 10, 7, 5, 0, 8]


@given(
    samples=st.integers(1, 300),
    batch=st.integers(1, 40),
    tail=TAILS,
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
def test_each_sample_once_per_epoch(
    samples: int, batch: int, tail: str, seed: int, data: st.DataObject
) -> None:
    """And the sample at a place follows from the place, whatever is asked for with it."""
    lengths = np.random.default_rng(seed).integers(0, 1 + samples // 3, samples).astype(np.float64)
    order = BucketedOrder(lengths, batch, tail=tail, seed=seed)
    whole = order.indices(np.arange(3 * samples))
    assert [sorted(epoch) for epoch in whole.reshape(3, samples).tolist()] == [list(range(samples))] * 3
    places = np.array(
        sorted(data.draw(st.sets(st.integers(0, 3 * samples - 1), max_size=50))), dtype=np.int64
    )
    assert order.indices(places).tolist() == whole[places].tolist()


@pytest.mark.parametrize(
    ("tail", "epoch"), [("short", 0), ("short", 1), ("spill", 0), ("spill", 1), ("spill", 2)]
)
def test_batches_are_of_like_length_in_every_epoch(tail: str, epoch: int) -> None:
    """Where batches continue over an epoch's end, those of the next one begin later: they are cut there."""
    samples, batch = 5_003, 16
    lengths = lengths_of(samples)
    order = BucketedOrder(lengths, batch, tail=tail, seed=3)
    begin = epoch * samples + (-epoch * samples % batch if tail == "spill" else 0)
    found = lengths[order.indices(np.arange(begin, begin + 300 * batch))].reshape(300, batch)
    spread = np.median(found.max(axis=1) - found.min(axis=1))
    assert spread < 0.1 * np.ptp(lengths)
    mixed = lengths[ShuffledOrder(samples, 3).indices(np.arange(300 * batch))].reshape(300, batch)
    assert spread < 0.1 * np.median(mixed.max(axis=1) - mixed.min(axis=1))


def test_padding_goes_down() -> None:
    """From three quarters to a tenth for lengths as those of texts."""
    lengths = lengths_of(50_000)
    plain = padding(ShuffledOrder(50_000, 1), lengths, 32)
    like = padding(BucketedOrder(lengths, 32, tail="short", seed=1), lengths, 32)
    assert plain > 0.7
    assert like < 0.12


def test_epochs_have_other_batches_in_another_order() -> None:
    """Neither the samples of a batch nor the batches' lengths stay from epoch to epoch."""
    lengths = np.arange(2_000.0)
    order = BucketedOrder(lengths, 10, tail="short", seed=1)
    first, second = order.indices(np.arange(4_000)).reshape(2, 200, 10)
    batches = [{tuple(sorted(batch)) for batch in epoch.tolist()} for epoch in (first, second)]
    assert len(batches[0] & batches[1]) < 10
    means = lengths[first].mean(axis=1)
    assert abs(float(np.corrcoef(means[:-1], means[1:])[0, 1])) < 0.25
    within = lengths[first] - lengths[first].mean(axis=1, keepdims=True)
    assert abs(float(np.corrcoef(within.reshape(-1), np.tile(np.arange(10), 200))[0, 1])) < 0.1


def test_samples_of_one_length_are_shuffled_as_ever() -> None:
    """Windows of equal lengths hold what the plain shuffle puts there: no neighbours in the data stay together."""
    order = BucketedOrder(np.full(4_000, 8.0), 20, tail="short", seed=1)
    found = order.indices(np.arange(4_000)).reshape(200, 20)
    spread = (found.max(axis=1) - found.min(axis=1)).mean()
    assert spread > 3_000


def test_what_is_dropped_is_drawn_from_all_lengths() -> None:
    """With tail = "drop" the epoch leaves out samples at random, not the longest ones."""
    lengths = np.arange(103.0)
    order = BucketedOrder(lengths, 20, tail="drop", seed=1)
    dropped = [order.indices(np.arange(epoch * 103 + 100, epoch * 103 + 103)) for epoch in range(300)]
    assert abs(float(np.concatenate(dropped).mean()) - 51) < 4


def test_small_data_makes_as_many_windows_as_it_can() -> None:
    """A set of less than two batches is shuffled; one of some batches still saves padding."""
    lengths = lengths_of(1_000)
    plain, like = (
        padding(order, lengths, 64)
        for order in (ShuffledOrder(1_000, 1), BucketedOrder(lengths, 64, tail="short", seed=1))
    )
    assert like < 0.8 * plain
    tiny = BucketedOrder(lengths[:20], 64, tail="short", seed=1).indices(np.arange(20))
    assert tiny.tolist() == ShuffledOrder(20, 1).indices(np.arange(20)).tolist()


def test_lengths_are_kept_in_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two bytes for lengths below 65,536, and no more than a window besides; large batches make small windows."""
    lengths = np.full(1_000_000, 4_096.0)
    tracemalloc.start()
    order = BucketedOrder(lengths, 256, tail="spill", seed=1)
    order.indices(np.arange(1_000_000, 1_000_256))
    stays, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert stays < 2_000_000 + 1_000_000
    monkeypatch.setattr(bucketed, "_SAMPLES_OF_WINDOW", 512)
    assert order._layout(0).windows == 1_953  # of two batches each


@pytest.mark.parametrize("scale", [1.0, 0.5, 1e10, -1.0])
def test_any_numbers_are_lengths(scale: float) -> None:
    """Fractions, large ones; only their order counts."""
    lengths = np.random.default_rng(0).permutation(600).astype(np.float64) * scale
    order = BucketedOrder(lengths, 4, tail="short", seed=1)
    found = lengths[order.indices(np.arange(600))].reshape(150, 4)
    assert np.ptp(found, axis=1).mean() < 30 * abs(scale)


def test_what_is_saved_is_told() -> None:
    """In words, for --deep."""
    text = BucketedOrder(lengths_of(5_000), 16, tail="short", seed=1).in_words()
    assert text.startswith("of what a batch of 16 holds when it is padded to its longest sample, ")
    assert text.endswith("% in a plain shuffle")
