"""Searches the training data for samples of the evaluation, within a bounded time."""

from __future__ import annotations

import copy
import math
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from elasticflow import events
from elasticflow.runtime.data import held_generators
from elasticflow.runtime.data.fingerprint import spread
from elasticflow.runtime.data.walk import digest_of
from elasticflow.runtime.process import random_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from elasticflow.runtime.process.context import Worker

RUN_LIMIT_S = 0.5  # the second step waits for it, once in a run's life
_MOST = 256  # samples of the evaluation that are looked up
_PART_FOR_EVALUATION = 0.4  # of the time: the rest is for the training data
# Samples of what two subsets are of, to tell that it is one set.
_BASE_SAMPLES = 8
_MOST_NUMBERS = 10_000_000  # of two subsets, compared number by number
_LEAST_SHARE = 0.01  # of the evaluation: a twin in a hundred samples is in many a real data set
_DEVIATIONS = 3.0  # that the share found lies above the share of twins in the training data
_REPEATED = "samples repeat themselves in the training data as well"
_SEED = 0
_TRANSFORMS = ("transform", "target_transform", "transforms")  # as torchvision's datasets call them


class Overlap(NamedTuple):
    """Result of the search.

    Attributes:
        looked_up: Samples of the evaluation looked up, each content once.
        pair: Numbers of one such sample in the evaluation and in the training data; None if there is none.
        doubt: Why there may be more than was found, or what was found may say nothing; empty if nothing speaks for it.
        is_natural: No more was found than training samples have twins among the rest of the training data.
    """

    found: int
    looked_up: int
    compared: int
    samples: int
    pair: tuple[int, int] | None = None
    doubt: str = ""
    is_natural: bool = False

    @property
    def is_leak(self) -> bool:
        """True if that is more than a few twins, as far as the part that was looked at tells."""
        if self.is_natural:
            return False
        expected = _LEAST_SHARE * self.looked_up * self.compared / max(1, self.samples)
        return self.found >= max(min(2, self.looked_up), expected) and self.found > 0

    def text(self) -> str:
        """Return the result as part of a sentence."""
        looked = "" if self.compared == self.samples else f", {self.compared:,} of {self.samples:,} looked at"
        pair = (
            ""
            if self.pair is None
            else f": evaluation sample {self.pair[0]} is training sample {self.pair[1]}"
        )
        return f"{self.found:,} of {self.looked_up:,} evaluation samples looked up are in the training data{looked}{pair}"


def compare(training: Any, evaluation: Any, limit_s: float) -> Overlap:
    """Look samples of *evaluation* up in *training*, both read by index; leaves no trace in the random generators.

    Subsets of one set (`random_split`) are compared by number, all of them. Else up to 256 samples are looked up by
    digest of content, without what `transform` makes of it where a dataset keeps one, and each under the same random
    state, so that equal samples stay equal where something is drawn; it ends in time, or a sample later.

    Raises:
        Exception: an exception of one of the datasets.
    """
    with random_streams.put_back():
        pair = _without_transforms(training), _without_transforms(evaluation)
        is_bare = pair[0] is not training or pair[1] is not evaluation
        if is_bare and not all(map(_can_be_read, pair)):
            pair = training, evaluation
        return _by_number(*pair) or _by_content(*pair, limit_s)


def warn(worker: Worker, training: Any, evaluation: Any) -> None:
    """Log a warning if the evaluation's samples are trained on; one rank."""
    try:
        overlap = compare(training, evaluation, RUN_LIMIT_S)
    except Exception:  # noqa: BLE001  # whoever reads that sample for its use raises it again
        return
    if overlap.is_leak:
        facts = overlap._asdict()
        del facts["doubt"], facts["is_natural"]
        worker.event(events.OVERLAP_FOUND, **facts)


def _by_number(training: Any, evaluation: Any) -> Overlap | None:
    """Compare two parts of one set by their numbers in it; None if they are not known to be that."""
    if max(len(training), len(evaluation)) > _MOST_NUMBERS:
        return None
    (base, numbers), (other, others) = _base_of(training), _base_of(evaluation)
    if numbers is None and others is None:
        return None
    if base is not other and not _are_one_set(base, other):
        return None
    trained = np.arange(len(base)) if numbers is None else numbers
    measured = np.arange(len(base)) if others is None else others
    both = np.intersect1d(trained, measured)
    pair = None
    if both.size:
        pair = int(np.flatnonzero(measured == both[0])[0]), int(np.flatnonzero(trained == both[0])[0])
    leaked = int(np.isin(measured, both).sum())
    return Overlap(leaked, len(measured), len(trained), len(trained), pair)


def _without_transforms(dataset: Any) -> Any:
    """Return the dataset as it would be without transforms: augmentation of the training data makes all samples differ."""
    if type(dataset) is Subset:
        bare = _without_transforms(dataset.dataset)
        return dataset if bare is dataset.dataset else Subset(bare, dataset.indices)
    names = [name for name in _TRANSFORMS if getattr(dataset, name, None) is not None]
    if not names:
        return dataset
    try:
        bare = copy.copy(dataset)
        for name in names:
            setattr(bare, name, None)
    except Exception:  # noqa: BLE001  # of the job's own code: then it is looked at as it is
        return dataset
    return bare


def _can_be_read(dataset: Any) -> bool:
    try:
        dataset[0]
    except Exception:  # noqa: BLE001  # what the dataset raises
        return False
    return True


def _base_of(dataset: Any) -> tuple[Any, NDArray[np.int64] | None]:
    """Return the set that a subset is taken from, and its samples' numbers there; None if the dataset is no subset."""
    numbers: NDArray[np.int64] | None = None
    while type(dataset) is Subset:
        own = np.asarray(dataset.indices, dtype=np.int64)
        numbers = own if numbers is None else own[numbers]
        dataset = dataset.dataset
    return dataset, numbers


def _are_one_set(base: Any, other: Any) -> bool:
    """True for a set that was made twice, as with a transform for training and without one: by content it would take too long."""
    if type(base) is not type(other) or len(base) != len(other):
        return False
    reader, other_reader = _Reader(base), _Reader(other)
    indices = spread(len(base), _BASE_SAMPLES)
    digests = [reader.digest(index) for index in indices]
    is_varied = len(set(digests)) > len(indices) // 2 and not reader.unseen
    return is_varied and digests == [other_reader.digest(index) for index in indices]


def _by_content(training: Any, evaluation: Any, limit_s: float) -> Overlap:
    began = time.monotonic()
    measured, trained = _Reader(evaluation), _Reader(training)
    if doubt := _doubt_of(measured) or _doubt_of(trained):
        return Overlap(0, 0, 0, len(training), doubt=doubt)
    wanted: dict[bytes, int] = {}
    read: Counter[bytes] = Counter()
    for index in _scattered(len(evaluation), _MOST):
        digest = measured.digest(index)
        wanted.setdefault(digest, index)
        read[digest] += 1
        if time.monotonic() > began + limit_s * _PART_FOR_EVALUATION:
            break
    if 2 * len(wanted) < read.total():
        return Overlap(0, 0, 0, len(training), doubt="the evaluation's samples repeat themselves")
    pairs: dict[bytes, int] = {}
    seen: Counter[bytes] = Counter()
    for index in _scattered(len(training), len(training)):
        digest = trained.digest(index)
        seen[digest] += 1
        if digest in wanted:
            pairs.setdefault(digest, index)
        if time.monotonic() > began + limit_s:
            break
    pair = next(((wanted[digest], index) for digest, index in pairs.items()), None)
    compared, doubt = seen.total(), ""
    if trained.draws or measured.draws:
        doubt = "samples are drawn at random when they are read, so equal ones may look different"
    elif compared < len(training):
        doubt = f"{compared:,} of {len(training):,} training samples were looked at in {limit_s:g} s"
    overlap = Overlap(len(pairs), len(wanted), compared, len(training), pair, doubt)
    is_natural = _are_twins(sum(read[digest] for digest in pairs), read.total(), seen)
    return overlap._replace(is_natural=True, doubt=_REPEATED) if is_natural else overlap


def _doubt_of(reader: _Reader) -> str:
    """Return why samples cannot be told apart by their digests; empty if they can."""
    if reader.digest(0) != reader.digest(0):
        return "a sample read twice is not the same"
    return f"{', '.join(reader.unseen)} in the samples cannot be looked into" if reader.unseen else ""


def _are_twins(found: int, read: int, seen: Counter[bytes]) -> bool:
    """True if a part held out of the training data would have as many twins in the rest of it.

    A sample from where the training data is from has one there about as often as one of the training samples has one
    among the others; by how much the two shares differ by chance is Esty's variance of that estimate (Good and Turing's)
    and the evaluation's own.
    """
    samples = seen.total()
    share = sum(count for count in seen.values() if count > 1) / samples
    doubles = sum(count == 2 for count in seen.values())
    of_training = share * (1 - share) / samples + 2 * (doubles + 1) / samples**2
    # The share that is least sure of those that the training data speaks for.
    likely = min(max(0.5, share), share + _DEVIATIONS * math.sqrt(of_training))
    variance = of_training + likely * (1 - likely) / read
    return found > 0 and share > 0 and found / read <= share + _DEVIATIONS * math.sqrt(variance)


def _scattered(length: int, most: int) -> Iterator[int]:
    """Yield *most* numbers below *length*, each once; the first of them are spread over all."""
    stride = max(1, round(length * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, length) > 1:
        stride += 1
    return (i * stride % length for i in range(min(most, length)))


class _Reader:
    """Reads samples of a dataset, each under the same random state."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._many = dataset, getattr(dataset, "__getitems__", None)
        self._generators = random_streams.Generators(_SEED, torch.device("cpu"))
        self._generators.add(held_generators.of_libraries(dataset))
        self._generators.rest()
        self.draws = False
        self.unseen: dict[str, None] = {}

    def digest(self, index: int) -> bytes:
        """Return a digest of a sample's content."""
        if not self._generators.can_look:
            random_streams.seed_all(_SEED)
        digest, unseen = digest_of(self._dataset[index] if self._many is None else self._many([index])[0])
        self.unseen |= unseen
        if self._generators.can_look and self._generators.have_moved():
            self.draws = True
            self._generators.rest()
        return digest
