"""The job's own model out of what wraps it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from elasticflow.errors import StateError
from elasticflow.runtime.training.unwrap import unwrap_model


class Net(nn.Module):
    """One that others inherit from."""


class Deeper(Net):
    """One of another name."""


def test_a_model_is_found_behind_whatever_wraps_it() -> None:
    """Behind torch.compile and an average; the model itself, and one that inherits."""
    net = Deeper()
    compiled = torch.compile(net, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert unwrap_model(net, Net) is net
    assert unwrap_model(compiled, Deeper) is net
    assert isinstance(unwrap_model(AveragedModel(AveragedModel(net)), Net), Deeper)


def test_a_model_of_another_class_is_refused_by_name() -> None:
    """The error names both classes."""
    with pytest.raises(StateError, match="names a method of Deeper, but the model is a Net"):
        unwrap_model(Net(), Deeper)
