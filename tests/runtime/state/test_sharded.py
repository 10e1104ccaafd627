"""State of a model that `fully_shard` has cut: DTensors are told apart by their rows' memory, and rows are what is stored and loaded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of
from elasticflow.runtime.process.torch_private import HashStore
from elasticflow.runtime.snapshot.unsaved import Unsaved
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from elasticflow.runtime.state.state import Captured


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Be the only rank of a group."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tied(nn.Module):
    """Two layers of one shape, a third with the first one's weight, and state that `get_extra_state` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3, bias=False) for _ in range(3))
        self.third.weight = self.first.weight
        self.slow: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        """Return the last layer's output."""
        result: Tensor = self.third(self.second(self.first(x)))
        return result

    def get_extra_state(self) -> Any:
        """Return a slow copy of the second weight."""
        return {"slow": self.slow}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.slow = state["slow"]


def made() -> Tied:
    """Return a sharded model of other values each time."""
    model = Tied()
    fully_shard(model, mesh=DeviceMesh("cpu", [0]))
    model.slow = {"second": model.second.weight.detach().clone()}
    return model


def content(captured: Captured) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a state as a snapshot would hold it."""
    return captured.tree, {key: tensor.clone() for key, tensor in captured.tensors.items()}


def test_dtensors_without_an_address_are_told_apart_and_ties_are_kept() -> None:
    """`data_ptr()` of each is 0: taken for an address, one of two would stand for both."""
    model = made()
    assert 0 == model.first.weight.data_ptr() == model.second.weight.data_ptr()
    captured = State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0)).capture()
    stored = {"model/first.weight", "model/second.weight", "model/_extra_state/slow/second"}
    assert stored == captured.tensors.keys()
    assert {"model/third.weight": "model/first.weight"} == captured.aliases
    for key in ("first", "second"):
        part = local_of(model.get_submodule(key).weight)  # type: ignore[arg-type]
        assert torch.equal(part, captured.tensors[f"model/{key}.weight"])
        assert f"model/{key}.weight" in captured.stepped


def test_a_state_after_an_evaluation_is_of_this_ranks_rows() -> None:
    """A forward without a backward leaves the root's parameters gathered: other objects, of other memory."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state, before = State(model=model, optimizer=optimizer), list(model.parameters())
    first = state.capture()
    with torch.no_grad():
        model(torch.ones(2, 3))
    assert not any(map(is_sharded, model.parameters()))
    again = state.capture()
    assert all(now is was for now, was in zip(model.parameters(), before, strict=True))
    assert first.tensors.keys() == again.tensors.keys()
    for key, tensor in first.tensors.items():
        assert tensor.data_ptr() == again.tensors[key].data_ptr(), key


def test_what_get_extra_state_shares_out_is_loaded_shared_out() -> None:
    """In a dict of its own, as the object has it now."""
    source, target = made(), made()
    tree, tensors = content(State(model=source, optimizer=torch.optim.SGD(source.parameters())).capture())
    assert not torch.equal(local_of(source.slow["second"]), local_of(target.slow["second"]))
    State(model=target, optimizer=torch.optim.SGD(target.parameters())).apply(tree, tensors, {})
    assert is_sharded(target.slow["second"])
    for found, expected in (
        (target.slow["second"], source.slow["second"]),
        (target.second.weight, source.second.weight),
    ):
        assert torch.equal(local_of(found), local_of(expected))


class Plain(nn.Module):
    """Layers, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return the head's output."""
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(x)
        return result


def trained() -> tuple[Plain, torch.optim.Optimizer]:
    """Return a model of which each layer and the rest are sharded, after a step, and its optimizer."""
    model = Plain()
    for module in (*model.layers, model):
        fully_shard(module, mesh=DeviceMesh("cpu", [0]))
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    return model, optimizer


def train(model: Plain, optimizer: torch.optim.Optimizer) -> None:
    """Make a step."""
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def held(captured: Captured) -> tuple[Any, ...]:
    """Return all that a snapshot would hold, as values that can be compared."""
    values = {key: tensor.tolist() for key, tensor in captured.tensors.items()}
    return captured.tree, values, captured.aliases, captured.frozen, captured.boxes


def test_a_sharded_model_is_not_read_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a step nor after an evaluation: hooks that torch itself registers add nothing."""
    model, optimizer = trained()
    state = State(model=model, optimizer=optimizer)
    first = state.capture()
    monkeypatch.setattr(model, "state_dict", None)
    train(model, optimizer)
    with torch.no_grad():
        model(torch.ones(2, 3))
    again = state.capture()
    assert again.tensors is first.tensors
    assert again.tree["model"] is first.tree["model"]
    monkeypatch.undo()
    assert held(State(model=model, optimizer=optimizer).capture()) == held(again)


def _freeze(model: Plain) -> None:
    model.layers[1].requires_grad_(requires_grad=False)


def _more_buffers(model: Plain) -> None:
    model.layers[0].register_buffer("count", torch.ones(2))


def _new_buffer(model: Plain) -> None:
    model.mean = torch.ones(3)


def _other_parameter(model: Plain) -> None:
    first: Any = model.layers[0]
    other: Any = model.layers[1]
    first.bias = nn.Parameter(other.bias.detach() * 2 + 1)


def _other_rows(model: Plain) -> None:
    part: Any = model.head.weight
    part._local_tensor = part._local_tensor.detach() + 1


def _hook(model: Plain) -> None:
    def rename(module: nn.Module, state: dict[str, Any], *_: object) -> None:
        state["head.BIAS"] = state.pop("head.bias")

    model.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]


def _hook_before(model: Plain) -> None:
    def note(module: Any, *_: object) -> None:
        module.mean.copy_(local_of(module.head.bias).detach())

    model.register_state_dict_pre_hook(note)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "change",
    [_freeze, _more_buffers, _new_buffer, _other_parameter, _other_rows, _hook, _hook_before],
    ids=lambda change: change.__name__,
)
def test_a_change_of_a_sharded_model_is_seen(change: Callable[[Plain], None]) -> None:
    """After it, and after one more step, a state that was read before is that of one read for the first time."""
    model, optimizer = trained()
    state = State(model=model, optimizer=optimizer)
    before = held(state.capture())
    assert before == held(state.capture())
    change(model)
    for _ in range(2):
        now = held(state.capture())
        assert before != now
        assert now == held(State(model=model, optimizer=optimizer).capture())
        local_of(model.head.bias).data += 1


class Late:
    """An object that has no tensors before its first step."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state."""
        self.mean = state["mean"]


def test_an_object_that_makes_its_tensors_late_gets_them_back() -> None:
    """A new one has none to compare with when it loads."""
    model, late, new = made(), Late(), Late()
    late.mean = model.second.weight.detach() * 2
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    tree, tensors = content(State(**parts, include={"late": late}).capture())
    State(**parts, include={"late": new}).apply(tree, tensors, {})
    assert new.mean is not None
    assert torch.equal(local_of(late.mean), local_of(new.mean))


def test_a_sharded_tensor_that_training_changes_and_no_snapshot_holds_is_named() -> None:
    """Its `_version` stays 0 whatever is written: values are compared."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hidden = model.second.weight.detach().clone()
    model.second.hidden = hidden
    state = State(model=model, optimizer=optimizer)
    events: list[Any] = []
    me: Any = SimpleNamespace(
        rank=0, world_size=1, generation=1, event=lambda *_, **fields: events.append(fields), all_true=bool,
        gather_text=lambda text: [text], event_once=lambda *_, **fields: events.append(fields),
    )  # fmt: skip
    unsaved = Unsaved(me, state)
    unsaved.begin()
    told = ""
    for _ in range(2):
        local_of(hidden).add_(1)  # as an optimizer writes its parameters
        assert 0 == hidden._version
        try:
            unsaved.after_step()
        except StateError as error:
            told = error.message
    assert "hidden" in told + str(events)
