"""Parameters in groups: each in the first that takes it, in one order, and a group that takes none is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticflow.errors import JobKeyError
from elasticflow.runtime.process.torch_private import COMPILED_MODEL
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.param_groups import (
    REST,
    Group,
    parameter_groups,
    require_options,
    taken_by,
)


class Block(nn.Module):
    """A layer and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)


class Net(nn.Module):
    """Two blocks between an embedding and a head that share their weights, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(()))


def names(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each group."""
    by_id = {id(p): name for name, p in model.named_parameters()}
    return {group["name"]: [by_id[id(p)] for p in group["params"]] for group in groups}


ALL = [name for name, _ in Net().named_parameters()]
CASES: list[tuple[Group, list[str]]] = [
    (Group(match="*.bias"), [name for name in ALL if name.endswith("bias")]),
    (Group(match=["*.bias", "*norm*"]), [name for name in ALL if "bias" in name or "norm" in name]),
    (Group(match="blocks.[1].*"), [name for name in ALL if name.startswith("blocks.1")]),
    (Group(ndim=2), ["embed.weight", "blocks.0.linear.weight", "blocks.1.linear.weight"]),
    (Group(ndim=[0, 1]), [name for name in ALL if "norm" in name or "bias" in name or name == "scale"]),
    (Group(module=nn.LayerNorm), [name for name in ALL if "norm" in name]),
    (Group(module=Block), [name for name in ALL if name.startswith("blocks")]),  # what is inside it, too
    (Group(module=Net), ALL),
    (Group(module=[nn.LayerNorm, nn.Embedding], match="*.weight"), [n for n in ALL if "norm.weight" in n or "embed" in n]),
    (Group(match="head.weight"), ["embed.weight"]),  # by any of its names
    (Group(module=nn.Linear, ndim=1), ["blocks.0.linear.bias", "blocks.1.linear.bias"]),
]  # fmt: skip


@pytest.mark.parametrize(("group", "expected"), CASES)
def test_a_group_takes_what_fits_all_that_it_asks_for(group: Group, expected: list[str]) -> None:
    """By name, by dimensions, by the class of a module around it; all others are the rest."""
    model = Net()
    found = names(parameter_groups(model, [group]), model)
    assert found.pop(group.label) == sorted(expected, key=ALL.index)
    assert sorted(found.get(REST, [])) == sorted(set(ALL) - set(expected))


def test_no_decay_in_two_lines() -> None:
    """The groups have their options, the rest those of all; the optimizer is torch's own."""
    model = Net()
    groups = [Group(ndim=[0, 1], args={"weight_decay": 0.0}), Group(module=nn.Embedding, args={"lr": 0.1})]
    optimizer = torch.optim.AdamW(parameter_groups(model, groups), lr=1.0, weight_decay=0.5)
    options = [(g["name"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert options == [("ndim 0 or 1", 1.0, 0.0), ("Embedding", 0.1, 0.5), (REST, 1.0, 0.5)]
    told = list(taken_by(optimizer, groups))
    assert [(each["tensors"], each["parameters"]) for each in told] == [(7, 25), (1, 20), (2, 32)]
    assert told[0]["args"] == {"weight_decay": 0.0}


@given(
    st.lists(
        st.builds(
            Group,
            match=st.sampled_from([None, "*bias", "*norm*", "blocks.0*", "*"]),
            ndim=st.sampled_from([None, 1, [0, 2]]),
            module=st.sampled_from([None, nn.Linear, [nn.LayerNorm, nn.Embedding]]),
        ),
        max_size=3,
    )
)
def test_every_parameter_is_in_one_group_in_one_order(groups: list[Group]) -> None:
    """Twice the same, and within a group as the model has them; or a group that takes none is refused, both times."""
    made = [_made(groups), _made(groups)]
    assert made[0] == made[1]
    for numbers in made[0] if isinstance(made[0], list) else ():
        assert numbers == sorted(numbers)
    if isinstance(made[0], list):
        assert sorted(number for numbers in made[0] for number in numbers) == list(range(len(ALL)))


def _made(groups: list[Group]) -> list[list[int]] | str:
    """Return the numbers of each group's parameters in a new model, or the key that is refused."""
    model = Net()
    order = {id(p): number for number, p in enumerate(model.parameters())}
    try:
        return [[order[id(p)] for p in group["params"]] for group in parameter_groups(model, groups)]
    except JobKeyError as error:
        return error.key


NOTHING: list[tuple[list[Group], str, str]] = [
    ([Group(match="*.biass")], "none of the Net is *.biass", "linear.bias of a Linear, ndim 1"),
    ([Group(ndim=1), Group(match="*nrom.weight")], "nrom", "norm.weight"),
    ([Group(match="encoder.*", name="first")], "none of the Net is encoder.*", "the nearest are"),
    ([Group(ndim=[3, 4])], "none of the Net is ndim 3 or 4", "ndim 2"),
    ([Group(module=nn.Conv2d)], "none of the Net is Conv2d", "LayerNorm"),
    ([Group(ndim=1), Group(match="*.bias")], "4 by groups[0]", "put it first"),
    ([Group(ndim=2, match="*.bias")], "none of the Net is *.bias, ndim 2", ".bias of a Linear, ndim 1"),
]


@pytest.mark.parametrize(("groups", "message", "remedy"), NOTHING)
def test_a_group_that_takes_nothing_is_told(groups: list[Group], message: str, remedy: str) -> None:
    """At its key, with the nearest parameters there are, or the group that took them."""
    with pytest.raises(JobKeyError) as told:
        parameter_groups(Net(), groups)
    assert told.value.key == f"optimizer.groups.{len(groups) - 1}"
    assert message in told.value.message
    assert remedy in (told.value.remedy or "")


def test_names_that_differ_in_numbers_only_are_told_once() -> None:
    """Of a hundred layers one is enough to see how they are called."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    with pytest.raises(JobKeyError) as told:
        parameter_groups(model, [Group(match="*.biases")])
    assert told.value.remedy == "the nearest are: 0.bias of a Linear, ndim 1, 0.weight of a Linear, ndim 2"


def test_a_lazy_parameter_has_no_dimensions_yet() -> None:
    """Its name and its module can be asked for."""
    model = nn.Sequential(nn.LazyLinear(2))
    assert len(parameter_groups(model, [Group(match="*.bias")])) == 2
    with pytest.raises(JobKeyError, match="no dimensions yet"):
        parameter_groups(model, [Group(ndim=1)])


def test_a_compiled_model_has_the_names_of_the_model() -> None:
    """Where the job's own code compiles it: torch holds the model under a name of its own."""
    model = nn.ModuleDict({COMPILED_MODEL: Net()})
    made = parameter_groups(model, [Group(match="blocks.0.linear.*"), Group(module=nn.LayerNorm)])
    assert [len(group["params"]) for group in made] == [2, 4, 4]


def test_an_option_that_the_optimizer_does_not_have_is_told() -> None:
    """It would change nothing; an optimizer without defaults reads its groups itself."""
    groups = [Group(ndim=1, args={"weigth_decay": 0.0})]
    optimizer = torch.optim.SGD(parameter_groups(Net(), groups), lr=1.0)
    with pytest.raises(JobKeyError, match="SGD has no option `weigth_decay`") as told:
        require_options(optimizer, groups)
    assert told.value.key == "optimizer.groups.0.args.weigth_decay"
    optimizer.defaults.clear()
    require_options(optimizer, groups)


def test_other_groups_do_not_take_over_a_state() -> None:
    """What moved from one group to another is named, and nothing is loaded."""

    def state_of(*groups: Group) -> State:
        model = Net()
        return State(model=model, optimizer=torch.optim.SGD(parameter_groups(model, groups), lr=1.0))

    captured = state_of(Group(match="*.bias")).capture()
    args = captured.tree, captured.tensors, captured.memory_formats
    state_of(Group(match="*.bias")).apply(*args)
    for other, message in (
        (Group(match="*norm*"), "is blocks.0.linear.bias"),
        (Group(ndim=2), "group 0 has 4"),
    ):
        with pytest.raises(Exception, match="does not fit the job's optimizer") as told:
            state_of(other).apply(*args)
        assert message.split()[-1] in str(told.value)
