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


@pytest.mark.usefixtures("sent")
def test_the_first_step_of_a_batchnorm_that_was_frozen_is_restored() -> None:
    """Its statistics have changed in no step before, and a loss that is not finite would stay in them for ever."""
    model = nn.BatchNorm1d(2).eval()
    buffers, _ = of(model)
    for _ in range(3):
        buffers.before_step()
        model(torch.ones(4, 2))
    model.train()
    buffers.before_step()
    model(torch.full((4, 2), torch.inf))
    buffers.restore()
    assert [[0.0, 0.0], [1.0, 1.0], 0] == [buffer.tolist() for buffer in model.buffers()]


def test_a_first_step_that_is_left_out_tells_nothing_of_what_changes(sent: list[int]) -> None:
    """After it all buffers are as they were; from then on rank 0's have to be sent."""
    model = Center()
    buffers, vote = of(model)
    for number in range(5):
        buffers.before_step()
        write_data(model)
        vote.resolve(vote.requests())
        if number == 0:
            buffers.restore()
    assert sent == [2, 2, 2, 2, 2]
