"""Notes on errors of a dataset or of what makes its batches: which sample they are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHOWN = 8  # indices, or parts of a sample


def name_of(dataset: Any) -> str:
    """Return the name of a dataset in messages: the import path of its class."""
    kind = type(dataset)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def of_sample(error: Exception, dataset: Any, index: int) -> None:
    """Note on *error* which sample was being read."""
    where = ""
    if hasattr(type(dataset), "origin_in_mixture"):
        number, index = dataset.origin_in_mixture(index)
        dataset, where = dataset.sets[number], f" (dataset.mix[{number}])"
    error.add_note(f"while reading sample {index} of {name_of(dataset)}{where}")


def of_samples(error: Exception, dataset: Any, indices: Sequence[int]) -> None:
    """Note on *error* which samples were being read at once."""
    shown = ", ".join(map(str, indices[:_SHOWN]))
    more = f" and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else ""
    error.add_note(f"while reading samples {shown}{more} of {name_of(dataset)} at once")


def of_batch(error: Exception, dataset: Any, indices: Sequence[int], samples: Sequence[Any]) -> None:
    """Note on *error* which samples make no batch, and what they are."""
    forms = [form(sample) for sample in samples]
    odd = next((i for i, other in enumerate(forms) if other != forms[0]), None)
    if odd is None:
        what = f"sample {indices[0]} is {forms[0]}" if forms else "there are no samples"
    else:
        what = f"sample {indices[odd]} is {forms[odd]}, but sample {indices[0]} is {forms[0]}"
    error.add_note(f"while making a batch of {len(samples)} samples of {name_of(dataset)}: {what}")


def form(value: Any) -> str:
    """Return type and shape of a sample, without its content."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        return (
            "{" + _listed([f"{key}: {form(item)}" for key, item in list(value.items())[: _SHOWN + 1]]) + "}"
        )
    if isinstance(value, tuple):
        return "(" + _listed([form(item) for item in value[: _SHOWN + 1]]) + ")"
    if isinstance(value, list):
        return f"list of {len(value)}" + (f": {form(value[0])}, ..." if value else "")
    return name_of(value)


def _listed(parts: list[str]) -> str:
    return ", ".join([*parts[:_SHOWN], "..."] if len(parts) > _SHOWN else parts)
