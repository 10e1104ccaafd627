"""Outputs of several batches as those of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from elasticflow.runtime.data import notes


def num_bytes(value: Any) -> int:
    """Return the bytes that the tensors and arrays in a value take."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(num_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(num_bytes, value))
    return 0


def joined(batches: list[Any]) -> Any:
    """Return the values of several batches as one value: tensors and lists are concatenated, inside dicts and tuples, too.

    Raises:
        ValueError: the values have other types, or do not fit together; the message says why.
    """
    first = batches[0]
    if isinstance(first, Tensor):
        _require_fitting(batches)
        return torch.cat(batches)
    if isinstance(first, np.ndarray):
        _require_fitting(batches)
        return np.concatenate(batches)
    if isinstance(first, dict):
        # A model's output of transformers, too: a dict whose keys are attributes.
        return type(first)(**{key: joined([batch[key] for batch in batches]) for key in first})
    if isinstance(first, tuple):
        parts = [joined(list(parts)) for parts in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    if isinstance(first, list):
        return [each for batch in batches for each in batch]
    raise ValueError(f"{notes.form(first)} of several batches cannot be put together")


def _require_fitting(batches: list[Any]) -> None:
    first = batches[0]
    if first.ndim == 0:
        raise ValueError("one number for each batch is nothing that has samples")
    odd = next((each for each in batches if each.shape[1:] != first.shape[1:]), None)
    if odd is not None:
        what = f"{notes.form(first)} of one batch and {notes.form(odd)} of another"
        raise ValueError(f"{what} cannot be put one behind the other")
