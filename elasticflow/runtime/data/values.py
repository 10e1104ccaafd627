"""Values of the training data that the job's arguments name: `"${dataset.vocab_size}"`."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from elasticflow.errors import DatasetError, JobKeyError
from elasticflow.runtime.data.dataset import VALUE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.process.context import Worker

_MOST = 1000  # of a list: it stands in records


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
        return len(value) <= _MOST and all(
            not isinstance(each, list | tuple) and _is_plain(each) for each in value
        )
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))


def _attributes(value: Any) -> list[str]:
    names = [*vars(value)] if hasattr(value, "__dict__") else []
    names += [name for name, each in vars(type(value)).items() if not callable(each)]
    return sorted(name for name in names if not name.startswith("_"))
