"""Activations that are computed again: the same bits, less kept, refused where twice is not once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elasticflow.errors import JobKeyError
from elasticflow.runtime.training.gradient_checkpointing import checkpoint_activations


class Block(nn.Module):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Return a sum with what it computes."""
        self.calls += 1
        added: Tensor = scale * self.drop(torch.tanh(self.linear(x)))
        return x + added


class Net(nn.Module):
    """Blocks in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        """Return two numbers for each sample."""
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def net() -> Net:
    """Return the same net each time."""
    torch.manual_seed(3)
    return Net()


def trained(model: nn.Module, steps: int = 3) -> tuple[list[Tensor], int]:
    """Return the weights after some steps, and how many bytes of activations the last one kept."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    for step in range(steps):
        torch.manual_seed(step)
        kept = 0
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(torch.randn(16, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # Whatever else is drawn is drawn as without it.
        torch.rand(3)
    return [p.detach().clone() for p in model.parameters()], kept


@pytest.mark.parametrize("globs", [["blocks.*"], ["blocks.1"], ["*"], ["blocks.*.linear", "head"]])
@pytest.mark.parametrize("copies", [False, True])
def test_bits_are_those_of_a_step_that_keeps_all(globs: list[str], *, copies: bool) -> None:
    """Dropout drops the same numbers again; a copy of the model, as of averaged weights, computes with its own weights."""
    model = net()
    checkpoint_activations(model, globs)
    expected, kept_all = trained(net())
    weights, kept = trained(copy.deepcopy(model) if copies else model)
    assert all(map(torch.equal, weights, expected))
    assert kept < kept_all
    if copies:
        assert all(map(torch.equal, model.parameters(), net().parameters()))


class Named(nn.Module):
    """A module whose argument has a name that torch's checkpoint has for one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, *, debug: float = 1.0) -> Tensor:
        """Return the scaled output."""
        scaled: Tensor = self.layer(x) * debug
        return scaled


def test_every_argument_reaches_the_module() -> None:
    """Whatever its name is."""
    model = nn.ModuleDict({"named": Named()})
    expected = model["named"](torch.ones(1, 3), debug=2.0)
    checkpoint_activations(model, ["named"])
    assert expected.equal(model["named"](torch.ones(1, 3), debug=2.0))


def test_names_and_classes_stay() -> None:
    """Weights are called as before, and a group by module finds them."""
    model = net()
    names = list(model.state_dict())
    assert checkpoint_activations(model, ["blocks.*"]) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names == list(model.state_dict())
    assert all(isinstance(block, Block) and type(block).__name__ == "Block" for block in model.blocks)


def test_only_training_computes_twice() -> None:
    """An evaluation runs each block once."""
    model = net()
    checkpoint_activations(model, ["blocks.*"])
    model.eval()
    with torch.no_grad():
        model(torch.randn(2, 8))
    assert [block.calls for block in model.blocks] == [1, 1, 1]
    model.train()
    model(torch.randn(2, 8)).sum().backward()
    assert [block.calls for block in model.blocks] == [3, 3, 3]


def test_model_has_a_way_of_its_own() -> None:
    """That of transformers is told to be non-reentrant; timm's is used where there is no other."""
    told: list[Any] = []

    class OfTransformers(Net):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            told.append(gradient_checkpointing_kwargs)

    class OfTimm(Net):
        def set_grad_checkpointing(self, enable: bool = True) -> None:
            told.append(enable)

    checkpoint_activations(OfTransformers())
    checkpoint_activations(OfTimm())
    assert told == [{"use_reentrant": False}, True]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_model_trains_with_it() -> None:
    """The compiler knows the non-reentrant form, and gives the same bits as without; dropout drops the same."""
    model, expected = net(), net()
    checkpoint_activations(model, ["blocks.*"])
    for one in (model, expected):
        one.compile(backend="aot_eager")
        torch.manual_seed(1)
        one(torch.randn(4, 8)).square().mean().backward()
    for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


def test_layers_of_transformers_are_left_to_their_own_way() -> None:
    """It does not fill the cache of keys and values twice; they are known by the name of their base class."""

    class GradientCheckpointingLayer(Block):
        gradient_checkpointing = False

    model = net()
    model.blocks[1] = GradientCheckpointingLayer()
    checkpoint_activations(model, ["blocks.*"])
    layer: Any = model.blocks[1]
    assert layer.gradient_checkpointing
    assert type(layer) is GradientCheckpointingLayer
    assert torch.equal(vars(layer)["_gradient_checkpointing_func"](torch.neg, torch.ones(2)), -torch.ones(2))


class Normed(nn.Sequential):
    """A model whose statistics move with each forward."""


@pytest.mark.parametrize(
    ("model", "globs", "said"),
    [
        (net(), None, "the Net has no gradient_checkpointing_enable(), as models of transformers have"),
        (net(), ["layers.*"], 'no module of the Net has a name like "layers.*"'),
        (Normed(nn.Linear(2, 2), nn.BatchNorm1d(2)), ["*"], "1 is a BatchNorm1d, which would count each batch twice"),
        (Normed(nn.utils.spectral_norm(nn.Linear(2, 2))), ["*"], "0 has a spectral norm, whose estimate moves in each forward"),
        (
            Normed(nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))), ["*"],
            "0.parametrizations.weight.0 has a spectral norm, whose estimate moves in each forward",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(model: nn.Module, globs: list[str] | None, said: str) -> None:
    """With the key, and what to write instead; nothing is changed before."""
    classes = [type(module) for module in model.modules()]
    with pytest.raises(JobKeyError) as caught:
        checkpoint_activations(model, globs)
    assert caught.value.message.endswith(said)
    assert caught.value.key == "train.gradient_checkpointing"
    assert caught.value.remedy
    if isinstance(model, Net):
        assert 'gradient_checkpointing = ["blocks.*"]' in caught.value.remedy
    assert classes == [type(module) for module in model.modules()]
