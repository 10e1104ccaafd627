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
from torch.nn.utils import prune
from torch.optim import SGD, Adam, Optimizer, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from elasticflow.errors import StateError
from elasticflow.jobfile.tables.launching import SnapshotsTable
from elasticflow.runtime.process import random_streams
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


def test_a_generator_without_state_is_passed_over() -> None:
    """`random.SystemRandom` draws from the operating system: it has nothing that a snapshot could hold."""
    assert not random_streams.mark_of(random.SystemRandom())
    model: Any = net()
    model.secret = random.SystemRandom()
    assert missing(State(model=model, optimizer=SGD(model.parameters(), lr=0.1))) == ([], [])


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
        """Continue from there."""
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


class Sampler:
    """An object of the job's own that returns the state of its generator as numbers."""

    def __init__(self, draws: Any, numbers_of: Callable[[Any], Any]) -> None:
        self.draws, self._numbers_of = draws, numbers_of

    def state_dict(self) -> dict[str, Any]:
        """Return where the generator is."""
        return {"draws": self._numbers_of(self.draws)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Draw."""
        self.draws.random()


@pytest.mark.parametrize(
    ("draws", "numbers_of"),
    [
        (random.Random(1), random.Random.getstate),
        (np.random.default_rng(1), lambda draws: draws.bit_generator.state),
        (np.random.RandomState(1), lambda draws: [draws.get_state()[1].tolist(), *draws.get_state()[2:]]),
    ],
    ids=["Python", "NumPy", "old NumPy"],
)  # fmt: skip
def test_a_generator_whose_numbers_are_in_a_state_dict_is_held(draws: Any, numbers_of: Any) -> None:
    """As a sampler has one; the numbers of an old generator of NumPy are in an array."""
    model, sampler = net(), Sampler(draws, numbers_of)
    state = State(model=model, optimizer=Adam(model.parameters()), include={"sampler": sampler})
    assert missing(state, sampler) == ([], [])


def test_data_in_a_long_list_is_not_walked() -> None:
    """The order of a million samples took half a minute in each look; what lies beside it is still found."""
    model, curriculum = net(), Curriculum()
    curriculum.order = [*range(1_000_000)]  # type: ignore[attr-defined]
    state = State(model=model, optimizer=Adam(model.parameters()), include={"curriculum": curriculum})
    assert len(unsaved.look(state).loose) < 100
    assert missing(state, curriculum) == (["include.curriculum.asked"], [])


class Replay:
    """Arrays as an agent's buffer holds them, and what a snapshot gets of them.

    Args:
        stored: Makes of an array what the `state_dict` returns.
    """

    def __init__(self, stored: Callable[[Any], Any]) -> None:
        self._stored = stored
        self.seen, self.done = np.zeros((40, 600), np.float32), np.zeros(3, np.bool_)
        self.last, self.small = np.zeros(1), np.arange(6).reshape(2, 3)

    def state_dict(self) -> dict[str, Any]:
        """Return the arrays, stored."""
        arrays = {"seen": self.seen, "done": self.done, "last": self.last, "small": self.small}
        return {name: self._stored(array) for name, array in arrays.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Be filled."""
        self.seen[self.small[0, 0] % 40] = self.last + 0.1
        self.done = ~self.done
        self.last, self.small = self.last + 1, self.small + 1


@pytest.mark.parametrize(
    "stored",
    [torch.from_numpy, torch.tensor, lambda array: torch.from_numpy(array.copy())],
    ids=["shared", "copied", "cloned"],
)
def test_arrays_that_a_state_dict_stores_are_held(stored: Callable[[Any], Any]) -> None:
    """As tensors that share their memory, or copy it."""
    model, replay = net(), Replay(stored)
    state = State(model=model, optimizer=Adam(model.parameters()), include={"replay": replay})
    assert missing(state, replay) == ([], [])


class Point:
    """Small arrays, stored as lists; one is forgotten."""

    def __init__(self) -> None:
        self.place, self.shape, self.forgotten = np.zeros(4, np.float32), np.zeros((2, 3)), np.zeros(4)

    def state_dict(self) -> dict[str, Any]:
        """Return two of three."""
        return {"place": self.place.tolist(), "shape": self.shape.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Move."""
        self.place, self.shape, self.forgotten = self.place + 0.1, self.shape + 0.2, self.forgotten + 0.3


def test_arrays_that_a_state_dict_stores_as_lists_are_held() -> None:
    """And an array beside them is not."""
    model, point = net(), Point()
    state = State(model=model, optimizer=Adam(model.parameters()), include={"point": point})
    assert missing(state, point) == (["include.point.forgotten"], [])


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


class Layer(nn.Module):
    """Holds what *make* gives it in `held`, and calls *move* with itself in each forward."""

    def __init__(self, make: Callable[[], Any], move: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self._move = make(), move

    def forward(self, x: Tensor) -> Tensor:
        """Return *x*."""
        self._move(self)
        return x


class Counts(nn.Module):
    """Counts its calls, and tells nobody."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return *x*."""
        self.calls += 1
        return x


class Anneals(Counts):
    """Counts its calls, and goes by them."""

    def forward(self, x: Tensor) -> Tensor:
        """Return less and less of *x*."""
        scale: float = 0.9**self.calls
        return super().forward(x) * scale


class AnnealsWithoutGradients(Counts):
    """Does so in a method with torch's decorator."""

    @torch.no_grad()
    def scale(self) -> float:
        """Count, and return what is left."""
        self.calls += 1
        scale: float = 0.9**self.calls
        return scale

    def forward(self, x: Tensor) -> Tensor:
        """Return less and less of *x*."""
        return x * self.scale()


class Remembers(nn.Module):
    """Keeps a mean of its inputs in an attribute, as a number or a tensor."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* without it."""
        now = x.detach().mean()
        self.mean = 0.9 * self.mean + (now if isinstance(self.mean, Tensor) else float(now))
        y: Tensor = x - self.mean
        return y


class Shows(nn.Module):
    """Leaves what it made for others to look at."""

    shown: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return *x*."""
        self.shown = x.detach() + 1
        self.graph = x.mean()
        self.shape = len(x)
        return x


class Saves(Counts):
    """Has a state of its own for what it counts."""

    def get_extra_state(self) -> Any:
        """Return it."""
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        """Take it."""
        self.calls = state["calls"]


def of_model(layer: nn.Module) -> tuple[list[str], list[str]]:
    """Return what is found of a model that has this layer."""
    model = nn.Sequential(net(), layer, nn.LazyLinear(2))
    model(torch.ones(2, 6))
    return missing(State(model=model, optimizer=Adam(model.parameters())))


@pytest.mark.parametrize(
    ("make", "move", "where"),
    [
        (torch.Generator, lambda m: torch.rand(1, generator=m.held), "model.1.held"),
        (lambda: [random.Random(3)], lambda m: m.held[0].random(), "model.1.held[0]"),
        (lambda: torch.zeros(3), lambda m: m.held.add_(1), "model.1.held"),
        (lambda: np.zeros(3), lambda m: m.held.__iadd__(1), "model.1.held"),
        (lambda: {"bank": torch.zeros(3)}, lambda m: m.held["bank"].add_(1), "model.1.held['bank']"),
    ],
)
def test_state_that_a_module_holds_beside_its_buffers_is_named(
    make: Callable[[], Any], move: Callable[[Any], Any], where: str
) -> None:
    """Generators and tensors in attributes: the finding was that only `--deep-step` saw them."""
    assert of_model(Layer(make, move)) == ([where], [])


def test_numbers_that_a_module_goes_by_are_named_and_others_are_told() -> None:
    """A counter that its class reads is state; one that nothing reads may be anything; so may what is left for others."""
    assert of_model(Anneals()) == (["model.1.calls"], [])
    assert of_model(AnnealsWithoutGradients()) == (["model.1.calls"], [])
    assert of_model(Remembers(0.5)) == (["model.1.mean"], [])
    assert of_model(Remembers(torch.zeros(()))) == (["model.1.mean"], [])
    assert of_model(Counts()) == ([], ["model.1.calls"])
    lost, doubtful = of_model(Shows())
    assert lost == []
    assert set(doubtful) == {"model.1.shown", "model.1.graph"}
    assert of_model(Saves()) == ([], [])


def test_a_buffer_that_is_not_saved_is_named(me: Any) -> None:
    """With what to do: a persistent buffer, or a state of the module's own; ignored, as a job file can, it is nobody's business."""
    layer = Layer(int, lambda m: m.seen.add_(1))
    layer.register_buffer("seen", torch.zeros(2), persistent=False)
    lost, _ = of_model(layer)
    assert lost == ["model.1.seen"]
    error = unsaved.refusal(lost)
    assert error.remedy is not None
    assert "register_buffer" in error.remedy
    assert 'snapshots.ignore = ["model.1.seen"]' in error.remedy
    assert SnapshotsTable(ignore=lost).ignore == lost
    remedy = unsaved.refusal([*lost, "model.2.seen", "model.2.mean"]).remedy
    assert 'snapshots.ignore = ["model.*.seen", "model.2.mean"]' in (remedy or "")
    model = nn.Sequential(net(), layer)
    state = State(model=model, optimizer=Adam(model.parameters()))
    assert missing(state, ignored=("model.1",)) == ([], [])


class Initializes(nn.Module):
    """Takes its shift from the first batch, and notes that in a flag; sets another one that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3))
        self.is_made = self.was_called = False

    def forward(self, x: Tensor) -> Tensor:
        """Return *x* shifted."""
        self.was_called = True
        if not self.is_made:
            self.shift.data.copy_(-x.mean(0))
            self.is_made = True
        y: Tensor = x + self.shift
        return y


@pytest.mark.parametrize("ignored", [(), ("model.1.is_made",)])
def test_a_flag_that_the_first_step_sets_is_told(me: Any, ignored: tuple[str, ...]) -> None:
    """After a restart the first batch overwrote the trained shift, and nothing said so."""
    model = nn.Sequential(net(), Initializes())
    state = State(model=model, optimizer=Adam(model.parameters()))
    watch = Unsaved(me, state, ignored)
    watch.begin()
    for step in range(2):
        train(model, state.optimizers["optimizer"], range(step, step + 1))
        watch.after_step()
    told = [(event["name"], event["type"]) for event in me.events]
    assert told == ([] if ignored else [("model.1.is_made", "a flag")])


@pytest.mark.parametrize("ignored", [(), ("model.*.calls",)])
def test_layers_that_count_alike_are_told_once(me: Any, ignored: tuple[str, ...]) -> None:
    """By a name that ignores all of them."""
    model = nn.Sequential(net(), Counts(), Counts(), Counts())
    state = State(model=model, optimizer=Adam(model.parameters()))
    watch = Unsaved(me, state, ignored)
    for step in range(4):
        train(model, state.optimizers["optimizer"], range(step, step + 1))
        watch.after_step()
        watch.before_snapshot()
    assert [event["name"] for event in me.events] == ([] if ignored else ["model.*.calls"])


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 3), "weight", amount=1),  # type: ignore[no-untyped-call]
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "old spectral norm": lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 3)),
    "lazy": lambda: nn.LazyLinear(2),
    "transformer": lambda: nn.TransformerEncoderLayer(3, 1, 4, dropout=0.1, batch_first=True),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_nothing_of_an_ordinary_module_is_missing(name: str) -> None:
    """Torch's layers keep what they keep in parameters and buffers, or make it anew."""
    assert of_model(ORDINARY[name]()) == ([], [])


def test_an_optimizer_that_holds_the_model_says_nothing_of_it() -> None:
    """The model's own modules are looked at once, as the model's."""
    model = net()
    assert missing(State(model=model, optimizer=Own(model.parameters(), lambda: model, lambda m: m))) == (
        [],
        [],
    )


def test_a_group_more_is_refused_at_the_call(me: Any) -> None:
    """Snapshots with it were taken for hours, and none could be loaded; a copy of the optimizer is free."""
    model = net()
    first, *rest = model.parameters()
    optimizer = Adam([first])
    watch = Unsaved(me, State(model=model, optimizer=optimizer))
    watch.begin()
    with pytest.raises(StateError, match=r"optimizer.add_param_group was called while it trains") as refused:
        optimizer.add_param_group({"params": rest})
    assert "requires_grad" in str(refused.value.remedy)
    watch.before_snapshot()
    copy.deepcopy(optimizer).add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    optimizer.param_groups.append({"params": rest})
    with pytest.raises(StateError, match="has 2 parameter groups, and began with 1"):
        watch.before_snapshot()
