"""Checks on the datasets a job names, and their fingerprints (floor R)."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from elasticflow.errors import DatasetError
from elasticflow.runtime import streams

if TYPE_CHECKING:
    from collections.abc import Callable

_PROBES = 16  # samples whose bytes go into a fingerprint


def check(dataset: Any, name: str, samples: int | None) -> int:
    """Return the length of a map-style dataset.

    Raises:
        DatasetError: it has no length, no items by index, no samples, or not as many as the job file says.
    """
    kind = type(dataset).__name__
    where = "dataset" if name == "train" else name
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise DatasetError(
            f"{where}.entry returned a {kind}, which cannot be read by index",
            "return an object with __len__ and __getitem__, or set dataset.shards to read it in order"
            if name == "train"
            else "return an object with __len__ and __getitem__, such as a list of the samples",
        )
    try:
        length = len(dataset)
    except TypeError:
        raise DatasetError(
            f"{where}.entry returned a {kind}, which has no length",
            "give it a __len__ method: the order of the samples is computed from it",
        ) from None
    if length == 0:
        raise DatasetError(f"{where}.entry returned a {kind} without samples")
    if samples is not None and samples != length:
        raise DatasetError(
            f"{where}.samples = {samples}, but the {kind} has {length}",
            f"write samples = {length}, or leave it out",
        )
    return length


def fingerprint(dataset: Any) -> str:
    """Return what identifies the data: its own `fingerprint`, else a digest of its length and some samples.

    Samples that differ between two readings with one seed identify nothing: the length alone counts then.
    """
    own = getattr(dataset, "fingerprint", None)
    if own is not None:
        return str(own() if callable(own) else own)
    length = len(dataset)
    once, again = (_without_trace(lambda: _read(dataset, length)) for _ in range(2))
    return sha256(f"{length}".encode() if once is None or once != again else once).hexdigest()[:16]


def source(dataset: Any) -> str:
    """Return where the data came from, for the log."""
    return str(getattr(dataset, "source", None) or f"{type(dataset).__module__}.{type(dataset).__qualname__}")


def _read(dataset: Any, length: int) -> bytes | None:
    digest = sha256(f"{length}".encode())
    for i in range(min(_PROBES, length)):
        index = i * length // min(_PROBES, length)
        streams.seed_all(index)
        try:
            _digest(dataset[index], digest.update)
        except TypeError:
            return None
    return digest.hexdigest().encode()


def _without_trace(read: Callable[[], bytes | None]) -> bytes | None:
    python, numeric, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        return read()
    finally:
        random.setstate(python)
        np.random.set_state(numeric)  # noqa: NPY002  # the global generator is what datasets draw from
        torch.set_rng_state(tensor)


def _digest(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, torch.Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        update(f"{value.dtype}{value.shape}".encode())
        update(value.tobytes())
    elif isinstance(value, dict):
        for key, item in value.items():
            update(str(key).encode())
            _digest(item, update)
    elif isinstance(value, list | tuple):
        for item in value:
            _digest(item, update)
    elif isinstance(value, bytes):
        update(value)
    elif value is None or isinstance(value, str | int | float | np.generic):
        update(repr(value).encode())
    elif hasattr(value, "tobytes"):  # images
        update(value.tobytes())
    else:
        raise TypeError(type(value).__name__)
