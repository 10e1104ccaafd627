"""Values of the training data that the job is made with: looked up, the same on every rank, and kept by snapshots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from elasticflow.errors import DatasetError, JobKeyError
from elasticflow.runtime.data import dataset, index_loader


class Tokenizer:
    """Knows its size."""

    size = 7

    def pad(self) -> int:
        """Return what is no attribute."""
        return 0


class Text(list[int]):
    """Samples, and what they are made of."""

    def __init__(self) -> None:
        super().__init__(range(20))
        self.vocab_size = np.int64(65)
        self.mean, self.std = torch.tensor(0.5), np.array([0.25, 0.5])
        self.names, self.tokenizer = ("a", "b"), Tokenizer()

    @property
    def broken(self) -> int:
        """Raise an error of its own."""
        return self.tokenizer.nothing  # type: ignore[attr-defined, no-any-return]


def test_attributes_become_plain_values() -> None:
    """Numbers of numpy and torch as Python's; attributes of attributes by dots."""
    names = ("vocab_size", "mean", "std", "names", "tokenizer.size")
    found = dataset.values_of(Text(), dict.fromkeys(names, "model.args.x"))
    assert found == {
        "vocab_size": 65,
        "mean": 0.5,
        "std": [0.25, 0.5],
        "names": ["a", "b"],
        "tokenizer.size": 7,
    }
    assert [type(value) for value in found.values()] == [int, float, list, list, int]


REFUSED = [
    ("vocab", "the Text that dataset.entry returned has no `vocab`", "names, std, tokenizer, vocab_size"),
    ("tokenizer.pad_id", "the Tokenizer that dataset.tokenizer is has no `pad_id`", "size"),
    ("tokenizer.pad", "which is a method", "a property that returns"),
    ("tokenizer", "which is a Tokenizer: it cannot be written down", "make it a number"),
]


@pytest.mark.parametrize(("name", "message", "remedy"), REFUSED)
def test_what_is_not_there_or_no_value_is_told_at_its_key(name: str, message: str, remedy: str) -> None:
    """With the attributes that there are."""
    with pytest.raises(JobKeyError) as told:
        dataset.values_of(Text(), {name: "model.args.config.args.x"})
    assert told.value.key == "model.args.config.args.x"
    assert told.value.message.startswith(f"model.args.config.args.x is ${{dataset.{name}}}")
    assert message in told.value.message
    assert remedy in (told.value.remedy or "")


def test_an_error_of_the_datas_own_is_its_own() -> None:
    """It is not told as an attribute that is missing."""
    with pytest.raises(AttributeError, match="nothing"):
        dataset.values_of(Text(), {"broken": "model.args.x"})


def test_long_lists_and_infinities_are_no_values() -> None:
    """They would stand in every record, or in none."""
    for value in ([0] * 1001, float("inf"), [[1]]):
        data = Text()
        data.vocab_size = value  # type: ignore[assignment]
        with pytest.raises(JobKeyError):
            dataset.values_of(data, {"vocab_size": "model.args.x"})


def test_an_opened_dataset_has_its_values_and_tells_them(me: Any) -> None:
    """In the event, and beside the fingerprint."""
    opened = index_loader.open_dataset(me, Text, "train", values={"vocab_size": "model.args.x"})
    assert opened.values == {"vocab_size": 65}
    assert me.events[0]["values"] == {"vocab_size": 65}
    assert dataset.marks_of(opened.values) == {"dataset.vocab_size": "65"}


def test_ranks_with_other_values_are_refused(me: Any) -> None:
    """The value and the rank are named."""
    me.gather_text = lambda text: [text, text.replace("65", "66")]
    with pytest.raises(DatasetError, match="vocab_size} is 66 on rank 1, and 65 on rank 0"):
        index_loader.open_dataset(me, Text, "train", values={"vocab_size": "model.args.x"})


def test_a_snapshot_of_other_values_is_not_gone_on_from() -> None:
    """Whatever the fingerprint says; a value that the job did not name then, or does not now, says nothing."""
    marks = {"train": "a", "dataset.vocab_size": "66"}
    dataset.require_same(marks, {"train": "a"}, 20, 20)
    dataset.require_same({"train": "a"}, marks, 20, 20)
    with pytest.raises(DatasetError, match="is 66, and was 65 when the snapshot was taken"):
        dataset.require_same(marks, {"train": "a", "dataset.vocab_size": "65"}, 20, 20)
