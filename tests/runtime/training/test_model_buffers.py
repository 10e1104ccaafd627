"""Buffers of replicas: equal before each step that may read them, and restored after a step that does not count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.training import model_buffers
from elasticflow.runtime.training.model_buffers import ModelBuffers

if TYPE_CHECKING:
    from collections.abc import Callable


class Center(nn.Module):
    """A mean that a forward keeps, and a layer with a mask that never changes."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
        self.layer = nn.Module()
        self.layer.register_buffer("mask", torch.ones(2))


def assign(model: Center) -> None:
    """Put another tensor in the place of the mean."""
    model.center = model.center + 1


def write_data(model: Center) -> None:
    """Write the mean where torch does not count it."""
    model.center.data.add_(1)


def write(model: Center) -> None:
    """Write the mean."""
    model.center.add_(1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what is noted instead of sent: how many buffers."""
    noted: list[int] = []
    monkeypatch.setattr(model_buffers, "send", lambda _, buffers: noted.append(len(buffers)))
    return noted


def of(model: nn.Module, **options: Any) -> tuple[ModelBuffers, Vote]:
    """Return the buffers of one of two ranks, and its vote."""
    vote = Vote()
    worker: Any = SimpleNamespace(world_size=2, vote=vote)
    return ModelBuffers(worker, model, **options), vote


@pytest.mark.parametrize("change", [assign, write_data, write])
def test_buffers_are_sent_before_each_step_after_one_that_changed_some(
    sent: list[int], change: Callable[[Center], None]
) -> None:
    """However the model changes them: ranks that keep what their own samples made of them would drift apart."""
    model = Center()
    buffers, vote = of(model)
    for _ in range(4):
        buffers.before_step()
        change(model)
        vote.resolve(vote.requests())
    assert sent == [2, 2, 2, 2]


def test_buffers_that_never_change_are_not_sent_once_that_is_known(sent: list[int]) -> None:
    """The first step alone does not tell."""
    buffers, vote = of(Center())
    for _ in range(4):
        buffers.before_step()
        vote.resolve(vote.requests())
    assert sent == [2, 2]


@pytest.mark.parametrize("keeps_all", [False, True])
@pytest.mark.parametrize("change", [assign, write_data, write])
@pytest.mark.usefixtures("sent")
def test_buffers_are_restored_into_the_same_tensors(
    change: Callable[[Center], None], keeps_all: bool
) -> None:
    """In the first step and later."""
    model = Center()
    buffers, _ = of(model, keeps_all=keeps_all)
    for _ in range(3):
        buffers.before_step()
        before, value = model.center, model.center.tolist()
        change(model)
        buffers.restore()
        assert model.center is before
        assert model.center.tolist() == value
        change(model)
