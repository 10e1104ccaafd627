"""Datasets as all ranks opened them, the checks on them, and their values that the job's arguments name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from elasticflow import events
from elasticflow.errors import DatasetError, JobKeyError
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.runtime.data.fingerprint import Varying

if TYPE_CHECKING:
    from elasticflow.runtime.data.fingerprint import Look
    from elasticflow.runtime.process.context import Worker

TRAINING_DATA = "train"
"""What the dataset that is trained on is called, in events and among a snapshot's fingerprints."""
EVALUATION_DATA = "evaluation"
VALUE = "dataset."
"""Before the name of a value of the training data, among a snapshot's fingerprints."""
_MOST_ITEMS = 1000  # of a list as a value: it stands in records


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset that was opened by all ranks, each of which has the same data.

    Attributes:
        content: The object that the job's factory returned; for data read in order, its `DataShards`.
        fingerprint: Fingerprint of the data; None: it was not taken.
        values: Attributes of the content that the job's arguments name, by these names: the same on every rank.
    """

    content: Any
    fingerprint: str | None = None
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
        values: Arguments of the job that name the data, for the log.

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


def require_the_same_samples(worker: Worker, name: str, look: Look) -> str:
    """Return this rank's fingerprint of the data, and log what it does not cover. Collective: every rank.

    Raises:
        DatasetError: in exact mode, a sample is not the same when it is read again. For an evaluation's data, once training has
            begun, this is logged instead.
    """
    texts = worker.gather_text("" if look.varying is None else to_json(look.varying))
    varying = [from_json(Varying, json.loads(text)) for text in texts if text]
    if varying and worker.is_exact and (name == TRAINING_DATA or worker.started_at is None):
        raise varies(name, varying[0], "exact mode cannot repeat a step")
    if worker.rank == 0:
        if varying:
            first = varying[0]
            facts = {"sample": first.sample, "type": first.kind, "parts": list(first.parts)}
            worker.event_once(events.DATASET_VARIES, name=name, **facts, generators=list(first.generators))
        if look.unseen:
            worker.event_once(events.DATASET_UNSEEN, name=name, types=list(look.unseen))
    return look.fingerprint(varying)


def varies(name: str, varying: Varying, therefore: str) -> DatasetError:
    """Return the error about a sample that is not the same when it is read again."""
    where = f" (in {', '.join(varying.parts)})" if varying.parts else ""
    own = f" ({', '.join(varying.generators)})" if varying.generators else ""
    return DatasetError(
        f"sample {varying.sample} of `{name}`, a {varying.kind}, is not the same when it is read twice under one seed{where}: "
        f"{therefore}",
        "draw from random, numpy's global generator or torch's, which are seeded for each sample, in place of a generator of the "
        f"dataset's own{own}: a library may take its seed from them, default_rng(np.random.randint(2**31)) inside __getitem__; "
        "leave the time and what was read before out of a sample",
    )


def checked_length(dataset: Any, name: str, samples: int | None, given_to: str | None = None) -> int:
    """Return the length of a map-style dataset.

    Args:
        given_to: The call that a script passed it to, such as `run.batches`; None: the job file's factory returned it.

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


def require_same(
    marks: Mapping[str, str],
    marks_then: Mapping[str, str],
    samples: int | None,
    samples_then: int | None,
) -> None:
    """Refuse to resume from a snapshot that was trained on other data. The evaluation's data may change.

    Args:
        samples: Length of the training data, if it has one: without it a position means nothing, whatever the
            fingerprints say.

    Raises:
        DatasetError: the training data's fingerprint or length differs.
    """
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
        if differences:
            raise DatasetError(
                f"the data of `{name}` is not what the snapshot was trained on: {' and '.join(differences)}",
                "point the job at the same data, or start a new run; data drawn by a generator without a seed is other data at each start, "
                "and a dataset that the script changes between epochs needs an attribute `fingerprint`",
            )


def source_of(dataset: Any) -> str:
    """Return the origin of the data, for the log."""
    return str(getattr(dataset, "source", None) or f"{type(dataset).__module__}.{type(dataset).__qualname__}")


def values_of(dataset: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return attributes of a dataset by their names: numbers, texts, truths, or lists of them.

    Args:
        keys: The key of the job file that names each, by the attribute's name; a name with dots is of an attribute's attribute.

    Raises:
        JobKeyError: there is no such attribute, or its value cannot be written down.
    """
    return {name: _value_of(dataset, name, key) for name, key in keys.items()}


def require_same_values(worker: Worker, values: Mapping[str, Any]) -> None:
    """Make sure that all ranks have the same values. Collective: every rank.

    Raises:
        DatasetError: some rank has another value than rank 0.
    """
    by_rank = worker.gather_text(json.dumps(values)) if values else []
    for rank, text in enumerate(by_rank):
        if text != by_rank[0]:
            first, other = json.loads(by_rank[0]), json.loads(text)
            name = next(name for name in first if first[name] != other[name])
            raise DatasetError(
                f"${{dataset.{name}}} is {other[name]} on rank {rank}, and {first[name]} on rank 0",
                "make sure that every node sees the same files, and that the value follows from these alone",
            )


def marks_of(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as a snapshot holds them beside the fingerprints of its data."""
    return {f"{VALUE}{name}": json.dumps(value) for name, value in values.items()}


def _value_of(dataset: Any, name: str, key: str) -> Any:
    value, path = dataset, ""
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError as error:
            if not str(error).endswith(f"no attribute '{part}'"):
                raise  # the property's own
            holder = (
                f"the {type(value).__name__} that {path or 'dataset.entry returned'}{' is' if path else ''}"
            )
            raise JobKeyError(
                key,
                f"{key} is ${{dataset.{name}}}, and {holder} has no `{part}`",
                f"its attributes: {', '.join(_attributes(value)) or 'none'}",
            ) from None
        path = f"{path}.{part}" if path else f"dataset.{part}"
    return _plain(value, name, key)


def _plain(value: Any, name: str, key: str) -> Any:
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0):
        value = value.item()
    elif isinstance(value, torch.Tensor | np.ndarray):
        value = value.tolist()
    if _is_plain(value):
        return list(value) if isinstance(value, tuple) else value
    what, remedy = (
        f"a {type(value).__name__}",
        "a number, a text, true or false, or a list of up to 1,000 of them",
    )
    if callable(value):
        what, remedy = "a method", f"a property that returns {remedy}"
    message = f"{key} is ${{dataset.{name}}}, which is {what}: it cannot be written down"
    raise JobKeyError(key, message, f"make it {remedy}")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= _MOST_ITEMS and all(
            not isinstance(each, list | tuple) and _is_plain(each) for each in value
        )
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _attributes(value: Any) -> list[str]:
    names = [*vars(value)] if hasattr(value, "__dict__") else []
    names += [name for name, each in vars(type(value)).items() if not callable(each)]
    return sorted(name for name in names if not name.startswith("_"))
