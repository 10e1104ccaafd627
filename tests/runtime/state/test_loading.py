"""A snapshot that does not fit changes nothing: not the model, not the optimizer, not the schedule."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune
from torch.optim import SGD, Adam, AdamW, NAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, StepLR

from elasticflow.errors import StateError
from elasticflow.runtime.state import loading
from elasticflow.runtime.state.state import State
from tests.runtime.stored import bits, read_back, take_step

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Counter:
    """An object of the job's own, which may refuse its state."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.count, self.refuses = 0, refuses

    def state_dict(self) -> dict[str, Any]:
        """Return what it keeps."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back, or refuse."""
        if self.refuses:
            raise TypeError("the count is of another kind")
        self.count = state["count"]


def net() -> nn.Module:
    """Return the model of the snapshot."""
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def adam(model: nn.Module) -> Any:
    """Return the optimizer of the snapshot."""
    first, *rest = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "lr": 0.1}]
    return AdamW(groups)


Change = dict[str, Any]


def job(change: Change, seed: int) -> State:
    """Return a job's state after two steps; *change* says how the job differs."""
    torch.manual_seed(seed)
    model = change.get("model", net)()
    optimizer = change.get("optimizer", adam)(model)
    schedule = change.get("scheduler", lambda o: StepLR(o, 2))(optimizer)
    counter = Counter(refuses=change.get("refuses", False))
    counter.count = seed
    for _ in range(2):
        take_step(model, optimizer, torch.randn(5, 3))
    include = {} if change.get("no_counter") else {"counter": counter}
    include |= {"other": Counter()} if change.get("other") else {}
    return State(model=model, optimizer=optimizer, scheduler=schedule, include=include)


def everything(state: State) -> tuple[Any, ...]:
    """Return all numbers and bits of a job."""
    captured = state.capture()
    return captured.tree, {key: bits(tensor) for key, tensor in captured.tensors.items()}


CASES: dict[str, tuple[Change, str, str | None]] = {
    "shape": (
        {"model": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))},
        "does not fit the job's model: 2.bias has shape (2,) in the snapshot, (5,) in the job",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "a layer less": (
        {"model": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))},
        "does not fit the job's model: the model has no 2.bias",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "groups": (
        {"optimizer": lambda model: AdamW(model.parameters())},
        "does not fit the job's optimizer: 2 parameter groups in the snapshot, 1 in the job, which has none for model/0.bias",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "sizes of groups": (
        {
            "optimizer": lambda model: AdamW(
                [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:]}]
            )
        },
        "does not fit the job's optimizer: group 0 has 1 parameters in the snapshot, 2 in the job",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "order of parameters": (
        {
            "optimizer": lambda model: AdamW(
                [{"params": [model[2].bias]}, {"params": [p for p in model.parameters() if p is not model[2].bias]}]
            )
        },
        "does not fit the job's optimizer: parameter 0 of group 0 is model/0.weight in the snapshot, model/2.bias in the job",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "another optimizer": (
        {"optimizer": lambda model: SGD([{"params": [next(model.parameters())]}, {"params": list(model.parameters())[1:]}], lr=0.1)},
        "does not fit the job's optimizer: SGD has no option `amsgrad`",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "another schedule": (
        {"scheduler": lambda o: CosineAnnealingLR(o, 10)},
        "does not fit the job's scheduler: CosineAnnealingLR has `T_max` only in the job",
        "continue with the job the snapshot was taken of, or start a new run",
    ),
    "an object less": (
        {"no_counter": True},
        "does not fit the job: `include.counter` is only in the snapshot",
        'give it to run.keep again, or in a job file: [snapshots] include = { counter = "..." }, or start a new run',
    ),
    "an object more": (
        {"other": True},
        "does not fit the job: `include.other` is only in the job",
        "take `other` out of run.keep, or of snapshots.include, or start a new run",
    ),
    "an object that refuses": (
        {"refuses": True},
        "does not fit the job's include.counter: the count is of another kind",
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_changes_nothing(name: str, tmp_path: Path) -> None:
    """Each difference is named, with what to do, and every number of the live job is what it was."""
    change, message, remedy = CASES[name]
    captured = job({}, seed=1).capture()
    target = job(change, seed=2)
    before = everything(target)
    with pytest.raises(StateError) as refused:
        target.apply(*read_back(captured, tmp_path), captured.memory_formats)
    assert refused.value.message == f"the snapshot {message}"
    assert refused.value.remedy == remedy
    assert before == everything(target)


@pytest.mark.parametrize(
    "make", [lambda m: Adam(m.parameters()), lambda m: NAdam(m.parameters())], ids=["Adam", "NAdam"]
)
def test_other_options_are_the_snapshots(make: Callable[[nn.Module], Any], tmp_path: Path) -> None:
    """What the snapshot says about an option holds, as torch does it."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, its = make(model), make(other)
    optimizer.param_groups[0].update(lr=0.3, weight_decay=0.2)
    captured = State(model=model, optimizer=optimizer).capture()
    target = State(model=other, optimizer=its)
    target.apply(*read_back(captured, tmp_path), captured.memory_formats)
    assert its.param_groups[0]["lr"] == 0.3
    assert its.param_groups[0]["weight_decay"] == 0.2


class Around(torch.optim.Optimizer):
    """An optimizer around another one, which shares its groups: as SAM does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})
        self.inside = SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.inside.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Share the groups again."""
        super().load_state_dict(state_dict)
        self.inside.param_groups = self.param_groups


def test_groups_and_state_stay_the_objects_that_they_were(tmp_path: Path) -> None:
    """A rate set in the outer optimizer, or in a group that a schedule holds, counts after loading, too."""
    model, target = net(), net()
    outer, loaded = Around(model.parameters()), Around(target.parameters())
    outer.param_groups[0]["lr"] = 0.3
    model(torch.ones(2, 3)).sum().backward()
    outer.inside.step()
    captured = State(model=model, optimizers={"outer": outer, "inside": outer.inside}).capture()
    state = State(model=target, optimizers={"outer": loaded, "inside": loaded.inside})
    group, held = loaded.param_groups[0], loaded.inside.state
    state.apply(*read_back(captured, tmp_path), captured.memory_formats)
    assert group["lr"] == 0.3
    group["lr"] = 0.5
    assert loaded.param_groups is loaded.inside.param_groups
    assert loaded.inside.param_groups[0] is group
    assert loaded.inside.state is held
    assert len(held) == len(outer.inside.state) == 6


def test_functions_among_the_options_stay_the_scripts(tmp_path: Path) -> None:
    """LARS holds the functions in its groups that leave biases out: they are no state, and are there after loading."""

    def is_bias(parameter: nn.Parameter) -> bool:
        return parameter.ndim == 1

    model, target = net(), net()
    saved, loaded = [
        SGD([{"params": each.parameters(), "skip": is_bias}], lr=0.1) for each in (model, target)
    ]
    model(torch.ones(2, 3)).sum().backward()
    saved.step()
    saved.param_groups[0]["lr"] = 0.3
    state = State(model=model, optimizers={"optimizer": saved})
    state.capture()
    captured = state.capture()
    State(model=target, optimizers={"optimizer": loaded}).apply(
        *read_back(captured, tmp_path), captured.memory_formats
    )
    assert loaded.param_groups[0]["skip"] is is_bias
    assert loaded.param_groups[0]["lr"] == 0.3


def test_snapshot_without_names_of_parameters_is_applied(tmp_path: Path) -> None:
    """A snapshot from before names were written down is applied by numbers alone."""
    source, target = job({}, seed=1), job({}, seed=2)
    captured = source.capture()
    content, tensors = read_back(captured, tmp_path)
    del content["parameters"]
    target.apply(content, tensors, captured.memory_formats)
    assert everything(source) == everything(target)


def test_schedule_with_other_numbers_is_applied(tmp_path: Path) -> None:
    """The same kind of schedule takes over the snapshot's numbers."""
    source = job({"scheduler": lambda o: OneCycleLR(o, 0.1, total_steps=10)}, seed=1)
    target = job({"scheduler": lambda o: OneCycleLR(o, 0.5, total_steps=30)}, seed=2)
    captured = source.capture()
    target.apply(*read_back(captured, tmp_path), captured.memory_formats)
    assert everything(source) == everything(target)


def test_object_that_is_no_part_is_missed() -> None:
    """A dataset that could give and take state is told of, unless it is included; others never are."""
    state, counter = job({}, seed=1), Counter()
    assert state.misses(counter)
    assert not state.misses([1, 2])
    model = nn.Linear(1, 1)
    whole = State(model=model, optimizer=SGD(model.parameters()), include={"data": counter})
    assert not whole.misses(counter)


class Tied(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.inner, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("form", ["file", "folder", "sharded folder", "index"])
def test_weights_are_read_as_transformers_saves_them(form: str, tmp_path: Path) -> None:
    """Tied weights are there once; a large model's lie in several files, of which an index says which holds what."""
    source, target = Tied(1), Tied(2)
    saved = {name: tensor.detach().clone() for name, tensor in source.named_parameters()}
    folder = tmp_path / "model"
    folder.mkdir()
    if form in {"file", "folder"}:
        save_file(saved, folder / "model.safetensors")
    else:
        shards = {f"model-{n}-of-2.safetensors": names for n, names in enumerate((["embed.weight"], None))}
        places: dict[str, str] = {}
        for file, names in shards.items():
            part = {name: saved[name] for name in names or saved.keys() - {"embed.weight"}}
            save_file(part, folder / file)
            places |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    path = {"file": folder / "model.safetensors", "index": folder / "model.safetensors.index.json"}
    loading.load_weights(target, str(path.get(form, folder)))
    assert target.head.weight is target.embed.weight
    for mine, other in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """Such as that of an adapter; so is a file that is none, and an index."""
    with pytest.raises(StateError, match=r"holds neither model\.safetensors nor"):
        loading.load_weights(Tied(1), str(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(StateError, match="is no index of safetensors files"):
        loading.load_weights(Tied(1), str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"<html>")
    with pytest.raises(StateError, match="cannot be read"):
        loading.load_weights(Tied(1), str(tmp_path))


def test_pruned_weights_are_those_of_the_snapshot_before_the_first_forward() -> None:
    """Torch computes `weight` in each forward alone, and a script may prune by it before."""
    saved: Any = nn.Linear(3, 4)
    live: Any = nn.Linear(3, 4)
    for model in (saved, live):
        prune.l1_unstructured(model, "weight", amount=2)  # type: ignore[no-untyped-call]
    loading.load(live, saved.state_dict())
    assert torch.equal(saved.weight_mask * saved.weight_orig, live.weight)
