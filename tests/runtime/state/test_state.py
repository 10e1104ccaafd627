"""State captured without pickle and applied to objects built anew."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import StateError
from elasticflow.runtime.snapshot.rank_shard import balanced, view_of
from elasticflow.runtime.state import codec
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adamax": {}, "ASGD": {},
    "LBFGS": {"max_iter": 4}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True}, "Rprop": {},
    "SGD": {"momentum": 0.9, "lr": 0.01},
}  # fmt: skip

SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
}


def build(optimizer: str = "AdamW", scheduler: str | None = None) -> tuple[nn.Module, Optimizer, Any, State]:
    """Return a small job's objects."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    chosen: Optimizer = getattr(torch.optim, optimizer)(model.parameters(), **OPTIMIZERS[optimizer])
    schedule = None if scheduler is None else SCHEDULERS[scheduler](chosen)
    return model, chosen, schedule, State(model=model, optimizer=chosen, scheduler=schedule)


def train(model: nn.Module, optimizer: Optimizer, schedule: Any, steps: range) -> None:
    """Take steps whose data depends on the step alone."""
    for step in steps:
        inputs = torch.randn(5, 1, 4, 4, generator=torch.Generator().manual_seed(step))

        def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(inputs).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS needs it; the others take it
        if schedule is not None:
            schedule.step()


def transfer(source: State, target: State) -> None:
    """Apply what was captured, after a way through JSON and bytes."""
    captured = source.capture()
    tensors = {}
    for key, tensor in captured.tensors.items():
        data = bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        tensors[key] = view_of(data, tensor.dtype, tuple(tensor.shape), 0)
    target.apply(json.loads(json.dumps(captured.tree, allow_nan=False)), tensors, captured.memory_formats)


def assert_same(first: nn.Module, second: nn.Module) -> None:
    """Check that both hold the same bits."""
    for (name, mine), its in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(mine, its), name


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_every_optimizer_goes_on_where_it_was(name: str, steps: int) -> None:
    """A restored optimizer takes the steps the undisturbed one takes, also before its first step."""
    model, optimizer, _, state = build(name)
    train(model, optimizer, None, range(steps))
    other, other_optimizer, _, other_state = build(name)
    train(other, other_optimizer, None, range(90, 91) if steps else range(0))
    transfer(state, other_state)
    for one, its_optimizer in ((model, optimizer), (other, other_optimizer)):
        train(one, its_optimizer, None, range(steps, steps + 4))
    assert_same(model, other)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_schedule_goes_on_where_it_was(name: str) -> None:
    """A restored schedule gives the learning rates the undisturbed one gives."""
    model, optimizer, schedule, state = build("AdamW", name)
    train(model, optimizer, schedule, range(3))
    other, other_optimizer, other_schedule, other_state = build("AdamW", name)
    transfer(state, other_state)
    for objects in ((model, optimizer, schedule), (other, other_optimizer, other_schedule)):
        train(*objects, range(3, 9))
    assert optimizer.param_groups[0]["lr"] == other_optimizer.param_groups[0]["lr"]
    assert_same(model, other)


def test_plateau_with_infinity() -> None:
    """JSON has no infinities: the best value of a fresh ReduceLROnPlateau survives."""
    _, optimizer, _, _ = build()
    value = lr_scheduler.ReduceLROnPlateau(optimizer).state_dict()
    encoded = json.loads(json.dumps(codec.Encoder().encode(value, "scheduler"), allow_nan=False))
    assert codec.Decoder({}, {}, copies=True).decode(encoded) == value
    assert value["best"] == math.inf


def test_average_of_weights() -> None:
    """An averaged model is restored with its count."""
    model, optimizer, _, _ = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    train(model, optimizer, None, range(2))
    average.update_parameters(model)
    other, other_optimizer, _, _ = build()
    restored = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    transfer(
        State(model=model, optimizer=optimizer, ema=average),
        State(model=other, optimizer=other_optimizer, ema=restored),
    )
    assert_same(average, restored)


def test_values_json_lacks() -> None:
    """Tuples, counters, keys that are no text, infinities and nan come back as they were."""
    value = {
        "betas": (0.9, 0.999),
        "milestones": Counter({4: 2}),
        "by id": {0: [1, (2,)]},
        "worst": -math.inf,
        "$": 1,
    }
    encoded = json.loads(json.dumps(codec.Encoder().encode(value, "x"), allow_nan=False))
    assert codec.Decoder({}, {}, copies=True).decode(encoded) == value


def test_state_that_needs_pickle_is_named() -> None:
    """What can be expressed neither as JSON nor as a tensor is refused by its path."""
    with pytest.raises(StateError, match=r"scheduler/fn is a builtins\.object, which a snapshot cannot hold"):
        codec.Encoder().encode({"fn": object()}, "scheduler")
    with pytest.raises(StateError, match=r"model/w is a tensor of torch\.complex128"):
        codec.Encoder().encode({"w": torch.zeros(2, dtype=torch.complex128)}, "model")


def test_tied_weights_are_stored_once() -> None:
    """Tensors in the same memory are one tensor in the snapshot, and stay tied."""
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters()))
    captured = state.capture()
    assert list(captured.tensors) == ["model/0.weight"]
    assert captured.aliases == {"model/1.weight": "model/0.weight"}
    before = first.weight.detach().clone()
    captured = state.capture()
    tensors = {key: tensor.clone() for key, tensor in captured.tensors.items()}
    with torch.no_grad():
        first.weight.zero_()
    state.apply(captured.tree, tensors, captured.memory_formats)
    assert torch.equal(second.weight, before)


def test_memory_format_of_optimizer_state_survives() -> None:
    """Moments of channels_last weights are laid out as they were: another layout could round otherwise."""

    def make() -> tuple[nn.Module, Optimizer, State]:
        torch.manual_seed(0)
        model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, State(model=model, optimizer=optimizer)

    model, optimizer, state = make()
    model(torch.randn(2, 4, 5, 5)).mean().backward()
    optimizer.step()
    _, other, other_state = make()
    transfer(state, other_state)
    for mine, its in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert mine["exp_avg"].stride() == its["exp_avg"].stride()
        assert torch.equal(mine["exp_avg"], its["exp_avg"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: nn.Linear(3, 3), "bias has shape (2,) in the snapshot, (3,) in the job"),
        (lambda: nn.Linear(4, 2), "weight has shape (2, 3) in the snapshot, (2, 4) in the job"),
        (lambda: nn.Linear(3, 2, bias=False), "the model has no bias"),
        (lambda: nn.Linear(3, 2).double(), "is torch.float32 in the snapshot, torch.float64 in the job"),
    ],
)
def test_another_model_is_refused_by_name(change: Callable[[], nn.Module], message: str) -> None:
    """A snapshot of another model names the first tensor that differs, and changes nothing."""
    model, other = nn.Linear(3, 2), change()
    source = State(model=model, optimizer=torch.optim.SGD(model.parameters()))
    target = State(model=other, optimizer=torch.optim.SGD(other.parameters()))
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(StateError) as refused:
        transfer(source, target)
    assert message in refused.value.message
    assert all(torch.equal(before[key], value) for key, value in other.state_dict().items())


def test_a_part_the_snapshot_lacks_is_named() -> None:
    """A schedule added since the snapshot is refused by name."""
    _, _, _, without = build()
    _, _, _, having = build("AdamW", "StepLR")
    with pytest.raises(StateError, match="`scheduler` is only in the job"):
        transfer(without, having)


def test_shares_are_balanced_and_complete() -> None:
    """Every tensor has one rank, and no rank has much more than another."""
    sizes = {f"t{i}": (i * 37) % 101 + 1 for i in range(60)}
    found = balanced(sizes, 3)
    assert sorted(key for part in found for key in part) == sorted(sizes)
    loads = [sum(sizes[key] for key in part) for part in found]
    assert max(loads) - min(loads) <= 5
    assert balanced({}, 2) == [[], []]


@pytest.mark.parametrize(
    ("megabytes", "ranks", "storing"),
    [(1, 64, 64), (1, 65, 64), (500, 1024, 64), (32_768, 1024, 1024), (16_384, 2048, 1024), (1, 8192, 64)],
)
def test_of_many_ranks_some_store_the_state(megabytes: int, ranks: int, storing: int) -> None:
    """Each node reads every file at a start: as many as are worth one, rank 0 among them, as far apart as can be."""
    sizes = {f"t{number}": megabytes * 256 for number in range(4096)}
    shares = balanced(sizes, ranks, {"t5", "t6"}, {"t7"})
    owners = [rank for rank, share in enumerate(shares) if share]

    assert storing == len(owners)
    assert sorted(sizes) == sorted(key for share in shares for key in share)
    assert "t7" in shares[0]
    gaps = {after - before for before, after in itertools.pairwise([*owners, ranks])}
    assert gaps <= {ranks // storing, ranks // storing + 1}


def test_an_evaluation_may_come_and_go() -> None:
    """No weight depends on what it keeps: a snapshot without it, or a job without it, continues."""

    class Best:
        """Keeps a value, as an evaluation does."""

        best: float | None = None

        def state_dict(self) -> dict[str, Any]:
            return {"best": self.best}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.best = state["best"]

    def make_state(evaluation: Any) -> State:
        model = nn.Linear(2, 1)
        return State(model=model, optimizer=torch.optim.SGD(model.parameters()), evaluation=evaluation)

    def carry(old: State, new: State) -> None:
        captured = old.capture()
        new.apply(json.loads(json.dumps(captured.tree)), captured.tensors, captured.memory_formats)
        assert torch.equal(old.model.weight, new.model.weight)  # type: ignore[arg-type]

    known, fresh = Best(), Best()
    known.best = 0.5
    carry(make_state(known), make_state(None))
    carry(make_state(None), make_state(fresh))
    assert fresh.best is None
    carry(make_state(known), make_state(fresh))
    assert 0.5 == fresh.best
