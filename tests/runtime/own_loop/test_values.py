"""Plain values and generators in snapshots: what was put in comes out, in the script's own objects."""

from __future__ import annotations

import copy
import json
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from elasticflow.errors import StateError
from elasticflow.runtime.own_loop.kept import own_objects, parts_of, values_of
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable


def state_with(**values: Any) -> State:
    """Return the state of a model, an optimizer and these."""
    model = nn.Linear(1, 1)
    return State(**parts_of({"model": model, "optimizer": SGD(model.parameters()), **values}))


def stored(state: State) -> tuple[Any, dict[str, torch.Tensor], dict[str, str]]:
    """Return what a snapshot has of *state*, by way of JSON."""
    captured = state.capture()
    tensors = {key: tensor.clone() for key, tensor in captured.tensors.items()}
    return json.loads(json.dumps(captured.tree, allow_nan=False)), tensors, dict(captured.memory_formats)


def test_values_are_read_and_written_by_their_names() -> None:
    """After a restart they are what they were when the snapshot was taken, and not what `keep` is given then."""
    first = state_with(best=float("inf"), patience=3, name="a", on=True, seen={"a": [1]}, nothing=None)
    kept = values_of(first)
    assert dict(kept) == {
        "best": float("inf"), "patience": 3, "name": "a", "on": True, "seen": {"a": [1]}, "nothing": None,
    }  # fmt: skip
    kept["patience"] -= 1
    kept["seen"]["a"].append(2)

    again = state_with(best=float("inf"), patience=3, name="a", on=True, seen={"a": [1]}, nothing=None)
    again.apply(*stored(first))
    assert dict(values_of(again)) == {**dict(kept), "patience": 2, "seen": {"a": [1, 2]}}
    assert own_objects(again) == []


def test_a_list_a_dict_and_a_tensor_stay_the_scripts_own() -> None:
    """An average made by hand is a dict of tensors: the same tensors, with the snapshot's values."""
    first = state_with(history=[1.0, 2.0], average={"w": torch.ones(2)}, counts=torch.arange(3))
    history: list[float] = []
    average, counts = {"w": torch.zeros(2)}, torch.zeros(3, dtype=torch.int64)
    weight = average["w"]
    state_with(history=history, average=average, counts=counts).apply(*stored(first))
    assert history == [1.0, 2.0]
    assert average["w"] is weight
    assert weight.tolist() == [1.0, 1.0]
    assert counts.tolist() == [0, 1, 2]


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (lambda: torch.Generator().manual_seed(1), lambda g: torch.rand(2, generator=g).tolist()),
    "python": (lambda: random.Random(1), lambda g: (g.random(), g.gauss(0, 1))),
    "numpy": (lambda: np.random.default_rng(1), lambda g: (g.random(), g.integers(9, dtype=np.uint8))),
    "philox": (lambda: np.random.Generator(np.random.Philox(1)), lambda g: g.random(3).tolist()),
    "mt19937": (lambda: np.random.Generator(np.random.MT19937(1)), lambda g: g.random(3).tolist()),
    "sfc64": (lambda: np.random.Generator(np.random.SFC64(1)), lambda g: g.random(3).tolist()),
    "old numpy": (lambda: np.random.RandomState(1), lambda g: (g.rand(), g.normal())),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_goes_on_where_it_was(name: str) -> None:
    """Of every kind, in place."""
    make, draw = GENERATORS[name]
    generator = make()
    draw(generator)
    saved = stored(state_with(rng=generator))
    expected = draw(generator)

    again = make()
    state_with(rng=again).apply(*saved)
    assert draw(again) == expected


def test_a_generator_of_another_kind_is_refused() -> None:
    """Philox is no PCG64."""
    saved = stored(state_with(rng=np.random.default_rng(1)))
    with pytest.raises(StateError, match=r"include.rng: the generator is a Philox now"):
        state_with(rng=np.random.Generator(np.random.Philox(1))).apply(*saved)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, {"a": object()}], "best/1/a is a builtins.object"),
        ({(1, nn): 3}, "best has a key that is a builtins.module"),
        (lambda: 3, "include.best is a builtins.function, without a `state_dict`"),
    ],
)
def test_what_a_snapshot_cannot_hold_is_refused_at_keep(value: Any, text: str) -> None:
    """By its place in the value."""
    with pytest.raises(StateError, match=text) as refused:
        state_with(best=value)
    assert refused.value.remedy


def test_a_mapping_has_the_names_that_keep_was_given() -> None:
    """Another one is a slip of the pen; what cannot be stored is refused where it is written."""
    kept = values_of(state_with(best=0.0))
    assert list(kept) == ["best"]
    assert "bets" not in kept
    with pytest.raises(StateError, match="no plain value called 'bets'; it was given: best"):
        kept["bets"] = 3
    with pytest.raises(StateError, match="no plain value called 'bets'"):
        kept.get("bets")
    with pytest.raises(StateError, match=r"best is a builtins.set, which a snapshot cannot hold"):
        kept["best"] = {3}
    with pytest.raises(StateError, match="cannot be taken away"):
        del kept["best"]
    assert copy.copy(dict(kept)) == {"best": 0.0}
    assert repr(kept) == "{'best': 0.0}"
