"""What is read again only when it changed is never stale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from elasticflow.runtime.snapshot.rank_shard import ShardPlanner
from elasticflow.runtime.state.state import State
from tests.runtime.stored import bits, take_step

if TYPE_CHECKING:
    from collections.abc import Callable


class Net(nn.Module):
    """A model with a buffer, a scalar and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(()))
        self.last.weight = self.first.weight
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        outputs: Tensor = self.last(self.norm(self.first(inputs))) * self.scale
        return outputs


def built(make: Callable[..., Optimizer] = AdamW) -> tuple[Net, Optimizer, dict[str, Any]]:
    """Return a model and an optimizer after two steps, and all parts of their state."""
    model = Net()
    optimizer = make(model.parameters(), lr=0.01)
    schedule = OneCycleLR(optimizer, 0.1, total_steps=50, cycle_momentum=False)
    for number in range(2):
        take_step(model, optimizer, torch.randn(4, 3, generator=torch.Generator().manual_seed(number)))
        schedule.step()
    return model, optimizer, {"model": model, "optimizer": optimizer, "scheduler": schedule}


def content(state: State) -> tuple[Any, ...]:
    """Return all that a snapshot would hold."""
    captured = state.capture()
    tensors = {key: bits(tensor) for key, tensor in captured.tensors.items()}
    return (
        captured.tree,
        tensors,
        captured.aliases,
        captured.memory_formats,
        captured.frozen,
        captured.stepped,
    )


def untie(model: Net, optimizer: Optimizer) -> None:
    """Give the tied weight memory of its own."""
    model.last.weight = nn.Parameter(model.first.weight.detach().clone() + 1)


def step(model: Net, optimizer: Optimizer) -> None:
    """Take a step."""
    take_step(model, optimizer, torch.randn(4, 3, generator=torch.Generator().manual_seed(5)))


def new_memory(model: Net, optimizer: Optimizer) -> None:
    """Give a parameter other memory under the same object."""
    model.first.bias.data = model.first.bias.data + 1


def turned(model: Net, optimizer: Optimizer) -> None:
    """Turn a parameter in its own memory."""
    model.first.weight.data = model.first.weight.data.t()


def freeze(model: Net, optimizer: Optimizer) -> None:
    """Freeze a layer."""
    model.norm.requires_grad_(False)


def new_buffer(model: Net, optimizer: Optimizer) -> None:
    """Put another buffer in the place of one."""
    model.mean = torch.ones(3)


def more_buffers(model: Net, optimizer: Optimizer) -> None:
    """Register one more buffer, deep inside."""
    model.norm.register_buffer("count", torch.ones(2))


def more_modules(model: Net, optimizer: Optimizer) -> None:
    """Add a module, and parameters to the optimizer."""
    model.extra = nn.Linear(2, 2)
    optimizer.add_param_group({"params": model.extra.parameters(), "lr": 0.5})


def other_module(model: Net, optimizer: Optimizer) -> None:
    """Put another module in the place of one."""
    model.norm = nn.BatchNorm1d(3)


def hook(model: Net, optimizer: Optimizer) -> None:
    """Change what state_dict gives."""

    def rename(module: nn.Module, state: dict[str, Any], *_: object) -> None:
        state["first.BIAS"] = state.pop("first.bias")

    model.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]


def hook_of_optimizer(model: Net, optimizer: Optimizer) -> None:
    """Change what the optimizer's state_dict gives."""
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})


def other_options(model: Net, optimizer: Optimizer) -> None:
    """Change an option and add one."""
    optimizer.param_groups[0]["weight_decay"] = 0.5
    optimizer.param_groups[0]["note"] = "x"


def tensor_option(model: Net, optimizer: Optimizer) -> None:
    """Make the learning rate a tensor."""
    optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def loaded(model: Net, optimizer: Optimizer) -> None:
    """Give the optimizer another state, in other memory."""
    state = {
        key: {k: v + 1 for k, v in inner.items()} for key, inner in optimizer.state_dict()["state"].items()
    }
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def emptied(model: Net, optimizer: Optimizer) -> None:
    """Throw the optimizer's state away."""
    optimizer.state.clear()


def own_state(model: Net, optimizer: Optimizer) -> None:
    """Add a number to the optimizer's state."""
    optimizer.state[model.scale]["note"] = 1


CHANGES = [
    untie, step, new_memory, turned, freeze, new_buffer, more_buffers, more_modules, other_module, hook,
    hook_of_optimizer, other_options, tensor_option, loaded, emptied, own_state,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_change_is_seen(change: Callable[..., None], make: Callable[..., Optimizer]) -> None:
    """After any change, twice over, a state that was read before is what one read for the first time is."""
    model, optimizer, parts = built(make)
    if change is own_state and make is SGD:
        optimizer.state[model.scale] = {}
    state = State(**parts)
    before, is_stateless = content(state), not any(optimizer.state.values())
    assert before == content(State(**parts)) == content(state)
    change(model, optimizer)
    assert content(State(**parts)) == content(state)
    assert before != content(state) or is_stateless
    optimizer.param_groups[0]["betas"] = (0.1, 0.2)
    with torch.no_grad():
        model.first.bias.add_(1)
    assert content(State(**parts)) == content(state)


def test_a_parameter_that_moves_to_the_next_group_is_seen() -> None:
    """The same parameters in the same order, in other groups."""
    model = Net()
    first, *others = model.parameters()
    groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "lr": 0.5}]
    optimizer = AdamW(groups)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    state = State(**parts)
    content(state)
    one, two = optimizer.param_groups
    two["params"].insert(0, one["params"].pop())
    assert content(State(**parts)) == content(state)


def test_nothing_is_read_again_while_nothing_changes() -> None:
    """From step to step the tensors, the shards and the views of a staging buffer are the same objects."""
    model, optimizer, parts = built()
    state, planner = State(**parts), ShardPlanner(0, 1)
    captured = state.capture()
    shard = planner.shard_of(captured)
    staged = memoryview(bytearray(shard.nbytes))
    views = shard.views_in(staged)
    step(model, optimizer)
    parts["scheduler"].step()
    again = state.capture()
    assert again.tensors is captured.tensors
    assert again.tree["model"] is captured.tree["model"]
    assert again.tree["optimizer"]["state"] is captured.tree["optimizer"]["state"]
    assert again.tree["scheduler"] != captured.tree["scheduler"]
    assert planner.shard_of(again) is shard
    assert shard.views_in(staged) is views
    shard.copy_into(staged)
    for key, tensor in again.tensors.items():
        assert bits(views[key]) == bits(tensor), key


class Counted:
    """An object of the job's own with tensors, a scalar and a number."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"sum": torch.zeros(3), "seen": torch.tensor(0), "calls": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensors."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state over."""
        self.state = state


def test_object_of_the_jobs_own_keeps_its_place() -> None:
    """As long as its tensors lie where they were they need no other shard; values and other parts are read anew."""
    parts = built()[2]
    own = Counted()
    state, planner = State(**parts, include={"own": own}), ShardPlanner(0, 1)
    shard = planner.shard_of(state.capture())
    own.state["sum"] += 1
    own.state["seen"] += 2
    own.state["calls"] = 3
    assert planner.shard_of(state.capture()) is shard
    assert content(State(**parts, include={"own": own})) == content(state)
    own.state["sum"] = own.state["sum"] + 1
    assert planner.shard_of(state.capture()) is not shard
    assert content(State(**parts, include={"own": own})) == content(state)
    own.state["seen"] = own.state["seen"] + 1
    own.state["sum"].untyped_storage().resize_(4096)
    assert content(State(**parts, include={"own": own})) == content(state)


def test_parameters_written_by_the_step_alone_are_known() -> None:
    """What a forward may write, and what is packed anew, is not taken for what only the optimizer writes."""
    model, _, _ = built()
    model.first.requires_grad_(False)
    optimizer = AdamW(model.norm.parameters())
    model.norm(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    captured = State(model=model, optimizer=optimizer).capture()
    assert captured.stepped == {
        "model/norm.weight", "model/norm.bias",
        *(f"optimizer/state/{number}/{moment}" for number in (0, 1) for moment in ("exp_avg", "exp_avg_sq")),
    }  # fmt: skip
    assert captured.frozen == {"model/first.weight", "model/first.bias"}


class Scaled(nn.Module):
    """A model with a parameter, and with buffers if wanted, that are single numbers."""

    def __init__(self, *, has_buffer: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        if has_buffer:
            self.register_buffer("seen", torch.tensor(0.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of scaled values."""
        return (values * self.scale).sum()


@pytest.mark.parametrize("has_buffer", [False, True])
def test_single_numbers_of_replicas_are_compared(has_buffer: bool) -> None:
    """A parameter without dimensions, and an optimizer's counters: only what lies beside a buffer may differ between ranks."""
    model = Scaled(has_buffer=has_buffer)
    optimizer = AdamW(model.parameters())
    model(torch.ones(3)).backward()
    optimizer.step()
    captured = State(model=model, optimizer=optimizer).capture()
    assert captured.tensors.keys() >= {"model/scalars/F32/cpu", "optimizer/scalars/F32/cpu"}
    assert captured.local == ({"model/scalars/F32/cpu"} if has_buffer else set())
