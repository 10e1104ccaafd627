"""Several sets as one, and their shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from elasticflow.errors import DatasetError
from elasticflow.runtime.data import samplers
from elasticflow.runtime.data.dataset import values_of
from elasticflow.runtime.data.index_loader import IndexLoader, open_dataset
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.data.mixture import MixedDataset, in_words, shares_of
from elasticflow.runtime.data.order.mixed import MOST_SHARE
from elasticflow.runtime.data.sample_reader import SampleReader
from elasticflow.runtime.process.random_streams import Generators


class Words(list[str]):
    """Samples with a vocabulary."""

    def __init__(self, letters: str, size: int = 7) -> None:
        super().__init__(letters)
        self.vocab_size, self.table = size, np.arange(3)


class Many(Words):
    """Reads many at once, and notes which."""

    asked: list[list[int]]

    def __getitems__(self, indices: list[int]) -> list[str]:
        self.asked = [*getattr(self, "asked", []), indices]
        return [self[index] for index in indices]


def test_samples_are_those_of_the_sets() -> None:
    """One set after another."""
    mixed = MixedDataset(Words("abc"), Words("de"))
    assert (len(mixed), [mixed[index] for index in range(5)]) == (5, list("abcde"))
    assert [mixed.origin_in_mixture(index) for index in (0, 2, 3, 4)] == [(0, 0), (0, 2), (1, 0), (1, 1)]


def test_a_set_that_reads_many_at_once_is_asked_so() -> None:
    """In the order wanted, also where a sample is wanted twice."""
    many = Many("abc")
    assert MixedDataset(Words("xy"), many).__getitems__([4, 0, 2, 4, 1]) == ["c", "x", "a", "c", "y"]
    assert many.asked == [[2, 0, 2]]


def test_what_all_sets_have_the_mixture_has() -> None:
    """With one value; else it is refused by name, as arrays are, which cannot be told apart."""
    assert MixedDataset(Words("ab"), Words("c")).vocab_size == 7
    with pytest.raises(DatasetError, match="`vocab_size` of the mixture is 7 in set 0 and 8 in set 1"):
        _ = MixedDataset(Words("ab"), Words("c", 8)).vocab_size
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = MixedDataset(Words("ab"), Words("c")).other
    with pytest.raises(DatasetError, match="`table` of the mixture"):
        _ = MixedDataset(Words("ab"), Words("c")).table
    assert getattr(MixedDataset(Words("ab"), Words("c", 8)), "vocab_size", None) is None
    with pytest.raises(DatasetError, match="`vocab_size` of the mixture is 7"):
        values_of(MixedDataset(Words("ab"), Words("c", 8)), {"vocab_size": "model.args.vocab_size"})
    assert values_of(MixedDataset(Words("ab"), Words("c")), {"vocab_size": "x"}) == {"vocab_size": 7}


class Broken(Words):
    """Fails at its second sample, once it is told to."""

    is_broken = False

    def __getitem__(self, index: Any) -> Any:
        return {0: "x"}[index] if self.is_broken else "x"


def test_a_sample_that_cannot_be_read_is_named_by_its_set() -> None:
    """Its number in the set, and which set that is."""
    broken = Broken("xyz")
    reader = SampleReader(
        MixedDataset(Words("ab"), broken), list, 1, generators=Generators(1, torch.device("cpu"))
    )
    broken.is_broken = True
    with pytest.raises(KeyError) as raised:
        reader.read(0, [0, 3])
    assert f"while reading sample 1 of {Broken.__module__}.Broken (dataset.mix[1])" in raised.value.__notes__


def test_the_fingerprint_is_of_every_set() -> None:
    """Other content of any, or another order of them, is other data."""
    marks = {
        MixedDataset(Words(first), Words(second)).fingerprint
        for first, second in (("ab", "cd"), ("cd", "ab"), ("ab", "ce"), ("abc", "d"))
    }
    assert len(marks) == 4


def test_a_set_that_cannot_be_read_is_named() -> None:
    """By its place in the job file."""
    with pytest.raises(DatasetError, match=r"dataset\.mix\[1\]\.entry returned a int"):
        MixedDataset(Words("a"), 7)
    with pytest.raises(DatasetError, match=r"dataset\.mix\[0\]\.entry returned a Words without samples"):
        MixedDataset(Words(""), Words("a"))


def test_weights_are_the_decimals_that_are_written() -> None:
    """0.7 is seven tenths, and one weight more or less leaves the others' ratio."""
    assert shares_of([5, 5], [0.7, 0.3]) == [7, 3]
    assert shares_of([5, 5, 5], [2, 0.5, 1]) == [4, 1, 2]
    assert shares_of([10, 30]) == [1, 3]
    assert shares_of([10, 30], temperature=1.0) == [1, 3]


@given(sizes=st.lists(st.integers(1, 10**9), min_size=1, max_size=9), temperature=st.floats(0.05, 1000))
def test_temperature_flattens_shares(sizes: list[int], temperature: float) -> None:
    """Each share is the size to the power of 1 / temperature."""
    shares = np.array(shares_of(sizes, temperature=temperature), dtype=float)
    powers = (np.array(sizes) / max(sizes)) ** (1 / temperature)
    if temperature != 1.0:
        np.testing.assert_allclose(shares / shares.max(), powers, atol=2e-9, rtol=1e-6)


@given(weights=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=9))
def test_any_weights_fit(weights: list[float]) -> None:
    """Whatever their decimals: small enough whole numbers, none of them nought, in the right ratio."""
    shares = shares_of([1] * len(weights), weights)
    assert all(share >= 1 for share in shares)
    assert sum(shares) <= MOST_SHARE
    ratios = np.array(shares) / sum(shares) - np.array(weights) / sum(weights)
    assert np.abs(ratios).max() < 1e-12


def test_a_mixture_is_opened_and_read(me: Any) -> None:
    """Through the loader, at two micro-batch sizes: rank 0 tells its sets, and the shares are kept."""
    data = open_dataset(
        me, lambda: MixedDataset(TensorDataset(torch.zeros(30)), TensorDataset(torch.ones(10))), "train"
    )
    order = samplers.mix(me, data, weights=[1, 3])
    assert me.events[-1]["facts"] == {"sets": [30, 10], "shares": [1, 3]}
    schedule = IndexSchedule(len(order), 8, epochs=2, order=order)
    read = []
    for micro in (None, 3):
        batches = IndexLoader(me, data, schedule, micro).batches(schedule.start)
        read.append(torch.cat([part[0] for batch in batches for part, _ in batch.micro_batches]))
    assert torch.equal(*read)
    assert float(read[0].mean()) == 0.75


def test_what_is_drawn_is_told() -> None:
    """In words, for --deep."""
    assert in_words([30, 10], [1, 1]) == (
        "an epoch of the mixture has 40 samples: 50.0% of dataset.mix[0] (30 samples, each 0.667 times), "
        "50.0% of dataset.mix[1] (10 samples, each 2 times)"
    )
