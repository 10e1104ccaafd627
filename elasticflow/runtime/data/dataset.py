"""Datasets as all ranks opened them, the checks on them, and their fingerprints."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch.utils.data import IterableDataset, TensorDataset

from elasticflow import events
from elasticflow.errors import DatasetError
from elasticflow.runtime.data import notes
from elasticflow.runtime.process import random_streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.process.context import Worker

T = TypeVar("T")

TRAINING_DATA = "train"
"""What the dataset that is trained on is called, in events and among a snapshot's fingerprints."""
EVALUATION_DATA = "evaluation"
VALUE = "dataset."
"""Before the name of a value of the training data, among a snapshot's fingerprints."""

_PROBES = 16  # samples whose content goes into a fingerprint
_PROBES_IN_MEMORY = 256  # of a list, which gives a sample in no time
_BY_TEXT = (str, int, float, complex, np.generic, date, time, timedelta, Decimal)
_ARRAY_ROWS, _ARRAY_BYTES = 1 << 16, 4 << 20  # of an array: most rows, and most of their bytes


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset that was opened by all ranks, each of which has the same data.

    Attributes:
        content: What the job's factory returned; of data that is read in order, its `DataShards`.
        fingerprint: Identifies the data; None: nobody took it.
        has_drawn: The factory drew random numbers.
        values: Attributes of the content that the job's arguments name, by these names: the same on every rank.
    """

    content: Any
    fingerprint: str | None = None
    has_drawn: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.content)

    def __getitem__(self, index: int) -> Any:
        """Return a sample."""
        return self.content[index]


def opened(dataset: Any) -> OpenedDataset:
    """Return *dataset* as an opened one; an edited train.py may have made something else of what it opened."""
    return dataset if isinstance(dataset, OpenedDataset) else OpenedDataset(dataset)


def confirm(
    worker: Worker,
    name: str,
    fingerprint: str,
    *,
    sizes: Mapping[str, int | None],
    source: str,
    remedy: str,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Make sure that all ranks opened the same data, and log it on rank 0. Collective: every rank.

    Args:
        worker: This worker.
        name: What the dataset is called: `train` or `evaluation`.
        fingerprint: Of what this rank opened.
        sizes: How much it is, for the log.
        source: Where it came from, for the log.
        remedy: What to do where ranks opened different data.
        values: Of the data that the job's arguments name, for the log.

    Raises:
        DatasetError: some rank opened other data than rank 0.
    """
    fingerprints = worker.gather_text(fingerprint)
    for rank, other in enumerate(fingerprints):
        if other != fingerprints[0]:
            raise DatasetError(
                f"rank {rank} opened other data for `{name}` than rank 0: fingerprint {other}, not {fingerprints[0]}",
                remedy,
            )
    if worker.rank == 0:
        facts = {**sizes, **({"values": dict(values)} if values else {})}
        worker.event(events.DATASET_OPENED, name=name, **facts, fingerprint=fingerprint, source=source)
    worker.reseed()


def checked_length(dataset: Any, name: str, samples: int | None, given_to: str | None = None) -> int:
    """Return the length of a map-style dataset.

    Args:
        dataset: The data.
        name: What it is called: `train`, or a key of the job file.
        samples: The length that the job file states.
        given_to: What a script gave it to, as `run.batches`; None: a factory of the job file returned it.

    Raises:
        DatasetError: it has no length, no items by index, no samples, or not as many as the job file says.
    """
    kind = type(dataset).__name__
    where = "dataset" if name == TRAINING_DATA else name
    came = f"{where}.entry returned" if given_to is None else f"{given_to} was given"
    verb = "return" if given_to is None else "give it"
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DatasetError(
            f"{came} a {kind}, which cannot be read by index",
            "return an object with __len__ and __getitem__, or set dataset.shards to read it in order"
            if name == TRAINING_DATA and given_to is None
            else f"{verb} an object with __len__ and __getitem__, such as a list of the samples",
        )
    try:
        length = len(dataset)
    except TypeError:
        raise DatasetError(
            f"{came} a {kind}, which has no length",
            "give it a __len__ method: the order of the samples is computed from it",
        ) from None
    _refuse_containers(dataset, came, verb)
    if length == 0:
        raise DatasetError(f"{came} a {kind} without samples")
    if samples is not None and samples != length:
        raise DatasetError(
            f"{where}.samples = {samples}, but the {kind} has {length}",
            f"write samples = {length}, or leave it out",
        )
    return length


def _refuse_containers(dataset: Any, came: str, verb: str) -> None:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        names = ", ".join(str(key) for key in list(dataset)[:5])
        raise DatasetError(
            f"{came} a {kind}, which has no samples by number but the keys {names}",
            f"{verb} one of its values, or a list of the samples",
        )
    if (
        isinstance(dataset, tuple)
        and dataset
        and all(isinstance(c, np.ndarray | torch.Tensor) for c in dataset)
    ):
        lengths = {len(column) if column.ndim else 0 for column in dataset}
        if len(lengths) == 1 and lengths != {len(dataset)}:
            raise DatasetError(
                f"{came} a tuple of {len(dataset)} arrays of {lengths.pop()} rows: by index, that is {len(dataset)} samples",
                f"{verb} torch.utils.data.TensorDataset(...) of them as tensors",
            )


def fingerprint_of(dataset: Any) -> str:
    """Return what identifies the data: its own `fingerprint`, else a digest of its length and of some content.

    That are, spread evenly, 16 samples; 256 of a list; of arrays, tensors and TensorDatasets at most 65,536 rows or
    4 MiB. So a change of few samples can go unnoticed: a dataset that knows better says so by an attribute or method
    `fingerprint`. The same content has the same one on every machine. (What Hugging Face datasets call `_fingerprint`
    has not: it counts paths, times and code, and can be random.)

    Samples that differ between two readings with one seed identify nothing: the length alone counts then. Of an
    object that is neither data nor made of data, the class counts.

    Raises:
        Exception: what the dataset raises, with a note that names the sample.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    once, again = (without_trace(lambda: _content(dataset)) for _ in range(2))
    return sha256(f"{len(dataset)}".encode() if once != again else once).hexdigest()[:16]


def require_same(
    marks: Mapping[str, str],
    marks_then: Mapping[str, str],
    samples: int | None,
    samples_then: int | None,
    began_otherwise: Mapping[str, bool] | None = None,
) -> None:
    """Refuse to go on from a snapshot that was trained on other data. What the evaluation reads may change.

    Args:
        marks: Fingerprint of each dataset, by name.
        marks_then: The snapshot's.
        samples: Length of the training data, if it has one: without it a position means nothing, whatever the
            fingerprints say.
        samples_then: The snapshot's.
        began_otherwise: Datasets whose factory draws random numbers and began in another state when the run began;
            true: its fingerprint is its own, so that what it drew cannot be seen.

    Raises:
        DatasetError: the training data's fingerprint or length differs, or may hide that it does.
    """
    began_otherwise = began_otherwise or {}
    # No weight depends on the evaluation's data. An edited train.py may train on data without a fingerprint.
    for name in sorted({TRAINING_DATA, *marks} - {EVALUATION_DATA}):
        mark = marks.get(name)
        differences = []
        if mark is not None and marks_then.get(name, mark) != mark:
            differences.append(f"fingerprint {mark}, not {marks_then[name]}")
        if name == TRAINING_DATA and samples != samples_then:
            differences.append(f"{samples} samples, not {samples_then}")
        if name.startswith(VALUE) and differences:
            was, now = marks_then[name], mark
            raise DatasetError(
                f"${{{name}}} is {now}, and was {was} when the snapshot was taken: the job is made with it",
                "point the job at the data that it was begun with, or start a new run",
            )
        if name in began_otherwise and (differences or began_otherwise[name]):
            why = " and ".join(differences) or "its fingerprint cannot tell"
            raise DatasetError(
                f"the data of `{name}` may be other than what the run began with ({why}): its factory draws random "
                "numbers, and the run was begun by a version of elasticflow that began it in another random state",
                "go on with the version that the run was begun with, or start a new run",
            )
        if differences:
            raise DatasetError(
                f"the data of `{name}` is not what the snapshot was trained on: {' and '.join(differences)}",
                "point the job at the same data, or start a new run; data drawn by a generator without a seed is other data at each start",
            )


def source_of(dataset: Any) -> str:
    """Return where the data came from, for the log."""
    return str(getattr(dataset, "source", None) or f"{type(dataset).__module__}.{type(dataset).__qualname__}")


def _content(dataset: Any) -> bytes:
    digest = sha256(f"{len(dataset)}".encode())
    columns = dataset.tensors if isinstance(dataset, TensorDataset) else (dataset,)
    if all(isinstance(column, np.ndarray | torch.Tensor) for column in columns):
        for column in columns:
            rows = min(_ARRAY_ROWS, _ARRAY_BYTES * len(column) // max(1, column.nbytes))
            add_content(column[_spread(len(column), max(_PROBES, rows))], digest.update)
        return digest.digest()
    for index in _spread(len(dataset), _PROBES_IN_MEMORY if isinstance(dataset, list) else _PROBES):
        random_streams.seed_all(index)
        try:
            sample = dataset[index]
        except Exception as error:
            notes.of_sample(error, dataset, index)
            raise
        add_content(sample, digest.update)
    return digest.digest()


def _spread(length: int, most: int) -> list[int]:
    """Return up to *most* numbers below *length*, evenly spread, with the first and the last."""
    count = min(most, length)
    return [i * (length - 1) // max(1, count - 1) for i in range(count)]


def without_trace(read: Callable[[], T]) -> T:
    """Return what *read* returns; random, numpy and torch on the CPU draw afterwards as if it had not been."""
    python, numeric, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        return read()
    finally:
        random.setstate(python)
        np.random.set_state(numeric)  # noqa: NPY002  # the global generator is what datasets draw from
        torch.set_rng_state(tensor)


def add_content(value: Any, update: Callable[[bytes], None]) -> None:
    """Give *update* the bytes of a sample's content; of an object that is neither data nor made of data, its class."""
    if isinstance(value, torch.Tensor | np.ndarray):
        _digest_array(value, update)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            update(str(key).encode())
            add_content(item, update)
    elif isinstance(value, list | tuple):
        update(f"{len(value)}".encode())
        for item in value:
            add_content(item, update)
    elif isinstance(value, bytes | bytearray):
        update(bytes(value))
    elif value is None or isinstance(value, _BY_TEXT):
        update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # images
        update(value.tobytes())
    else:
        update(notes.name_of(value).encode())


def _digest_array(value: Any, update: Callable[[bytes], None]) -> None:
    update(f"{value.dtype}{tuple(value.shape)}".encode())
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            add_content(value.tolist(), update)  # its own bytes are addresses
        else:
            update(value.tobytes())
    elif value.layout == torch.strided:
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
