"""Fingerprints of data, and samples that are not the same when they are read again."""

# ruff: noqa: NPY002  # the global generator is what datasets draw from
from __future__ import annotations

import datetime as dt
import random
import time
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from elasticflow.errors import DatasetError
from elasticflow.protocol.json_codec import to_json
from elasticflow.runtime.data import index_loader
from elasticflow.runtime.data.dataset import require_same
from elasticflow.runtime.data.fingerprint import fingerprint_of, look_at
from elasticflow.runtime.data.mixture import MixedDataset


class Rows:
    """Samples made by a function of their number."""

    def __init__(self, make: Any, length: int = 20) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Pair(NamedTuple):
    """A sample."""

    x: Any
    y: Any


@dataclass
class Picture:
    """A sample as a dataclass."""

    pixels: Any
    label: int = 0


RECORDED: dict[str, tuple[Any, str]] = {
    "tensors": (Rows(lambda i: (torch.full((3,), float(i)), i)), "393309ae38ac8421"),
    "bfloat16": (Rows(lambda i: torch.full((3,), float(i)).bfloat16()), "76c9b16055a6e68c"),
    "arrays": (Rows(lambda i: {"x": np.full(2, i), "y": [i, "text", None, 2.5]}), "a541812d8ed2b20d"),
    "named tuples": (Rows(lambda i: Pair(torch.tensor(i), b"ab")), "e5d858c7b3125592"),
    "drawn": (Rows(lambda i: (torch.rand(2), np.random.rand(), i)), "95508f9a9c4de473"),
    "dates": (
        Rows(lambda i: (dt.date(2024, 1, 1 + i), Decimal(i), np.float32(i), True)),
        "4aa604e646e3cd21",
    ),
    "list": ([(i, "a") for i in range(300)], "f6b0cf25ef0aed93"),
    "columns": (TensorDataset(torch.arange(20.0), torch.arange(20)), "a0b053dfdba3bd19"),
    "array": (np.arange(30.0).reshape(10, 3), "e79f35cb5420d4bc"),
    "texts as objects": (np.array([["a", "b"], ["c", "d"]], dtype=object), "4ba347ddb35e9799"),
}


@pytest.mark.parametrize(("data", "recorded"), RECORDED.values(), ids=list(RECORDED))
def test_fingerprints_of_plain_samples_stay(data: Any, recorded: str) -> None:
    """Snapshots hold them: another rule would refuse each run that resumes."""
    assert fingerprint_of(data) == recorded


def test_sparse_columns_are_read_sample_by_sample() -> None:
    """Many rows at once cannot be taken out of them."""
    columns = [torch.eye(3).mul(number).to_sparse() for number in (1, 1, 2)]
    one, same, other = (fingerprint_of(TensorDataset(column, torch.arange(3))) for column in columns)
    assert one == same != other
    assert fingerprint_of(columns[0]) != fingerprint_of(columns[2])


def test_objects_are_told_apart_by_what_they_hold() -> None:
    """A run does not resume on samples whose objects hold other values."""
    one, other = (fingerprint_of(Rows(lambda i, by=by: Picture(i + by))) for by in (0, 100))
    require_same({"train": one}, {"train": one}, 20, 20)
    with pytest.raises(DatasetError):
        require_same({"train": other}, {"train": one}, 20, 20)


class Noisy(Rows):
    """Draws from a generator of its own."""

    fingerprint: str

    def __init__(self, rng: Any, make: Any) -> None:
        super().__init__(make)
        self.rng = rng

    def __getitem__(self, index: int) -> Any:
        return self.make(index, self.rng)


def _cached(drawn: dict[int, Any], index: int, rng: Any) -> Any:
    return drawn.setdefault(index, rng.random())


def _once_more(index: int, _: Any, held: list[int] = []) -> int:  # noqa: B006  # of all calls
    if not held:
        held.append(index)
        return index
    return held.pop()


VARYING: dict[str, tuple[Any, Any]] = {
    "numpy": (np.random.default_rng(0), lambda i, rng: (i, rng.random())),
    "python": (random.Random(0), lambda i, rng: {"x": i, "noise": rng.random()}),
    "torch": (torch.Generator(), lambda i, rng: (i, torch.rand(2, generator=rng))),
    "an object": (np.random.default_rng(0), lambda i, rng: Picture(rng.random(), i)),
    "the sample before once more": (None, _once_more),
    "the time": (None, lambda i, _: {"x": i, "read": time.perf_counter_ns()}),
}


@pytest.mark.parametrize(("rng", "make"), VARYING.values(), ids=list(VARYING))
@pytest.mark.parametrize("has_fingerprint", [False, True])
def test_a_sample_that_varies_is_refused_in_exact_mode_and_told_in_batch_mode(
    me: Any, rng: Any, make: Any, *, has_fingerprint: bool
) -> None:
    """A fingerprint of its own does not excuse it; the message names sample, class and generator."""
    data = Noisy(rng, make)
    if has_fingerprint:
        data.fingerprint = "v1"
    opened = index_loader.open_dataset(me, lambda: data, "train")
    (told,) = [event for event in me.events if event["event"] == "dataset.varies"]
    assert (told["sample"], told["type"], told["level"]) == (0, f"{__name__}.Noisy", "warning")
    assert told["generators"] == (["dataset.rng"] if rng is not None else [])
    assert opened.fingerprint == index_loader.open_dataset(me, lambda: data, "train").fingerprint
    me.is_exact = True
    for name in ("train", "evaluation"):
        with pytest.raises(DatasetError) as refused:
            index_loader.open_dataset(me, lambda: data, name)
        assert f"sample 0 of `{name}`, a {__name__}.Noisy, is not the same when it is read twice" in str(
            refused.value
        )
        assert ("dataset.rng" in (refused.value.remedy or "")) == (rng is not None)


def test_plain_values_beside_objects_that_vary_still_count(me: Any) -> None:
    """Labels beside augmented pictures: other labels are other data, on a rank that saw no difference as well."""

    def noisy(by: int) -> Noisy:
        return Noisy(np.random.default_rng(0), lambda i, rng: (Picture(rng.random()), i + by))

    one, again, other = (fingerprint_of(noisy(by)) for by in (0, 0, 1))
    assert one == again != other
    seen = look_at(noisy(0)).varying
    assert seen is not None
    assert not seen.is_plain
    still = look_at(Rows(lambda i: (Picture(i), i)))
    assert still.fingerprint([seen]) == one != still.fingerprint()
    me.gather_text = lambda text: [text, text or to_json(seen)]
    assert index_loader.open_dataset(me, lambda: Rows(lambda i: (Picture(i), i)), "train").fingerprint == one


def test_what_differs_in_a_sample_is_named() -> None:
    """Its key, or its place."""
    looks = [look_at(Noisy(*VARYING[kind])) for kind in ("numpy", "python", "the time")]
    assert [look.varying and look.varying.parts for look in looks] == [
        ("[1]: float",),
        ("['noise']: float",),
        ("['read']: int",),
    ]


def test_what_is_evaluated_once_training_has_begun_is_told(me: Any) -> None:
    """The steps made until then are not thrown away."""
    me.is_exact, me.started_at = True, object()
    index_loader.open_dataset(me, lambda: Noisy(*VARYING["numpy"]), "evaluation", given_to="run.evaluate")
    assert "dataset.varies" in [event["event"] for event in me.events]
    with pytest.raises(DatasetError):
        index_loader.open_dataset(me, lambda: Noisy(*VARYING["numpy"]), "train", given_to="run.batches")


def test_one_rank_that_sees_it_is_enough(me: Any) -> None:
    """All ranks refuse, and in batch mode all have one fingerprint, whoever happened to see a difference."""
    still = Rows(lambda i: i)
    seen = look_at(Noisy(np.random.default_rng(0), lambda _, rng: rng.random())).varying
    assert seen is not None
    me.gather_text = lambda text: [text, text or to_json(seen)]
    opened = index_loader.open_dataset(me, lambda: still, "train")
    assert opened.fingerprint == fingerprint_of(Noisy(np.random.default_rng(0), lambda _, rng: rng.random()))
    me.is_exact = True
    with pytest.raises(DatasetError):
        index_loader.open_dataset(me, lambda: still, "train")


def test_samples_seeded_by_the_run_do_not_vary(me: Any) -> None:
    """The global generators, also where a generator of one's own takes its seed from them, or from the sample."""
    me.is_exact = True
    for data in (
        Rows(lambda i: (i, torch.rand(2), random.random())),
        Rows(lambda _: np.random.default_rng(np.random.randint(2**31)).random()),
        Rows(lambda i: np.random.default_rng(i).random()),
    ):
        index_loader.open_dataset(me, partial(Rows, data.make), "train")
    assert {event["event"] for event in me.events} == {"dataset.opened"}


def test_columns_with_a_transform_of_their_own_are_read_too(me: Any) -> None:
    """A TensorDataset whose samples are made by a method of a subclass keeps the fingerprint of its columns."""

    class Augmented(TensorDataset):
        rng = np.random.default_rng(0)

        def __getitem__(self, index: int) -> Any:
            return self.tensors[0][index] + self.rng.random()

    columns = torch.arange(20.0)
    opened = index_loader.open_dataset(me, lambda: Augmented(columns), "train")
    assert opened.fingerprint == fingerprint_of(TensorDataset(columns))
    assert "dataset.varies" in [event["event"] for event in me.events]


def test_a_mixture_says_what_its_sets_are(me: Any) -> None:
    """The sample is counted in the mixture, the class is the set's."""
    mixed = MixedDataset(Rows(Picture), Noisy(*VARYING["numpy"]))
    opened = index_loader.open_dataset(me, lambda: mixed, "train")
    told = next(event for event in me.events if event["event"] == "dataset.varies")
    assert (told["sample"], told["type"]) == (20, f"{__name__}.Noisy")
    assert opened.fingerprint == mixed.fingerprint
    other = MixedDataset(Rows(lambda i: Picture(i + 1)), Noisy(*VARYING["numpy"]))
    assert mixed.fingerprint != other.fingerprint


def test_what_cannot_be_looked_into_is_told(me: Any) -> None:
    """Once, by class."""
    index_loader.open_dataset(me, lambda: Rows(lambda i: (i, lambda: i)), "train")
    told = [event for event in me.events if event["event"] == "dataset.unseen"]
    assert [event["types"] for event in told] == [["function"]]


def test_a_dataset_that_varies_rarely_is_read_as_often_as_ever(me: Any) -> None:
    """Two readings of 16 samples, and of four beside a fingerprint of its own."""
    reads: list[int] = []

    def make(index: int) -> int:
        reads.append(index)
        return index

    data = Rows(make)
    index_loader.open_dataset(me, lambda: data, "train")
    assert len(reads) == 32
    data.fingerprint = "v1"  # type: ignore[attr-defined]
    index_loader.open_dataset(me, lambda: data, "train")
    assert len(reads) == 40


def test_a_sample_is_hashed_as_often_as_it_is_read() -> None:
    """A large one takes a tenth of a second each time."""
    reads = []

    class Photo:
        def tobytes(self) -> bytes:
            reads.append(self)
            return b"pixels"

    class Photos:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return index, Photo()

    assert look_at(Photos()).varying is None
    assert (len(reads), len(set(reads))) == (6, 6)
