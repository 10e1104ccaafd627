"""A script's objects as parts of a snapshot: by their classes, values and generators in the script's own objects."""

from __future__ import annotations

import copy
import json
import random
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import Value, bare, own_objects, parts_by_name, parts_of, values_of
from elasticflow.runtime.loop.script_state import found_in
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def _state_of(objects: Mapping[str, Any]) -> State:
    return State(**parts_of(objects))


def left_out(state: State, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return class by name of what is told."""
    return {each.path: each.kind for each in found_in(state, variables) if each.is_told}


class Sampler:
    """Has a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"place": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""


def test_objects_are_known_by_their_classes() -> None:
    """Whatever they are called: model, optimizer, schedule, scaler, average, and what has a state."""
    net = nn.Linear(2, 2)
    descent = SGD(net.parameters())
    state = _state_of(
        {
            "net": net,
            "descent": descent,
            "rates": StepLR(descent, 1),
            "amp": torch.amp.GradScaler("cpu"),
            "average": AveragedModel(net),
            "sampler": Sampler(),
        }
    )

    assert set(state.objects) == {"model", "optimizer", "scheduler", "scaler", "ema", "include.sampler"}
    assert state.model is net


def test_several_optimizers_and_their_schedules() -> None:
    """A GAN: one model called `model`, the other by its name; optimizers in a mapping, schedules in a list."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    moves = {"g": SGD(first.parameters()), "d": AdamW(second.parameters())}
    rates = [StepLR(each, 1) for each in moves.values()]
    state = _state_of({"model": first, "critic": second, "moves": moves, "rates": rates})

    assert set(state.objects) == {
        "model", "include.critic", "optimizer.moves_g", "optimizer.moves_d", "include.rates_0", "include.rates_1",
    }  # fmt: skip


@pytest.mark.parametrize("is_first", [True, False])
def test_two_optimizers_do_not_share_a_name(is_first: bool) -> None:
    """One of them would be in no snapshot: the items of a list are called by the list's name and their number."""
    model = nn.Linear(2, 2)
    several, single = [SGD(model.parameters()) for _ in range(2)], SGD(model.parameters())
    given = {"opt": several, "opt_1": single} if is_first else {"opt_1": single, "opt": several}
    with pytest.raises(StateError, match="two objects for one name in snapshots: opt_1, and an item of opt"):
        parts_of({"model": model, **given})


def test_a_tensor_takes_no_other_form_and_no_two_values() -> None:
    """One zero that a dict began with at every key; sums that became more exact than the zero that they began with."""
    began = dict.fromkeys("ab", torch.zeros(2))
    saved = {"a": torch.ones(2), "b": torch.full((2,), 2.0), "c": torch.full((2,), 1 / 3).double()}
    value = Value("means", {**began, "c": torch.zeros(2)})
    value.load_state_dict(saved)

    assert value.value.keys() == saved.keys()
    for key, tensor in saved.items():
        assert value.value[key].dtype == tensor.dtype
        assert torch.equal(value.value[key], tensor)
    assert value.value["a"] is began["a"]


def test_several_scalers_are_all_kept() -> None:
    """One for each optimizer of a GAN; a scaler that is switched off has no state."""
    first = nn.Linear(2, 2)
    scalers = {name: torch.amp.GradScaler("cpu", enabled=name != "off") for name in ("off", "g", "d")}
    state = _state_of({"model": first, "optimizer": SGD(first.parameters()), **scalers})

    assert set(state.objects) == {"model", "optimizer", "scaler", "include.d"}
    assert state.objects["include.d"] is scalers["d"]


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch.compile imports it
def test_wrapped_models_are_kept_bare() -> None:
    """A snapshot has the same keys with DistributedDataParallel, torch.compile and without."""
    net = nn.Linear(2, 2)
    compiled: Any = torch.compile(net)
    wrapped = nn.DataParallel(compiled)

    assert bare(wrapped) is net
    assert _state_of({"model": wrapped, "optimizer": SGD(net.parameters())}).model is net


@pytest.mark.parametrize(
    ("objects", "text"),
    [
        ({"optimizer": SGD([nn.Parameter(torch.ones(1))])}, "was given none: no model"),
        ({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "was given a, b: no model called `model`"),
        ({"model": nn.Linear(1, 1)}, "was given no optimizer"),
        (
            {"model": (net := nn.Linear(1, 1)), "optimizer": SGD(net.parameters()), "seen": {3}},
            "include.seen is a builtins.set",
        ),
    ],
    ids=["no model", "two", "no optimizer", "no state"],
)
def test_what_cannot_be_kept_is_refused(objects: dict[str, Any], text: str) -> None:
    """With what to write instead."""
    with pytest.raises(StateError, match=text) as refused:
        _state_of(objects)

    assert refused.value.remedy


def test_what_was_forgotten_is_named() -> None:
    """Objects of the script with a state of their own; no parts of what is kept, no classes, no losses."""
    net = nn.Sequential(nn.Linear(2, 2))
    optimizer = SGD(net.parameters())
    variables = {
        "net": net,
        "replicas": nn.DataParallel(net),
        "layer": net[0],
        "optimizer": optimizer,
        "rates": StepLR(optimizer, 1),
        "criterion": nn.CrossEntropyLoss(),
        "off": torch.amp.GradScaler("cpu", enabled=False),
        "Sampler": Sampler,
        "number": 3,
        "_hidden": Sampler(),
    }

    assert left_out(_state_of({"model": net, "optimizer": optimizer}), variables) == {
        "rates": "torch.optim.lr_scheduler.StepLR"
    }


def test_what_accelerate_has_wrapped_is_kept_itself() -> None:
    """Its optimizer is none that hooks can be added to, and its schedule is none by its class."""
    accelerate = pytest.importorskip("accelerate")
    net = nn.Linear(2, 2)
    descent = SGD(net.parameters(), lr=0.1)
    rates = StepLR(descent, 1)
    loader = DataLoader(TensorDataset(torch.zeros(2, 2)))
    model, optimizer, scheduler, loader = accelerate.Accelerator(cpu=True).prepare(
        net, descent, rates, loader
    )
    state = _state_of({"model": model, "optimizer": optimizer, "scheduler": scheduler})
    assert {"model": net, "optimizer": descent, "scheduler": rates} == state.objects
    assert {} == left_out(
        state, {"optimizer": optimizer, "descent": descent, "rates": scheduler, "x": loader}
    )


@pytest.mark.filterwarnings("ignore:The `srun` command")  # where Slurm is installed
def test_what_fabric_has_wrapped_is_kept_itself() -> None:
    """Its modules and its optimizers."""
    fabric = pytest.importorskip("lightning_fabric")
    net = nn.Linear(2, 2)
    descent = SGD(net.parameters(), lr=0.1)
    model, optimizer = fabric.Fabric(accelerator="cpu", devices=1).setup(net, descent)
    state = _state_of({"model": model, "optimizer": optimizer})
    assert {"model": net, "optimizer": descent} == state.objects
    assert {} == left_out(state, {"model": model, "net": net, "descent": descent})


def test_parts_of_a_generated_entry_point_go_by_their_names() -> None:
    """What has no name that a state has is included, beside what the job file includes: a schedule of another class, too."""
    net, first, second = nn.Linear(2, 2), Sampler(), Sampler()
    parts = parts_by_name(
        {"model": net, "optimizer": SGD(net.parameters()), "include": {"first": first}, "second": second}
    )

    assert parts.keys() == {"model", "optimizer", "include"}
    assert parts["include"] == {"first": first, "second": second}
    assert {"include.first", "include.second"} <= State(**parts).objects.keys()


def test_an_optimizer_inside_an_object_is_named() -> None:
    """A schedule around it is no optimizer of torch."""
    model = nn.Linear(2, 1)
    schedule = SimpleNamespace(_optimizer=SGD(model.parameters(), lr=0.1))

    with pytest.raises(StateError, match=r"no optimizer: optimizer is a SimpleNamespace") as caught:
        parts_of({"model": model, "optimizer": schedule})

    assert "run.keep(optimizer=optimizer._optimizer)" in str(caught.value.remedy)


def test_an_optimizer_with_a_state_of_its_own_is_not_replaced_by_the_one_inside() -> None:
    """Lookahead, whose class does not call `Optimizer.__init__`, is refused: no hook tells of its steps."""

    class Lookahead(SGD):
        def __init__(self, optimizer: SGD) -> None:
            self.optimizer, self.param_groups, self.state = (
                optimizer,
                optimizer.param_groups,
                defaultdict(dict),
            )

    model = nn.Linear(2, 1)
    inner = SGD(model.parameters(), lr=0.1)
    wrapper = Lookahead(inner)

    with pytest.raises(StateError, match=r"slow, a Lookahead, is an optimizer around another one") as caught:
        parts_of({"model": model, "slow": wrapper})

    assert "run.keep(optimizer=slow.optimizer, lookahead=slow)" in str(caught.value.remedy)
    wrapper.state = inner.state
    assert parts_of({"model": model, "slow": wrapper})["optimizer"] is inner
    del wrapper.state
    with pytest.raises(StateError, match=r"slow, a Lookahead, is an optimizer around another one"):
        parts_of({"model": model, "slow": wrapper})


def test_one_of_several_models_is_called_model() -> None:
    """The remedy says so by the names that were given."""
    models = {"generator": nn.Linear(2, 1), "critic": nn.Linear(2, 1)}

    with pytest.raises(StateError, match="generator, critic: no model called") as caught:
        parts_of({**models, "optimizer": SGD(models["critic"].parameters(), lr=0.1)})

    assert "run.keep(model=generator, ...)" in str(caught.value.remedy)


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
    assert own_objects(again) == {}


def test_a_list_a_dict_and_a_tensor_stay_the_scripts_own() -> None:
    """An average by hand, a dict, and the best weights, an OrderedDict: the same tensors, with the snapshot's values."""
    first = state_with(
        history=[1.0, 2.0], average={"w": torch.ones(2)}, counts=torch.arange(3), pair=(torch.ones(1), 2),
        best=OrderedDict(w=torch.ones(2)), seen=Counter(a=2),
    )  # fmt: skip
    history: list[float] = []
    average, counts = {"w": torch.zeros(2)}, torch.zeros(3, dtype=torch.int64)
    weight, pair = average["w"], (torch.zeros(1), 0)
    best, seen = nn.Linear(2, 1, bias=False).state_dict(), Counter(b=1)
    best["w"] = best.pop("weight")[0]
    kept = {
        "history": history,
        "average": average,
        "counts": counts,
        "pair": pair,
        "best": best,
        "seen": seen,
    }
    state_with(**kept).apply(*stored(first))
    assert best["w"].tolist() == [1.0, 1.0]
    assert seen == {"a": 2}
    assert history == [1.0, 2.0]
    assert average["w"] is weight
    assert weight.tolist() == [1.0, 1.0]
    assert pair[0].tolist() == [1.0]
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
