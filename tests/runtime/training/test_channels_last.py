"""The channels-last memory format of a model and its images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from elasticflow.runtime.training.channels_last import to_channels_last


class _Model(nn.Module):
    """Weights of all numbers of dimensions; keeps what its forward was given."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.volume, self.out = nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3), nn.Linear(4, 2)
        self.register_buffer("image", torch.rand(2, 3, 8, 8))
        self.seen: list[Any] = []

    def forward(self, images: Tensor, *others: Any, mask: Any = None) -> Tensor:
        """Return scores of images."""
        self.seen = [images, others, mask]
        scores: Tensor = self.out(self.conv(images).mean((2, 3)))
        return scores


def _is_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def test_what_has_four_dimensions_is_converted() -> None:
    """Weights, buffers and inputs, wherever they stand; values and everything else stay."""
    torch.manual_seed(0)
    model = _Model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    to_channels_last(model)
    state = model.state_dict()
    assert {name for name, tensor in state.items() if _is_last(tensor)} == {"conv.weight", "image"}
    assert all(torch.equal(before[name], tensor) for name, tensor in state.items())

    images, labels = torch.rand(5, 3, 8, 8), torch.arange(5)
    found = model(images, [images, labels], {"deep": (images,)}, mask=images)
    first, ((second, same), third), fourth = model.seen
    assert all(
        _is_last(each) and torch.equal(each, images) for each in (first, second, third["deep"][0], fourth)
    )
    assert same is labels
    plain = _Model()
    plain.load_state_dict(before)
    torch.testing.assert_close(found, plain(images))


def test_gradients_and_the_optimizers_state_take_over_the_format() -> None:
    """They are made like the parameter."""
    model = _Model()
    to_channels_last(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(5, 3, 8, 8)).sum().backward()
    optimizer.step()
    weight = model.conv.weight
    assert weight.grad is not None
    assert _is_last(weight.grad)
    assert _is_last(optimizer.state[weight]["exp_avg"])
