"""What cannot be shared among ranks is refused before anything is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elasticflow.errors import StateError
from elasticflow.runtime.process.shard_layout import Sharding, ShardLayout
from elasticflow.runtime.training import model_buffers, shard_model

WORKER: Any = SimpleNamespace(layout=ShardLayout(2, 0, 2), device=torch.device("cpu"), world_size=2)


class Adapted(nn.Module):
    """A frozen layer in bf16 beside a trained one in float32, as peft leaves them; twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        frozen = (nn.Linear(2, 2).bfloat16().requires_grad_(requires_grad=False) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleDict({"base": base, "lora": nn.Linear(2, 2)}) for base in frozen)
        self.head = nn.Linear(2, 2).bfloat16()


class SentError(Exception):
    """Rank 0's values would be sent."""


@pytest.fixture(autouse=True)
def sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop where other ranks are needed."""

    def send(*_: Any) -> None:
        raise SentError

    monkeypatch.setattr(model_buffers, "send", send)


def test_frozen_parameters_may_have_other_dtypes_than_trained_ones() -> None:
    """As may trained ones of another block: each block's gradients are reduced by themselves."""
    with pytest.raises(SentError):
        shard_model.shard_model(WORKER, Adapted(), Sharding(2))


@pytest.mark.parametrize(
    ("wrap", "named"),
    [
        (("torch.nn:Conv2d",), "torch.nn:Conv2d is named in wrap, and the model has no such module"),
        ((), "the model has no ModuleList whose elements could be sharded one by one"),
    ],
)
def test_a_wrap_that_finds_nothing_to_gather_is_refused(wrap: tuple[str, ...], named: str) -> None:
    """The class is named, or what is looked for without one."""
    with pytest.raises(StateError, match=named):
        shard_model.shard_model(WORKER, nn.Sequential(nn.Linear(2, 2)), Sharding(2, wrap))


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ("layers.1.base", "layers.1.base.weight of torch.bfloat16 and layers.1.lora.weight of torch.float32"),
        ("extra", "head.weight of torch.bfloat16 and extra.weight of torch.float32"),
    ],
)
def test_trained_parameters_of_several_dtypes_that_are_gathered_together_are_refused(
    part: str, named: str
) -> None:
    """Two of a block, or two of the rest of the model."""
    model = Adapted()
    model.extra = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    model.get_submodule(part).requires_grad_(requires_grad=True)
    with pytest.raises(StateError, match=named):
        shard_model.shard_model(WORKER, model, Sharding(2))
