"""What training moves and no snapshot would hold is found by name, and nothing else is."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import StateError
from elasticflow.runtime.snapshot import unsaved
from elasticflow.runtime.snapshot.unsaved import Unsaved
from elasticflow.runtime.state.state import State
from tests.runtime.state.test_optimizers import OPTIMIZERS, SCHEDULES, net, train

if TYPE_CHECKING:
    from collections.abc import Callable


def missing(state: State, *schedules: Any, ignored: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """Return what is found to be state, and what may be, in the first steps of training."""
    lost: dict[str, None] = {}
    doubtful: dict[str, None] = {}
    before = None
    for step in range(6):
        train(state.model, state.optimizers["optimizer"], range(step, step + 1), *schedules)
        if state.ema is not None:
            state.ema.update_parameters(state.model)
        if step in (0, 1, 4, 5):
            now = unsaved.look(state)
            if before is not None:
                found, unsure = unsaved.moved(before, now, ignored)
                lost |= dict.fromkeys(found)
                doubtful |= dict.fromkeys(unsure)
            before = now
    return list(lost), list(doubtful)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_of_an_optimizer_of_torch_is_missing(name: str) -> None:
    """Every optimizer with each family of options, under an average of the weights."""
    model = net()
    options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in OPTIMIZERS[name].keywords.items()}
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = OPTIMIZERS[name].func(model.parameters(), **options)
    assert missing(State(model=model, optimizer=optimizer, ema=average)) == ([], [])


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_of_a_schedule_of_torch_is_missing(name: str) -> None:
    """Every schedule, nested ones too; what a function object holds is taken by torch itself."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    assert missing(State(model=model, optimizer=optimizer, scheduler=schedule), schedule) == ([], [])


def test_nothing_of_a_scaler_or_a_plateau_is_missing() -> None:
    """The scale is a tensor that a snapshot holds as a number; a plateau counts its bad epochs."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = GradScaler("cpu", init_scale=4.0, growth_interval=1)
    schedule = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    state = State(model=model, optimizer=optimizer, scheduler=schedule, scaler=scaler)
    looks = []
    for _ in range(3):
        scaler.scale(model(torch.ones(2, 6)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step(1.0)
        looks.append(unsaved.look(state))
    for before, after in itertools.pairwise(looks):
        assert unsaved.moved(before, after) == ([], [])


class TwoAdams(Optimizer):
    """Holds two optimizers, and has no state_dict of its own."""

    def __init__(self, parameters: Any, lr: float = 0.01) -> None:
        first, *rest = parameters
        super().__init__([first, *rest], {"lr": lr})
        self.gen_adam, self.dis_adam = Adam([first], lr), Adam(rest, lr)

    def step(self, closure: Any = None) -> Any:
        """Take a step with both."""
        self.gen_adam.step(closure)
        self.dis_adam.step(closure)


class Clones(TwoAdams):
    """The same, with a state_dict that clones."""

    def state_dict(self) -> dict[str, Any]:
        """Return copies of what both hold."""
        both = [each.state_dict() for each in (self.gen_adam, self.dis_adam)]
        return {"both": [copy.deepcopy(each) for each in both]}


class Lookahead(Optimizer):
    """As timm's: groups and state are those of the optimizer inside, and so is the state_dict."""

    def __init__(self, parameters: Any) -> None:
        self.base = Adam(parameters, 0.01)
        self.defaults = self.base.defaults
        self.param_groups = self.base.param_groups
        self.state = self.base.state
        self.every = 2
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        for group in self.param_groups:
            group["lookahead_step"] = 0

    def state_dict(self) -> Any:
        """Return that of the optimizer inside."""
        return self.base.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""
        self.base.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Take a step, and each second time one towards the slow weights."""
        self.base.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % self.every == 0:
                for p in group["params"]:
                    slow = self.state[p].setdefault("slow", p.detach().clone())
                    slow.add_(p.detach() - slow, alpha=0.5)
                    p.data.copy_(slow)


class Own(SGD):
    """An optimizer that holds what *keep* makes and each step moves with *move*."""

    def __init__(self, parameters: Any, keep: Callable[[], Any], move: Callable[[Any], Any]) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.kept, self._move = keep(), move

    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        self.kept = self._move(self.kept)
        return super().step(closure)


def moving(keep: Callable[[], Any], move: Callable[[Any], Any]) -> list[str]:
    """Return what is found missing of an optimizer that keeps such a thing."""
    model = net()
    return missing(State(model=model, optimizer=Own(model.parameters(), keep, move)))[0]


def test_two_optimizers_inside_one_are_refused_by_name() -> None:
    """The finding: after a kill the weights differed by 0.39, and nobody said a word."""
    model = net()
    found, _ = missing(State(model=model, optimizer=TwoAdams(model.parameters())))
    assert "optimizer.gen_adam.state['0.weight']['exp_avg']" in found
    assert "optimizer.dis_adam.state['2.weight']['exp_avg_sq']" in found
    error = unsaved.refusal(found)
    assert error.message.startswith("optimizer.gen_adam.state['0.weight']['step'] (and 5 more like it)")
    assert error.remedy is not None
    assert "return them in a dict" in error.remedy


def test_a_state_dict_that_clones_holds_what_it_cloned() -> None:
    """What a snapshot holds is known by its place in memory, else by its bits."""
    model = net()
    assert missing(State(model=model, optimizer=Clones(model.parameters()))) == ([], [])


def test_an_optimizer_around_another_is_taken_by_what_it_gives() -> None:
    """A lookahead whose state_dict is that of the optimizer inside loses nothing."""
    model = net()
    assert missing(State(model=model, optimizer=Lookahead(model.parameters()))) == ([], [])


@pytest.mark.parametrize(
    ("keep", "move", "where"),
    [
        (lambda: 0, lambda n: n + 1, "optimizer.kept"),
        (lambda: {"m": torch.zeros(3)}, lambda d: {"m": d["m"] * 0.9 + 1}, "optimizer.kept['m']"),
        (lambda: {"m": torch.zeros(3)}, lambda d: d["m"].add_(1) is None or d, "optimizer.kept['m']"),
        (lambda: [np.zeros(3)], lambda d: [d[0] + 1], "optimizer.kept[0]"),
        (lambda: partial(max, [0]), lambda p: partial(max, [p.args[0][0] + 1]), "optimizer.kept.args[0][0]"),
        (lambda: random.Random(3), lambda r: r.random() and r, "optimizer.kept"),
        (torch.Generator, lambda g: torch.rand(1, generator=g) is None or g, "optimizer.kept"),
        (lambda: np.random.default_rng(3), lambda g: (g.random(), g)[1], "optimizer.kept"),
        (itertools.count, lambda c: (next(c), c)[1], "optimizer.kept"),
    ],
)
def test_whatever_moves_and_is_not_saved_is_named(
    keep: Callable[[], Any], move: Callable[[Any], Any], where: str
) -> None:
    """Counters, tensors changed in place or replaced, arrays, generators, in whatever they are kept."""
    assert moving(keep, move) == [where]


@pytest.mark.parametrize(
    ("keep", "move"),
    [
        (lambda: torch.tensor([0.9, 0.99]), lambda t: t),
        (dict, lambda d: d or {"shape": 15, "mask": torch.ones(3)}),
        (lambda: random, lambda m: m.random() and m),
        (lambda: "a", lambda t: t + "b"),
        (lambda: True, lambda b: not b),
    ],
)
def test_constants_and_caches_are_no_state(keep: Callable[[], Any], move: Callable[[Any], Any]) -> None:
    """What is filled once and stays, and the global generators, which are seeded for each step."""
    assert moving(keep, move) == []


def test_a_counter_that_a_schedule_closes_over_is_named() -> None:
    """LambdaLR saves no function, and a function can count."""
    calls = 0

    def factor(_: int) -> float:
        nonlocal calls
        calls += 1
        return 0.99**calls

    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = lr_scheduler.LambdaLR(optimizer, factor)
    found, _ = missing(State(model=model, optimizer=optimizer, scheduler=schedule), schedule)
    assert found == ["scheduler.lr_lambdas[0].calls"]


class Curriculum:
    """An object of the job's own: how hard samples are, and how often it was asked."""

    def __init__(self) -> None:
        self.level, self.asked, self.draws = 0, 0, torch.Generator().manual_seed(3)

    def state_dict(self) -> dict[str, Any]:
        """Return the level, and where the generator is."""
        return {"level": self.level, "draws": self.draws.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.level = state["level"]
        self.draws.set_state(state["draws"])

    def step(self) -> None:
        """Be asked."""
        self.level, self.asked = self.level + 2, self.asked + 1
        torch.rand(2, generator=self.draws)


def test_what_an_included_object_keeps_to_itself_is_named_until_it_is_ignored() -> None:
    """A state_dict that forgets a counter; one that holds a generator's state holds the generator."""
    model, curriculum = net(), Curriculum()
    state = State(model=model, optimizer=Adam(model.parameters()), include={"curriculum": curriculum})
    assert missing(state, curriculum) == (["include.curriculum.asked"], [])
    assert missing(state, curriculum, ignored=("include.curriculum.asked",)) == ([], [])
    assert missing(state, curriculum, ignored=("include.curriculum",)) == ([], [])


def test_a_run_ends_after_its_second_step(me: Any) -> None:
    """The first step fills what there is; by the second it has moved. Numbers that may be anything are told once."""
    model = net()
    state = State(model=model, optimizer=TwoAdams(model.parameters()))
    watch = Unsaved(me, state)
    train(model, state.optimizers["optimizer"], range(1))
    watch.after_step()
    train(model, state.optimizers["optimizer"], range(1, 2))
    with pytest.raises(StateError, match=r"optimizer\.gen_adam\.state.* a restart would lose it"):
        watch.after_step()
    norms = State(model=model, optimizer=Own(model.parameters(), lambda: 0.5, lambda x: x * 1.5))
    watch = Unsaved(me, norms)
    for step in range(6):
        train(model, norms.optimizers["optimizer"], range(step, step + 1))
        watch.after_step()
        watch.before_snapshot()
    assert [event["name"] for event in me.events] == ["optimizer.kept"]


def test_the_model_is_not_walked() -> None:
    """An optimizer that knows the model says nothing of it; what the model counts is its own business."""
    model = net()
    model.register_buffer("seen", torch.zeros(2), persistent=False)

    def count(module: nn.Module) -> nn.Module:
        module.get_buffer("seen").add_(1)
        return module

    assert missing(State(model=model, optimizer=Own(model.parameters(), lambda: model, count))) == ([], [])
