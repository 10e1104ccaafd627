"""What cannot be shared among ranks is refused before anything is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed import fake_pg

from elasticflow.errors import StateError
from elasticflow.runtime.process import process_group
from elasticflow.runtime.process.shard_layout import Sharding, ShardLayout
from elasticflow.runtime.training import model_buffers, shard_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WORKER: Any = SimpleNamespace(layout=ShardLayout(2, 0, 2), device=torch.device("cpu"), world_size=2)


class Adapter(nn.Module):
    """A layer, and one trained beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.lora = base, nn.Linear(2, 2)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """Return what both make of it."""
        outputs: torch.Tensor = self.base(value) + self.lora(value)
        return outputs


class Adapted(nn.Module):
    """A frozen layer in bf16 beside a trained one in float32, as peft leaves them; twice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        frozen = (nn.Linear(2, 2).bfloat16().requires_grad_(requires_grad=False) for _ in range(2))
        self.layers = nn.ModuleList(map(Adapter, frozen))
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


def test_the_whole_model_is_not_kept_while_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's memory is free as soon as the block is cut: what was sent to the other ranks holds none of it."""
    model, freed = Plain(), []
    monkeypatch.setattr(model_buffers, "send", lambda *_: None)
    monkeypatch.setattr(process_group, "new_group", lambda *_: None)

    def cut(*_: Any) -> None:
        weight = model.head.weight
        memory: Any = StorageWeakRef(weight.untyped_storage())  # type: ignore[no-untyped-call]
        model.head.weight = nn.Parameter(torch.ones(1, 2))
        del weight
        freed.append(memory.expired())

    monkeypatch.setattr(shard_model, "fully_shard_blocks", cut)
    worker: Any = SimpleNamespace(**vars(WORKER), identity=None)
    shard_model.shard_model(worker, model, Sharding(2))
    assert freed == [True]


class Plain(nn.Module):
    """Two layers in a list, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(2, 2) for _ in range(2)), nn.Linear(2, 2)


def sharded(group: Any, model: Plain) -> Plain:
    """Return the model, cut into the rows of one rank."""
    shard_model.fully_shard_blocks(model, model.layers, group, "cpu", Sharding(1))
    return model


def test_blocks_inside_of_blocks_may_be_named_in_any_order(alone: Any) -> None:
    """As by `model.modules()`, which gives the outer ones first."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    outer, inner = model[0], model.get_submodule("0.1")
    blocks = shard_model.blocks_of(model, Sharding(1), [outer, inner])
    assert blocks == [inner, outer]
    shard_model.fully_shard_blocks(model, blocks, alone, "cpu", Sharding(1))
    assert model(torch.ones(1, 2)).shape == (1, 2)


class _Noted(nn.Linear):
    """A layer that notes its backward pass."""

    events: list[str]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        product = super().forward(value)
        product.register_hook(lambda _: self.events.append("backward"))  # type: ignore[no-untyped-call]
        return product * 2


@pytest.fixture
def first_of_two() -> Iterator[Any]:
    """Be rank 0 of a group whose other rank does not exist: what is exchanged has any value; yield the group."""
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_no_block_is_gathered_ahead_where_gathering_waits(
    first_of_two: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would only take memory."""
    events: list[str] = []
    gather = DefaultAllGather.__call__

    def noting(*args: Any, **options: Any) -> Any:
        events.append("gather")
        return gather(*args, **options)

    monkeypatch.setattr(DefaultAllGather, "__call__", noting)
    monkeypatch.setattr(_Noted, "events", events, raising=False)
    model = nn.Sequential(*(_Noted(2, 2) for _ in range(3)))
    shard_model.fully_shard_blocks(model, list(model), first_of_two, "cpu", Sharding(2))
    loss = model(torch.ones(1, 2)).sum()
    events.clear()
    loss.backward()
    assert ["gather", "backward"] * 3 == events


def test_attributes_of_parameters_stay(alone: Any) -> None:
    """Scripts make groups of the optimizer by them."""
    model = Plain()
    for name in ("head.weight", "layers.0.weight"):
        vars(model.get_parameter(name))["kind"] = "decays"
    kinds = {name: getattr(p, "kind", None) for name, p in sharded(alone, model).named_parameters()}
    assert {"head.weight", "layers.0.weight"} == {name for name, kind in kinds.items() if kind == "decays"}


def test_random_numbers_for_rows_are_refused(alone: Any) -> None:
    """Each rank would draw the same for its own; values that are not drawn, and draws for plain tensors, are fine."""
    model = sharded(alone, Plain())
    nn.init.ones_(model.head.weight)
    nn.init.normal_(torch.zeros(2))
    with pytest.raises(StateError, match="random numbers were drawn into a sharded tensor"):
        nn.init.xavier_uniform_(model.head.weight)


def test_an_optimizer_of_a_model_that_was_sharded_afterwards_is_refused(alone: Any) -> None:
    """It has the parameters that were; an optimizer of the rows is fine, and so is the first if nobody shares the model."""
    model = Plain()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    shard_model.require_made_after(model, [early])
    sharded(alone, model)
    shard_model.require_made_after(model, [early, torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(StateError, match="the optimizer moves no parameter of the sharded model"):
        shard_model.require_made_after(model, [early])


def _paired(model: Plain) -> None:
    """Let each element be a list of an attention and a feed-forward, as in many transformers."""
    model.layers = nn.ModuleList(nn.ModuleList([layer, nn.Linear(2, 2)]) for layer in model.layers)


def _compiled(model: Plain) -> None:
    model.compile()


def _twice(model: Plain) -> None:
    model.layers[1] = model.layers[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, as it compiles
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda m: setattr(m.head, "scale", nn.Parameter(torch.zeros(()))), "head.scale has no dimension"),
        (lambda m: setattr(m.head, "none", nn.Parameter(torch.zeros(0, 3))), "head.none has no elements"),
        (
            lambda m: setattr(m.head, "turned", nn.Parameter(torch.zeros(3, 2).T)),
            "head.turned is not contiguous",
        ),
        (lambda m: setattr(m, "norm", nn.SyncBatchNorm(2)), "norm is a SyncBatchNorm"),
        (
            lambda m: setattr(m.layers[1], "weight", m.layers[0].weight),
            "layers.1.weight is the same parameter as",
        ),
        (_twice, "layers.0 is named twice among the blocks"),
        (lambda m: m.head.weight.register_hook(torch.neg), "head.weight has a hook on its gradient"),
        (_compiled, "the model is compiled as a whole"),
        (_paired, "layers.0 is a ModuleList without a forward"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_name(change: Callable[[Plain], None], named: str) -> None:
    """The module or parameter, the reason, and a remedy."""
    model = Plain()
    assert list(model.layers) == shard_model.blocks_of(model, Sharding(2))
    change(model)
    with pytest.raises(StateError, match=named) as refused:
        shard_model.blocks_of(model, Sharding(2))
    assert refused.value.remedy


def test_blocks_that_are_no_part_of_the_model_are_refused() -> None:
    """A module of another model, and the model itself."""
    model = Plain()
    for block in (nn.Linear(2, 2), model):
        with pytest.raises(StateError, match="is no part of the model"):
            shard_model.blocks_of(model, Sharding(2), [block])
