"""A model that is built without memory and filled in later has every bit of one that the same code builds at once."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from elasticflow.errors import StateError
from elasticflow.runtime.process.shard_layout import ShardLayout
from elasticflow.runtime.training import deferred_build
from elasticflow.runtime.training.deferred_build import DeferredBuild
from elasticflow.runtime.training.shard_model import shard_model
from examples.gpt.gpt import GPT, GPTConfig

if TYPE_CHECKING:
    from collections.abc import Callable


class Waves(nn.Module):
    """Buffers computed from others, written through views, and one that is not stored."""

    waves: Tensor

    def __init__(self) -> None:
        super().__init__()
        waves, places = torch.zeros(100, 16), torch.arange(100).unsqueeze(1).float()
        steps = torch.exp(torch.arange(0, 16, 2).float() * -0.5)
        waves[:, 0::2], waves[:, 1::2] = torch.sin(places * steps), torch.cos(places * steps)
        self.register_buffer("waves", waves.unsqueeze(0))
        self.register_buffer("mask", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)


class Initialized(nn.Module):
    """Whatever sets values: initializers that read what they drew, other generators, other values, other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 50)
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        nn.init.orthogonal_(self.first.weight[:20])
        with torch.no_grad():
            self.first.weight[3:5].mul_(3)
            self.first.bias.copy_(torch.arange(50) / 7)
        self.own = nn.Parameter(torch.randn(20, 20, generator=torch.Generator().manual_seed(4)) * 0.1)
        self.copied = nn.Parameter(self.first.weight.detach().clone() * 2, requires_grad=False)
        self.narrow = nn.Linear(20, 20).bfloat16()
        self.moved = nn.Linear(20, 20)
        self.moved.weight.data = self.moved.weight.data.normal_(0, 0.1).to(torch.float64).float()
        self.told = nn.Parameter(torch.tensor([float(number) for number in range(30)]))
        self.numpy = nn.Parameter(torch.from_numpy(np.random.rand(20, 2)))  # noqa: NPY002
        with torch.no_grad():
            self.first.weight.mul_(random.random())
            if self.first.weight.device.type == "cpu" and not self.first.weight.is_meta:
                self.first.weight.div_(self.first.weight.std())
        self.scale = float(self.first.weight.detach().abs().max())


def tied() -> nn.Module:
    """Return an embedding and a head of one weight, the row of one word zero."""
    model = nn.ModuleDict({"embed": nn.Embedding(40, 30, padding_idx=0), "head": nn.Linear(30, 40)})
    model["head"].weight = model["embed"].weight
    return model


class Indexed(nn.Module):
    """Values that are set by masks and by numbers of rows, and weights that are put in the place of others."""

    def __init__(self) -> None:
        super().__init__()
        self.masked, self.placed, self.sorted = (nn.Linear(20, 20) for _ in range(3))
        nn.init.sparse_(self.masked.weight, 0.3)
        self.masked.weight.data[self.masked.weight.data < 0] = 0.5
        self.masked.weight.data[torch.arange(3)] = 2.0
        self.placed.weight.data = torch.from_numpy(np.random.rand(20, 20)).float()  # noqa: NPY002
        self.sorted.weight.data = self.sorted.weight.data[torch.randperm(20)]


class Drawn(nn.Module):
    """Random numbers whose kind, and how many are drawn for them, depends on other values."""

    def __init__(self) -> None:
        super().__init__()
        chances = torch.rand(20, 20)
        self.kept = nn.Parameter(torch.bernoulli(chances))
        self.rates = nn.Parameter(torch.poisson(chances * 30))
        self.shapes = nn.Parameter(torch.distributions.Gamma(chances + 0.1, 1.0).sample())
        self.spread = nn.Parameter(torch.normal(chances, chances))


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(GPTConfig(61)),
    "waves": Waves,
    "initialized": Initialized,
    "tied": tied,
    "indexed": Indexed,
    "drawn": Drawn,
    # Torch leaves the weight as it is where an operation says that it is not implemented.
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(20, 20)),
    "lstm": lambda: nn.LSTM(16, 16),
    "attention": lambda: nn.MultiheadAttention(32, 4),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(32)),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(20, 20)),
}


@pytest.fixture(autouse=True)
def small_tensors_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of a few elements wait for their values, too."""
    monkeypatch.setattr(deferred_build, "LEAST", 8)


def seeded(build: Callable[[], Any]) -> Any:
    """Return what *build* returns, from one state of all generators."""
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    torch.manual_seed(3)
    return build()


def next_draws() -> tuple[Any, ...]:
    """Return what the generators give next."""
    return random.random(), np.random.rand(), torch.rand(3).tolist()  # noqa: NPY002


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, all names of those that have several."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(model.named_buffers(remove_duplicate=False))}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_bit_is_that_of_a_model_built_at_once(name: str) -> None:
    """So are strides, dtypes, ties and what takes gradients; and the generators are left in the same state."""
    whole, draws = seeded(lambda: (BUILDERS[name](), next_draws()))
    build = DeferredBuild()
    model, others = seeded(lambda: (build.call(BUILDERS[name]), next_draws()))
    assert draws == others
    assert any(tensor.is_meta for tensor in tensors_of(model).values())
    build.fill(model)
    expected, found = tensors_of(whole), tensors_of(model)
    assert expected.keys() == found.keys()
    for key, tensor in expected.items():
        other = found[key]
        assert (tensor.dtype, tensor.stride(), tensor.requires_grad) == (
            other.dtype,
            other.stride(),
            other.requires_grad,
        ), key
        assert torch.equal(tensor, other), key
        assert type(tensor) is type(other), key
    names = [[key for key in found if found[key] is tensor] for tensor in found.values()]
    assert names == [[key for key in expected if expected[key] is each] for each in expected.values()]
    assert getattr(whole, "scale", None) == getattr(model, "scale", None)


def test_blocks_are_filled_one_by_one_and_so_is_an_average() -> None:
    """The others have no memory meanwhile; the average is a copy of its own."""
    whole, build = seeded(BUILDERS["gpt"]), DeferredBuild()
    model = seeded(lambda: build.call(BUILDERS["gpt"]))
    average = build.call(AveragedModel, model)
    for number, block in enumerate(model.blocks):
        build.fill(block)
        assert [other > number for other in range(len(model.blocks))] == [
            each.qkv.weight.is_meta for each in model.blocks
        ]
    build.fill(model)
    build.fill(average.module)
    for key, tensor in tensors_of(whole).items():
        own, averaged = tensors_of(model)[key], tensors_of(average.module)[key]
        assert torch.equal(tensor, own)
        assert torch.equal(tensor, averaged)
        assert own.data_ptr() != averaged.data_ptr()


def test_where_a_snapshot_is_loaded_nothing_that_it_holds_gets_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A buffer that no snapshot holds has its values; all else has memory of the right form, ties and flags."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = tied(), nn.BatchNorm1d(20)
            self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)
            self.layer.get_parameter("embed.weight").requires_grad = False

    replayed: list[Any] = []
    build = DeferredBuild(resumes=True)
    compute = build._replayed

    def replay(storage: Any) -> Any:
        replayed.append(compute(storage))
        return replayed[-1]

    monkeypatch.setattr(build, "_replayed", replay)
    whole, model = seeded(Masked), seeded(lambda: build.call(Masked))
    build.fill(model)
    assert 1 == len(replayed)
    assert torch.equal(whole.mask, model.mask)
    assert model.layer["head"].weight is model.layer["embed"].weight
    assert not model.layer["head"].weight.requires_grad
    model.load_state_dict(whole.state_dict())
    for key, tensor in tensors_of(whole).items():
        assert torch.equal(tensor, tensors_of(model)[key]), key


def test_a_tensor_that_is_no_state_of_the_model_is_refused_by_name() -> None:
    """Nothing would ever give it values."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.ones(64, 64)

    build = DeferredBuild()
    model = build.call(lambda: nn.Sequential(Masked()))
    with pytest.raises(
        StateError, match="0 has a tensor mask of 4096 elements that is neither parameter nor buffer"
    ):
        build.fill(model)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_parameter_that_the_code_itself_leaves_without_memory_is_refused_by_name(resumes: bool) -> None:
    """Its own use of the meta device gives no values; what it gives memory and values to has these."""
    build = DeferredBuild()
    layer = build.call(lambda: nn.Linear(20, 20, device="meta").to_empty(device="cpu"))
    build.call(nn.init.ones_, layer.weight)
    build.fill(layer)
    assert torch.equal(torch.ones(20, 20), layer.weight)
    build = DeferredBuild(resumes=resumes)
    model = build.call(lambda: nn.Sequential(nn.Linear(20, 20, device="meta")))
    with pytest.raises(StateError, match=r"makes 0\.weight on the meta device itself"):
        build.fill(model)


def test_an_operation_that_writes_large_and_small_tensors_is_refused_by_name() -> None:
    """What it writes into the large ones would be lost."""
    layer = nn.Linear(20, 20)

    def scaled() -> nn.Module:
        made = nn.Linear(20, 20)
        torch._foreach_mul_([made.weight.data, layer.bias.data], 2.0)
        return made

    with pytest.raises(StateError, match=r"_foreach_mul_.* writes large tensors and"):
        DeferredBuild().call(scaled)


def test_ranks_that_build_other_values_are_refused() -> None:
    """Each would keep its rows of another model, and no comparison would find it."""
    build, same, other = DeferredBuild(), DeferredBuild(), DeferredBuild()
    for each in (build, same):
        seeded(lambda each=each: each.call(Initialized))  # type: ignore[misc]
    assert build.digest == same.digest
    torch.manual_seed(4)
    model = other.call(Initialized)
    assert build.digest != other.digest
    worker: Any = SimpleNamespace(
        layout=ShardLayout(2, 0, 1), gather_text=lambda text: [text, build.digest], device=torch.device("cpu")
    )
    with pytest.raises(StateError, match="rank 1 builds a model with other values than rank 0"):
        shard_model(worker, model, None, build=other)


def test_without_shards_the_model_is_filled_in_and_moved() -> None:
    """As at degree 1."""
    build = DeferredBuild()
    model = seeded(lambda: build.call(BUILDERS["tied"]))
    worker: Any = SimpleNamespace(
        layout=ShardLayout(1, 0, 1), gather_text=lambda text: [text], device=torch.device("cpu")
    )
    shard_model(worker, model, None, build=build)
    assert torch.equal(seeded(BUILDERS["tied"])["embed"].weight, model["head"].weight)
