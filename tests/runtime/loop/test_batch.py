"""Batches cut into parts: nothing is lost, and their shares add up."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticflow.errors import StateError
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.process.position import Position

END = Position(3, 48, 0, 48, is_epoch_end=False)


class Pair(NamedTuple):
    """Inputs and targets by name."""

    inputs: Tensor
    targets: Tensor


@given(rows=st.integers(1, 40), more=st.integers(0, 5), most=st.integers(1, 50), ranks=st.integers(1, 8))
def test_parts_have_every_row_once_and_the_whole_share(rows: int, more: int, most: int, ranks: int) -> None:
    """Whatever a part has at most: rows in order, samples and shares that add up to those of the whole, as many parts on each rank."""
    numbers, total = torch.arange(rows), rows * ranks + more
    batch = Batch(
        rows,
        total,
        rows * ranks / total,
        END,
        rows + more,
        {"x": numbers, "pair": (numbers * 2, [numbers * 3])},
    )

    parts = list(batch.parts(most))
    real = [part for part in parts if part.samples]

    assert len(parts) == -(-(rows + more) // most)
    assert torch.equal(torch.cat([part.data["x"] for part in real]), numbers)
    assert torch.equal(torch.cat([part.data["pair"][1][0] for part in real]), numbers * 3)
    assert sum(part.samples for part in parts) == rows
    assert all(part.samples <= most and len(part.data["x"]) for part in parts)
    assert {part.share for part in parts if not part.samples} <= {0.0}
    assert sum(part.share for part in parts) == pytest.approx(batch.share)


def test_kinds_of_batches() -> None:
    """Named pairs stay what they are; texts and numbers in lists are cut like rows; a number is everybody's."""
    data = {
        "pair": Pair(torch.ones(3), torch.zeros(3)),
        "texts": ["a", "b", "c"],
        "labels": [4, 5, 6],
        "scale": torch.tensor(2.0),
    }
    first, second = Batch(3, 3, 1.0, END, 3, data).parts(2)

    assert isinstance(first.data["pair"], Pair)
    assert (first.data["texts"], second.data["texts"]) == (["a"], ["b", "c"])
    assert (first.data["labels"], second.data["labels"]) == ([4], [5, 6])
    assert second.data["scale"] == 2.0


def test_a_rank_without_samples_counts_nothing() -> None:
    """It has rows to run the model on, in each part, and no share."""
    parts = list(Batch(0, 1, 0.0, END, 2, torch.ones(2)).parts(1))

    assert [(part.samples, part.share) for part in parts] == [(0, 0.0), (0, 0.0)]


def test_what_is_no_pair_is_said_to_be_none() -> None:
    """`inputs` and `targets` are of pairs; anything else is `data`."""
    pair = Batch(2, 2, 1.0, END, 2, [torch.zeros(2), torch.ones(2)])
    assert (pair.inputs.sum(), pair.targets.sum()) == (0, 2)
    with pytest.raises(StateError, match="a batch is a dict") as refused:
        _ = Batch(2, 2, 1.0, END, 2, {"x": torch.zeros(2)}).inputs
    assert refused.value.remedy == "use batch.data"
    with pytest.raises(StateError, match="there is none in this batch"):
        list(Batch(2, 2, 1.0, END, 2, ["a", "b"]).parts(1))
    with pytest.raises(StateError, match="a whole number of samples, from 1"):
        list(pair.parts(0))


@pytest.mark.parametrize(
    ("data", "numbers"),
    [
        ((torch.zeros(4, 3), torch.ones(6)), "4 and 6"),
        ([torch.arange(7), torch.arange(5)], "5 and 7"),
        ({"x": torch.zeros(4), "names": ["cat", "dog"]}, "2 and 4"),
    ],
    ids=["weights of classes", "sequences in a list", "names of classes"],
)
def test_what_has_no_row_per_sample_is_not_cut(data: object, numbers: str) -> None:
    """Rows of one tensor would be no samples' rows of another: parts that learn from something else, without a word."""
    with pytest.raises(StateError, match=f"tensors or texts of {numbers} rows"):
        list(Batch(4, 4, 1.0, END, 4, data).parts(2))
