"""Every optimizer, schedule and scaler of torch resumes from a snapshot with the bits it would have had."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import StateError
from elasticflow.runtime.state.state import State
from tests.runtime.stored import assert_same_state, take_step, transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch.optim import Optimizer

Make = partial[Any]
O = torch.optim  # noqa: E741  # short in a long table

OPTIMIZERS: dict[str, Make] = {
    "adam": partial(O.Adam, lr=1e-2),
    "adam-foreach": partial(O.Adam, lr=1e-2, foreach=True, weight_decay=0.1),
    "adam-fused-amsgrad": partial(O.Adam, lr=1e-2, fused=True, amsgrad=True),
    "adam-maximize-amsgrad": partial(O.Adam, lr=1e-2, maximize=True, amsgrad=True),
    "adam-tensor-lr": partial(O.Adam, lr=torch.tensor(1e-2)),
    "adam-tensor-betas": partial(O.Adam, betas=(torch.tensor(0.8), torch.tensor(0.99)), foreach=False),
    "adam-decoupled": partial(O.Adam, decoupled_weight_decay=True, weight_decay=0.1),
    "adamw": partial(O.AdamW, lr=1e-2),
    "adamw-fused-tensor-lr": partial(O.AdamW, lr=torch.tensor(1e-2), fused=True),
    "adamax": partial(O.Adamax, weight_decay=0.1),
    "adamax-foreach": partial(O.Adamax, foreach=True),
    "nadam": partial(O.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "nadam-foreach": partial(O.NAdam, foreach=True),
    "radam": partial(O.RAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "radam-foreach": partial(O.RAdam, foreach=True),
    "adagrad": partial(O.Adagrad, lr_decay=0.1, initial_accumulator_value=0.5),
    "adagrad-fused": partial(O.Adagrad, fused=True),
    "adadelta": partial(O.Adadelta, weight_decay=0.1, maximize=True),
    "adadelta-foreach": partial(O.Adadelta, foreach=True),
    "rmsprop": partial(O.RMSprop),
    "rmsprop-all": partial(O.RMSprop, momentum=0.9, centered=True, weight_decay=0.1, foreach=True),
    "sgd": partial(O.SGD, lr=0.01),
    "sgd-momentum": partial(O.SGD, lr=0.01, momentum=0.9, dampening=0.1),
    "sgd-nesterov-fused": partial(O.SGD, lr=0.01, momentum=0.9, nesterov=True, fused=True),
    "asgd": partial(O.ASGD, t0=2, weight_decay=0.1),
    "asgd-foreach": partial(O.ASGD, t0=2, foreach=True),
    "rprop": partial(O.Rprop),
    "rprop-foreach": partial(O.Rprop, foreach=True, maximize=True),
    "adafactor": partial(O.Adafactor),
    "adafactor-foreach": partial(O.Adafactor, foreach=True, weight_decay=0.1),
    "muon": partial(O.Muon, lr=1e-2),
}


def net(seed: int = 3, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a small model of matrices, which is what every optimizer takes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).to(dtype)


def inputs(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return data that depends on the step alone."""
    return torch.randn(7, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model: nn.Module, optimizer: Optimizer, steps: range, *schedules: Any) -> None:
    """Take these steps."""
    for step in steps:
        take_step(model, optimizer, inputs(step, next(model.parameters()).dtype))
        for schedule in schedules:
            schedule.step()


def check(make: Callable[[nn.Module], Optimizer], folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Check that a restored optimizer continues as the undisturbed one; before its first step, and later."""
    for number, steps in enumerate((0, 3)):
        model, other = net(3, dtype), net(4, dtype)
        optimizer, its = make(model), make(other)
        train(model, optimizer, range(steps))
        train(other, its, range(90, 92) if steps else range(0))
        state, other_state = (
            State(model=model, optimizer=optimizer),
            State(model=other, optimizer=its),
        )
        transfer(state, other_state, folder / str(number))
        assert_same_state(state, other_state)
        train(model, optimizer, range(steps, steps + 4))
        train(other, its, range(steps, steps + 4))
        assert_same_state(state, other_state)


def test_table_names_every_optimizer_of_torch() -> None:
    """An optimizer that torch adds must be added here; two are taken apart below."""
    every = {name for name in dir(O) if isinstance(getattr(O, name), type)}
    assert {made.func.__name__ for made in OPTIMIZERS.values()} == every - {
        "Optimizer",
        "LBFGS",
        "SparseAdam",
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """Each optimizer with each family of options takes the steps the undisturbed one takes."""

    def make(model: nn.Module) -> Optimizer:
        options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in OPTIMIZERS[name].keywords.items()}
        made: Optimizer = OPTIMIZERS[name].func(model.parameters(), **options)
        return made

    check(make, tmp_path)


class Preconditioned(O.SGD):
    """SGD with matrices in a list, text and an ordered dict in its state, as SOAP and Shampoo have them."""

    def step(self, closure: Any = None) -> Any:
        """Add to the matrices, and step."""
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if "GG" not in state:
                state.update(
                    GG=[torch.zeros(2, dtype=torch.float64), []],
                    mode="first",
                    Q=OrderedDict(q=(torch.ones(1),)),
                )
            state["GG"][0] += 1 / 3
            state["Q"]["q"][0].mul_(1.1)
        return super().step(closure)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_state_holds_in_lists_keeps_its_dtype_and_its_text(dtype: torch.dtype, tmp_path: Path) -> None:
    """Torch's own loading casts tensors in lists, too, and replaces text by that of a generator."""
    check(lambda model: Preconditioned(model.parameters(), lr=0.1), tmp_path, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["adamw", "nadam", "radam", "asgd", "rmsprop-all", "adafactor", "adagrad"])
def test_state_keeps_its_dtype_whatever_the_parameters_have(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Loading must not cast to the parameter's dtype, as torch does: NAdam's product of momenta would lose bits."""
    check(lambda model: OPTIMIZERS[name](model.parameters()), tmp_path, dtype)


def test_groups_with_options_of_their_own(tmp_path: Path) -> None:
    """Several parameter groups, one added later, names and options of one's own."""

    def make(model: nn.Module) -> Optimizer:
        first, last = model.parameters()
        optimizer = O.AdamW(
            [{"params": [first], "lr": 0.1, "note": "first", "scale": (1, 2.5)}], betas=(0.8, 0.9)
        )
        optimizer.add_param_group({"params": [last], "lr": torch.tensor(0.01), "foreach": False})
        return optimizer

    check(make, tmp_path)


def test_named_parameters(tmp_path: Path) -> None:
    """Parameters given with their names."""
    check(lambda model: O.Adam(model.named_parameters()), tmp_path)


class Mixed(nn.Module):
    """An embedding with sparse gradients beside a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, index: Tensor) -> Tensor:
        """Return the outputs."""
        found: Tensor = self.last(self.table(index))
        return found


def test_sparse_adam(tmp_path: Path) -> None:
    """SparseAdam's own state is dense: it continues like the others."""
    objects = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Mixed()
        optimizer = O.SparseAdam([model.table.weight], lr=0.1)
        objects.append((model, optimizer, State(model=model, optimizer=optimizer)))

    def step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
        index = torch.randint(0, 9, (5,), generator=torch.Generator().manual_seed(number))
        take_step(model, optimizer, index)
        model.zero_grad()

    (model, optimizer, state), (other, its, other_state) = objects
    for number in range(3):
        step(model, optimizer, number)
    transfer(state, other_state, tmp_path)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, its, number)
    assert_same_state(state, other_state)


class Counting(O.SGD):
    """An optimizer of one's own: nested state, numbers, and one tensor that all parameters share."""

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        shared = next(iter(self.state.values()))["shared"] if self.state else torch.zeros(())
        shared += 1
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["shared"] = shared
                state["nested"] = {"seen": [shared.item(), {"norms": (p.detach().norm(),)}]}
                state["steps"] = state.get("steps", 0) + 1
                p.data.mul_(1 - 0.01 * shared)
        return super().step(closure)


def test_optimizer_of_ones_own(tmp_path: Path) -> None:
    """Nested state comes back, and a tensor that several parameters share is one tensor again."""
    check(lambda model: Counting(model.parameters(), lr=0.01, momentum=0.9), tmp_path)
    model, other = net(), net(4)
    state, restored = (State(model=m, optimizer=Counting(m.parameters(), lr=0.1)) for m in (model, other))
    train(model, state.optimizers["optimizer"], range(2))
    transfer(state, restored, tmp_path)
    first, second = restored.optimizers["optimizer"].state.values()
    assert first["shared"] is second["shared"]


class CountingInState(O.SGD):
    """An optimizer that keeps a number of its own beside the states of its parameters."""

    def step(self, closure: Any = None) -> Any:
        """Take a step, smaller each time."""
        state: dict[Any, Any] = self.state
        state["steps"] = state.get("steps", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - 0.01 / state["steps"])
        return super().step(closure)


def test_optimizer_with_a_number_beside_the_states_of_its_parameters(tmp_path: Path) -> None:
    """Torch keeps it as it is, and so does a snapshot."""
    check(lambda model: CountingInState(model.parameters(), lr=0.01, momentum=0.9), tmp_path)


def chain_of_sequences(o: Optimizer) -> Any:
    """Return a schedule of schedules of schedules."""
    sequence = lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    )
    return lr_scheduler.ChainedScheduler([sequence, lr_scheduler.StepLR(o, 2)], optimizer=o)


class Decay:
    """An object that is called, with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        """Return the factor of the learning rate."""
        self.calls += 1
        return 1 / (1 + step + 0.001 * self.calls)


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "LambdaLR-object": lambda o: lr_scheduler.LambdaLR(o, Decay()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9 + step / 100),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CyclicLR-own": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda x: 0.9**x),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "chain of sequences": chain_of_sequences,
    "SWALR": lambda o: SWALR(o, swa_lr=0.001, anneal_epochs=5),
}


def test_table_names_every_schedule_of_torch() -> None:
    """A schedule that torch adds must be added here; the one that needs a metric is taken apart below."""
    every = set(lr_scheduler.__all__) - {"LRScheduler", "ReduceLROnPlateau"}
    assert every <= {name.partition("-")[0] for name in SCHEDULES}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("lr", ["number", "tensor"])
def test_schedule_goes_on_where_it_was(name: str, lr: str, tmp_path: Path) -> None:
    """Each schedule gives the learning rates, and the weights, the undisturbed one gives."""
    objects = []
    for seed in (3, 4):
        model = net(seed)
        start = torch.tensor(0.05) if lr == "tensor" else 0.05
        optimizer = O.SGD(model.parameters(), lr=start, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        state = State(model=model, optimizer=optimizer, scheduler=schedule)
        objects.append((model, optimizer, schedule, state))
    (model, optimizer, schedule, state), (other, its, its_schedule, other_state) = objects
    for steps in (0, 4):
        train(model, optimizer, range(steps), schedule)
        transfer(state, other_state, tmp_path / str(steps))
        assert_same_state(state, other_state)
    for step in range(4, 9):
        train(model, optimizer, range(step, step + 1), schedule)
        train(other, its, range(step, step + 1), its_schedule)
        assert_same_state(state, other_state)


def test_plateau_goes_on_where_it_was(tmp_path: Path) -> None:
    """ReduceLROnPlateau, whose best value begins as infinity, lowers the rate at the same step."""
    objects = []
    for seed in (3, 4):
        model = net(seed)
        optimizer = O.SGD(model.parameters(), lr=0.05)
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
        state = State(model=model, optimizer=optimizer, scheduler=schedule)
        objects.append((optimizer, schedule, state))
    (optimizer, schedule, state), (its, its_schedule, other_state) = objects
    transfer(state, other_state, tmp_path / "fresh")
    for value in (3.0, 2.0, 2.5):
        schedule.step(value)
    transfer(state, other_state, tmp_path / "used")
    for value in itertools.repeat(2.5, 4):
        schedule.step(value)
        its_schedule.step(value)
    assert_same_state(state, other_state)
    assert optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"] == pytest.approx(0.005)


def test_state_of_a_function_object_is_taken_as_torch_gives_it(tmp_path: Path) -> None:
    """LambdaLR stores what an object it calls holds, if that is numbers; what a snapshot cannot hold is named."""
    model = net()
    optimizer = O.SGD(model.parameters(), lr=0.1)
    decay = Decay()
    schedule = lr_scheduler.LambdaLR(optimizer, decay)
    state = State(model=model, optimizer=optimizer, scheduler=schedule)
    assert state.capture().tree["scheduler"]["lr_lambdas"] == [{"calls": 1}]
    decay.__dict__["table"] = {1, 2}
    with pytest.raises(
        StateError, match=r"^scheduler/lr_lambdas/0/table is a builtins\.set, which a snapshot cannot hold"
    ):
        state.capture()


def test_schedule_with_a_function_inside_is_refused_by_name() -> None:
    """A schedule of one's own that keeps a function is refused where the function is."""

    class Own(lr_scheduler.LRScheduler):
        def __init__(self, optimizer: Optimizer) -> None:
            self.curve: Callable[[int], float] = lambda step: 1.0 / (1 + step)
            super().__init__(optimizer)

        def get_lr(self) -> list[float | Tensor]:
            return [self.curve(self.last_epoch) for _ in self.base_lrs]

    model = net()
    optimizer = O.SGD(model.parameters(), lr=0.1)
    state = State(model=model, optimizer=optimizer, scheduler=Own(optimizer))
    with pytest.raises(StateError, match=r"^scheduler/curve is a builtins\.function, which"):
        state.capture()


def test_scaler_goes_on_where_it_was(tmp_path: Path) -> None:
    """fp16's scale and the steps since it last changed are the undisturbed ones, an overflow between them included."""
    objects = []
    for seed in (3, 4):
        model = net(seed)
        optimizer = O.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        objects.append((model, optimizer, scaler, State(model=model, optimizer=optimizer, scaler=scaler)))

    def step(model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, number: int) -> None:
        optimizer.zero_grad()
        loss = model(inputs(number)).square().mean() * (torch.inf if number == 5 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    (model, optimizer, scaler, state), (other, its, its_scaler, other_state) = objects
    for number in range(4):
        step(model, optimizer, scaler, number)
    transfer(state, other_state, tmp_path)
    for number in range(4, 12):
        step(model, optimizer, scaler, number)
        step(other, its, its_scaler, number)
        assert_same_state(state, other_state)


@pytest.mark.parametrize("buffers", [False, True])
def test_average_goes_on_where_it_was(buffers: bool, tmp_path: Path) -> None:
    """Averaged weights, how many were averaged, and with them the next average."""
    objects = []
    for seed in (3, 4):
        model = nn.Sequential(net(seed), nn.BatchNorm1d(3))
        optimizer = O.SGD(model.parameters(), lr=0.05)
        decay = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]
        average = AveragedModel(model, multi_avg_fn=decay, use_buffers=buffers)
        objects.append((model, optimizer, average, State(model=model, optimizer=optimizer, ema=average)))
    (model, optimizer, average, state), (other, its, its_average, other_state) = objects
    for number in range(3):
        take_step(model, optimizer, inputs(number))
        average.update_parameters(model)
    transfer(state, other_state, tmp_path)
    for number in range(3, 6):
        for m, o, a in ((model, optimizer, average), (other, its, its_average)):
            take_step(m, o, inputs(number))
            a.update_parameters(m)
    assert_same_state(state, other_state)
