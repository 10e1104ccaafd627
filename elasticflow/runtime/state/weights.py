"""Weights to start from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.errors import StateError
from elasticflow.runtime.state.state import check_fit

if TYPE_CHECKING:
    import torch


def load_weights(model: torch.nn.Module, path: str) -> None:
    """Copy the tensors of a safetensors file into the model; every rank.

    Raises:
        StateError: names, shapes or dtypes differ.
    """
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except OSError as error:
        raise StateError(f"model.weights: {path} cannot be read: {error}") from error
    check_fit(model, found, "model")
    model.load_state_dict(found)
