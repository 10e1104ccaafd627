"""The random state in which the job's factories begin: of the seed and the factory, never of what ran before."""

# ruff: noqa: NPY002  # the global generator is what factories draw from
from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Subset, TensorDataset, random_split

from elasticflow.errors import StateError
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.shard_reader import ShardReader
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.snapshot.metadata import StateRecord

FACTORIES = ("data", "model", "optimizer", "scheduler")

Drawn = tuple[float, float, float]


def draws() -> Drawn:
    """Return a number of each generator."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def drawn_by(factory: str, seed: int = 7) -> Drawn:
    """Return what a factory draws first."""
    random_streams.begin(seed, factory)
    return draws()


@given(
    order=st.lists(st.sampled_from(FACTORIES), max_size=8),
    number=st.integers(0, 3),
    seed=st.integers(0, 2**63 - 1),
)
def test_what_a_factory_draws_depends_on_seed_and_factory_alone(
    order: list[str], number: int, seed: int
) -> None:
    """Whatever was called before it, in whatever order, and however much that drew."""
    alone = {factory: drawn_by(factory, seed) for factory in FACTORIES}
    for factory in order:
        assert drawn_by(factory, seed) == alone[factory]
        for _ in range(number):
            draws()
    assert len(set(alone.values())) == len(FACTORIES)
    assert drawn_by("data", seed ^ 1) != alone["data"]


def test_the_model_begins_as_after_manual_seed() -> None:
    """Initial weights are those of `torch.manual_seed(seed)`, as they have been in every version."""
    random_streams.begin(7, "model")
    ours = nn.Linear(3, 3).weight
    torch.manual_seed(7)
    assert ours.equal(nn.Linear(3, 3).weight)


def test_a_teacher_that_makes_the_data_is_not_the_models_twin() -> None:
    """A network built by the dataset's factory has other weights than the same network built as the model."""
    random_streams.begin(7, "data")
    teacher = nn.Linear(3, 3)
    random_streams.begin(7, "model")
    assert not teacher.weight.equal(nn.Linear(3, 3).weight)


def test_two_splits_by_one_permutation_share_no_sample(me: Any) -> None:
    """`random_split` without a generator, called for training and evaluation, whatever is built in between."""

    def split(part: int) -> Subset[Any]:
        random_streams.begin(me.seed, "data")
        full = TensorDataset(torch.arange(60.0))
        return random_split(full, [40, 20])[part]

    train = index_loader.open_dataset(me, lambda: split(0), "train")
    nn.Linear(30, 30)
    test = index_loader.open_dataset(me, lambda: split(1), "evaluation")
    assert sorted([*train.content.indices, *test.content.indices]) == list(range(60))
    assert not any(hasattr(data.content, "fingerprint") for data in (train, test))


def test_rules_that_this_version_does_not_know_are_refused() -> None:
    """A snapshot of other rules would give the model and the samples other draws."""
    for version in (None, random_streams.VERSION - 1, random_streams.VERSION + 1):
        with pytest.raises(StateError, match=f"follow rules {version}"):
            StateRecord.from_json({"random": version})


class Files:
    """A data shard of every n-th file after a shuffle: when it is made, or when it is read."""

    def __init__(self, shard: int, shards: int, *, when: str) -> None:
        self.files, self.part = list(range(12)), slice(shard, None, shards)
        self.is_late = when == "read"
        if not self.is_late:
            random.shuffle(self.files)

    def __iter__(self) -> Any:
        if self.is_late:
            random.shuffle(self.files)
        for file in self.files[self.part]:
            yield file, random.random()


@pytest.mark.parametrize("when", ["made", "read"])
def test_shards_of_shuffled_files_share_no_file(when: str) -> None:
    """Each file is in one shard in each epoch, in another order in the next; resuming within one changes nothing."""

    def read(epoch: int, cursor: int = 0) -> dict[int, list[Any]]:
        def build(shard: int, shards: int) -> Files:
            return Files(shard, shards, when=when)

        found: dict[int, list[Any]] = {}
        reader = ShardReader(build, 3, seed=5, size=2, epochs=epoch + 1)
        for chunk in reader.chunks(range(3), epoch, [cursor] * 3):
            found.setdefault(chunk.shard, []).extend(chunk.samples)
        return found

    first, second = read(0), read(1)
    for epoch in (first, second):
        assert sorted(file for shard in epoch.values() for file, _ in shard) == list(range(12))
    assert first != second
    assert read(0, cursor=3) == {shard: samples[3:] for shard, samples in first.items()}
    assert len({draw for shard in first.values() for _, draw in shard[1:]}) == 9
