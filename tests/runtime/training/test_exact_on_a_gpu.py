"""Gradients of the exact mode on a GPU: the same bits whatever else lies in its memory, for products of many shapes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.process.random_streams import Generators
from elasticflow.runtime.training.exact import ExactStep
from tests.gpu.marks import DEVICES
from tests.runtime.positions import end_of
from tests.runtime.stored import bits

if TYPE_CHECKING:
    from collections.abc import Iterator

_SHARDS = 4
# Samples of a shard, inputs, outputs; on a GPU each is eight times as large, so that the library splits sums as it likes.
_SHAPES = [
    (1, 64, 64), (2, 31, 65), (8, 512, 8), (8, 8, 512), (16, 128, 128), (33, 7, 129), (64, 256, 16), (128, 16, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Other tests run as torch does by itself."""
    yield
    torch.use_deterministic_algorithms(mode=False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def mean_loss(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the mean loss."""
    return model(inputs).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("on", DEVICES)
def test_gradients_have_the_same_bits_whatever_lies_in_memory(
    me: Any, on: str, shape: tuple[int, int, int]
) -> None:
    """Two runs of one batch in four virtual shards, the second one beside other tensors."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read with the first product of matrices
    device = torch.device(on, 0) if on == "cuda" else torch.device(on)
    samples, inputs, outputs = (number * (8 if on == "cuda" else 1) for number in shape)
    me.device, me.generators = device, Generators(11, device)
    me.generators.rest()
    seen, kept = [], []
    for others in (0, 7):
        torch.manual_seed(5)
        pieces = [torch.randn(samples, inputs) for _ in range(_SHARDS)]
        model = nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU(), nn.Linear(outputs, inputs)).to(device)
        kept += [torch.ones(1001 * number, device=device) for number in range(others)]
        step = ExactStep(me, model, mean_loss, virtual_shards=_SHARDS, precision="fp32", on_nonfinite="stop")
        whole = samples * _SHARDS
        position = end_of(IndexSchedule(whole, whole, epochs=1))
        moved = iter([(piece.to(device), samples) for piece in pieces])
        step.forward_backward(Batch(whole, position, list(range(_SHARDS)), moved))
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(gradient is not None and gradient.any() for gradient in gradients)
        seen.append([bits(gradient.cpu()) for gradient in gradients if gradient is not None])
    assert seen[0] == seen[1]
