"""Weights, classes and lengths of the samples: where they come from, the same on every rank, or refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from elasticflow.errors import DatasetError, JobKeyError
from elasticflow.runtime.data import samplers
from elasticflow.runtime.data.index_loader import IndexLoader
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.data.samplers import class_weights_of, lengths_of, weights_of

if TYPE_CHECKING:
    from elasticflow.runtime.data.samplers import ValuesSource


class Tokens(list[int]):
    """Samples with columns as attributes."""

    def __init__(self, length: int = 6) -> None:
        super().__init__(range(length))
        self.weights = torch.arange(length)
        self.lengths = [n % 3 for n in self]
        self.targets = ["dog" if n else "cat" for n in self]
        self.table = {"odd": 1}
        self.ragged = [[1], [1, 2], [], [], [], []]
        self.objects = [object()] * length
        self.negative = [0, 1, -1, float("nan"), 1, 1]

    def sizes(self) -> list[int]:
        """Return what a method gives."""
        return [7] * len(self)


def doubled(dataset: Tokens) -> list[int]:
    """Return weights."""
    return [2 * sample for sample in dataset]


def too_few(dataset: Tokens) -> list[int]:
    """Return weights of all but one."""
    return list(dataset[1:])


def test_numbers_come_from_attributes_functions_and_methods() -> None:
    """As tensors, arrays or lists."""
    data = Tokens()
    assert weights_of(data, "weights").tolist() == [0, 1, 2, 3, 4, 5]
    assert weights_of(data, doubled).tolist() == [0, 2, 4, 6, 8, 10]
    assert lengths_of(data, "lengths").tolist() == [0, 1, 2, 0, 1, 2]
    assert lengths_of(data, "sizes").tolist() == [7] * 6


def test_a_part_of_a_dataset_has_its_part_of_the_numbers() -> None:
    """Of random_split, and of several sets in one."""
    part: Subset[int] = Subset(Tokens(), [5, 1])  # type: ignore[arg-type]  # torch takes any with these methods
    assert weights_of(part, "weights").tolist() == [5, 1]
    both: ConcatDataset[int] = ConcatDataset([part, Subset(part, [1])])
    assert weights_of(both, "weights").tolist() == [5, 1, 1]


@pytest.mark.parametrize("whole", [lambda data: Subset(data, [1, 2]), lambda data: ConcatDataset([data])])
def test_numbers_of_other_samples_than_the_parts_are_refused(whole: Any) -> None:
    """A column that is longer than its dataset would give some samples the numbers of others."""
    data = Tokens()
    data.weights = torch.arange(8)
    with pytest.raises(JobKeyError) as refused:
        weights_of(whole(data), "weights")
    assert refused.value.message == (
        f"dataset.sampler.weights: `weights` of the {__name__}.Tokens inside of the dataset gives 8 values for 6 samples"
    )


def test_numbers_may_be_of_half_precision() -> None:
    """As a model gives them; numpy has no bfloat16."""
    data = Tokens()
    for dtype in (torch.float16, torch.bfloat16):
        data.weights = torch.arange(6, dtype=dtype)
        assert weights_of(data, "weights").tolist() == [0, 1, 2, 3, 4, 5]


def test_columns_of_hugging_face_datasets_are_read_as_they_are() -> None:
    """Also where samples are chosen, and where a transform hides the columns."""
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a", "bb", "c"], "label": [0, 1, 1], "n": [1, 2, 1]})
    chosen = data.select([2, 0]).with_transform(lambda rows: {"x": rows["text"]})
    assert lengths_of(data, "n").tolist() == [1, 2, 1]
    assert class_weights_of(chosen, "label").tolist() == [1, 1]
    with pytest.raises(JobKeyError) as refused:
        weights_of(data, "m")
    assert refused.value.remedy == (
        "its columns: text, label, n; or name a function of your own, which gets the dataset"
    )


@pytest.mark.parametrize("kind", [np.int64, np.float64, str, bool])
def test_classes_are_balanced(kind: type) -> None:
    """Each class has the same weight in all, whatever a class is called."""
    labels: Any = np.array([0, 1, 1, 1, 0, 1]).astype(kind)
    weights = class_weights_of(range(6), lambda _: labels)
    assert weights[labels == labels[0]].sum() == pytest.approx(weights[labels == labels[1]].sum())
    assert len(set(weights)) == 2


REFUSED: list[tuple[str, ValuesSource, str, str]] = [
    ("weights", "weight", "the test_samplers.Tokens has no column and no attribute `weight`", "its attributes: lengths"),
    ("weights", too_few, "test_samplers:too_few gives 5 values for 6 samples", "it is called once, with the dataset"),
    ("weights", "table", "`table` of the dataset gives a dict for 6 samples", "a number from 0 on"),
    ("weights", "ragged", "`ragged` of the dataset gives a list for 6 samples", "a number from 0 on"),
    ("weights", "objects", "values that are neither numbers nor texts", "a number from 0 on"),
    ("weights", "targets", "gives no numbers, but <U3 (sample 0: a str)", "a number from 0 on"),
    ("weights", "negative", "gives sample 2 the number -1.0, and 1 more are such", "it must be finite, and 0 or more"),
    ("weights", lambda _: [0] * 6, "gives every sample the weight 0", "none would ever be drawn"),
    ("bucket_by", lambda _: 7, "gives a int for 6 samples", "[len(tokens) for tokens in dataset.texts]"),
    ("balance_by", "objects", "values that are neither numbers nor texts", "the class of each sample"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "source", "message", "remedy"), REFUSED)
def test_what_gives_no_numbers_is_refused(key: str, source: ValuesSource, message: str, remedy: str) -> None:
    """With its key, what it gave, and what it should."""
    read = {"weights": weights_of, "balance_by": class_weights_of, "bucket_by": lengths_of}[key]
    with pytest.raises(JobKeyError) as refused:
        read(Tokens(), source)
    assert refused.value.key == f"dataset.sampler.{key}"
    assert refused.value.message.startswith(f"dataset.sampler.{key}: ")
    assert message.replace("test_samplers", Tokens.__module__) in refused.value.message
    assert remedy in (refused.value.remedy or "")


def test_an_order_is_told_and_the_same_on_every_rank(me: Any) -> None:
    """Rank 0 says what is drawn; a rank with other weights is named."""
    order = samplers.draw_by_weight(me, Tokens(), "weights", draws=10)
    (line,) = me.events
    assert (line["event"], line["kind"], line["samples"]) == ("order.declared", "weighted", 10)
    assert order.record["numbers"] == line["facts"]["numbers"]  # type: ignore[index]
    me.gather_text = lambda text: [text, "other"]
    with pytest.raises(
        DatasetError, match="rank 1 would read the samples in another order than rank 0: other"
    ):
        samplers.bucket_by_length(me, Tokens(), "lengths", 2, tail="short")


def test_weights_that_are_drawn_are_the_same_at_each_start(me: Any) -> None:
    """A function may draw: it begins in a state that follows from the seed."""
    records = [samplers.draw_by_weight(me, Tokens(), lambda _: torch.rand(6)).record for _ in range(2)]
    assert records[0] == records[1]


class Augmented(TensorDataset):
    """Draws for each sample."""

    def __getitem__(self, index: int) -> Any:
        return index, float(torch.rand(()))


def test_a_sample_drawn_twice_is_augmented_otherwise_and_alike_anywhere(me: Any) -> None:
    """Its random stream follows from its place, at any micro-batch size."""
    data = Augmented(torch.zeros(3))
    order = samplers.draw_by_class(me, data, lambda _: [0, 1, 2], draws=30)
    schedule = IndexSchedule(len(order), 10, epochs=1, order=order)
    read = []
    for micro in (None, 3):
        loader = IndexLoader(me, data, schedule, micro, collate=list)
        batches = [list(batch.micro_batches) for batch in loader.batches(schedule.start)]
        read.append([sample for batch in batches for samples, _ in batch for sample in samples])
    assert read[0] == read[1]
    assert len({drawn for _, drawn in read[0]}) == 30
