"""State that a script holds beside what it kept: told at `keep` or after the first step, and refused once it changes."""

from __future__ import annotations

import copy
import io
import itertools
import random
import runpy
import sys
import textwrap
import time
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from elasticflow.errors import StateError
from elasticflow.runtime.loop import carried_values
from elasticflow.runtime.loop.kept import parts_of, values_of
from elasticflow.runtime.loop.script_state import (
    AVERAGE,
    BUFFER,
    CARRIED,
    COUNTER,
    DECIDER,
    GENERATOR,
    POOL,
    READER,
    RECORD,
    RUNNING,
    SEQUENCE,
    ScriptState,
    argument_for,
)
from elasticflow.runtime.process import reachable
from elasticflow.runtime.snapshot.unsaved import Unsaved
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Script:
    """A trainer: it keeps a model and an optimizer, and may have more.

    Attributes:
        told: What was told, by name.
    """

    def __init__(self, me: Any, ignored: tuple[str, ...] = (), **kept: Any) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = Adam(self.model.parameters(), lr=0.1)
        self._me, self._ignored, self._kept = me, ignored, kept
        self.repeats_epochs = False
        self.told: dict[str, str] = {}

    def keep(self, **more: Any) -> State:
        """Do what `run.keep` does, called by a method of the script's."""
        passed = {"model": self.model, "optimizer": self.optimizer, **self._kept, **more}
        state = State(**parts_of(passed))
        self._unsaved = Unsaved(self._me, state)
        self._unsaved.add(
            ScriptState(
                state,
                sys._getframe(1),
                passed,
                self._ignored,
                self.told.__setitem__,
                lambda: self.repeats_epochs,
            ).look
        )
        return state

    def step(self, *actions: Callable[[], object]) -> None:
        """Take a step, and these actions in it."""
        self.model(torch.ones(3, 2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for action in actions:
            action()
        self._unsaved.after_step()

    def snapshot(self) -> None:
        """Do what is done before a snapshot."""
        self._unsaved.before_snapshot()


def train(script: Script, *actions: Callable[[], object]) -> None:
    """Keep, and take two steps."""
    script.keep()
    script.step(*actions)
    script.step(*actions)


def closing_over(held: Any) -> Callable[[], Any]:
    """Return a function that holds it."""
    return lambda: held


HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "a list": (lambda held: [held], lambda holder: holder[0], "holder[0]"),
    "a dict": (lambda held: {"it": held}, lambda holder: holder["it"], "holder['it']"),
    "an object": (lambda held: SimpleNamespace(it=held), lambda holder: holder.it, "holder.it"),
    "a list in one": (
        lambda held: SimpleNamespace(them=[held]),
        lambda holder: holder.them[0],
        "holder.them[0]",
    ),
    "a closure": (closing_over, lambda holder: holder(), "holder.held"),
    "a variable": (lambda held: held, lambda holder: holder, "holder"),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_schedule_is_found_one_level_down(me: Any, name: str) -> None:
    """Told at `keep`; refused in the first steps, where it moves."""
    script = Script(me)
    make, get, path = HOLDERS[name]
    holder = make(lr_scheduler.StepLR(script.optimizer, 1))
    script.keep()
    assert script.told == {path: "torch.optim.lr_scheduler.StepLR"}
    script.step(lambda: get(holder).step())
    with pytest.raises(StateError, match="changes with the steps, and no snapshot holds it") as refused:
        script.step(lambda: get(holder).step())
    assert path in refused.value.message
    assert f"run.keep({argument_for(path)}={path})" in str(refused.value.remedy)
    assert script.told.keys() == {path}


class Trainer(Script):
    """Holds what else it has in attributes."""

    def keep_and_train(self, *actions: Callable[[], object]) -> None:
        """Do both in methods."""
        self.keep()
        self.step(*actions)
        self.step(*actions)


def test_a_copy_of_the_weights_is_told_once_it_is_there(me: Any) -> None:
    """Best weights that training returns to at its end; not those from before `keep`, which each start has again, nor live ones."""
    script = Script(me)
    first, best = copy.deepcopy(script.model.state_dict()), SimpleNamespace(weights=None)
    script.keep()
    live = dict(script.model.named_parameters())
    for _ in range(2):
        script.step(lambda: setattr(best, "weights", copy.deepcopy(script.model.state_dict())))
    assert script.told == {"best.weights": "copy of the model's weights"}
    assert first.keys() == best.weights.keys() == live.keys()


class Averages(Trainer):
    """Has an average of its weights."""

    def __init__(self, me: Any, ignored: tuple[str, ...] = ()) -> None:
        super().__init__(me, ignored)
        self._ema = AveragedModel(self.model)

    def update(self) -> None:
        """Move it."""
        self._ema.update_parameters(self.model)


def test_what_a_trainer_holds_is_found_by_its_self(me: Any) -> None:
    """Its average of the weights: not moved it is told, moved refused."""
    trainer = Averages(me)
    trainer.keep_and_train()
    assert trainer.told == {"self._ema": "torch.optim.swa_utils.AveragedModel"}
    with pytest.raises(StateError, match=r"self\._ema, a torch.optim.swa_utils.AveragedModel, changes"):
        trainer.keep_and_train(trainer.update)


def test_what_a_policy_ignores_is_nobodys_business(me: Any) -> None:
    """By the path that a refusal names."""
    trainer = Averages(me, ignored=("self._ema",))
    trainer.keep_and_train(trainer.update)
    assert trainer.told == {}


GENERATORS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch": (torch.Generator, lambda g: torch.rand(1, generator=g)),
    "python": (lambda: random.Random(3), lambda g: g.random()),
    "numpy": (lambda: np.random.default_rng(3), lambda g: g.random()),
    "old numpy": (lambda: np.random.RandomState(3), lambda g: g.rand()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_that_moved_is_refused_and_another_is_not_told(me: Any, name: str) -> None:
    """One that split the data once is nobody's business; kept, it may move."""
    make, draw = GENERATORS[name]
    script, rng = Script(me), make()
    draw(rng)
    train(script)
    assert script.told == {}
    script.step(lambda: draw(rng))
    with pytest.raises(StateError, match=r"rng, a .* changes with the steps"):
        script.snapshot()

    script = Script(me)
    script.keep(rng=rng)
    for _ in range(2):
        script.step(lambda: draw(rng))
    script.snapshot()


def test_a_schedule_by_epochs_is_found_before_any_later_snapshot(me: Any) -> None:
    """However many steps an epoch has."""
    script = Script(me)
    schedule = lr_scheduler.StepLR(script.optimizer, 1)
    train(script)
    for _ in range(5):
        script.step()
        script.snapshot()
    schedule.step()
    with pytest.raises(StateError, match=r"schedule, a torch.optim.lr_scheduler.StepLR, changes"):
        script.snapshot()


def hidden_schedule(optimizer: Any) -> Callable[[], None]:
    """Return what steps a schedule that no variable leads to."""
    hidden = {id(optimizer): lr_scheduler.ExponentialLR(optimizer, 0.9)}
    HIDDEN.append([[[hidden]]])

    def move() -> None:
        HIDDEN[-1][0][0][0][id(optimizer)].step()

    return move


HIDDEN: list[Any] = []


def test_a_schedule_that_is_hidden_is_known_by_its_optimizer(me: Any) -> None:
    """What a schedule leaves on it tells that there is one; the rates, that it moves."""
    script = Script(me)
    move = hidden_schedule(script.optimizer)
    script.keep()
    assert script.told == {"scheduler": "learning-rate schedule that was made for optimizer"}
    script.step(move)
    with pytest.raises(StateError, match=r"optimizer\.lr is set by a schedule that no snapshot holds"):
        script.step(move)


def test_a_schedule_that_is_gone_is_not_told(me: Any) -> None:
    """A search for the learning rate has made it, before `run.keep`; the script sets its rates itself."""
    script = Script(me)
    lr_scheduler.LambdaLR(script.optimizer, lambda step: 2.0**step)
    script.keep()
    for number in range(3):
        script.optimizer.param_groups[0]["lr"] = 0.1 * number
        script.step()
    assert script.told == {}


def test_a_kept_schedule_of_the_optimizer_inside_another_one_is_found(me: Any) -> None:
    """Both have the same groups, in which the schedule sets the rates: timm's Lookahead, SAM."""
    script = Script(me)
    inner, script.optimizer = script.optimizer, Adam(script.model.parameters(), lr=0.1)
    script.optimizer.param_groups = inner.param_groups
    schedule = lr_scheduler.ExponentialLR(inner, 0.9)
    script.keep(schedule=schedule)
    for _ in range(3):
        script.step(inner.step, schedule.step)
    assert script.told == {}


def test_rates_that_the_script_sets_itself_are_in_the_snapshot(me: Any) -> None:
    """By the number of the step, as nanoGPT does."""
    script = Script(me)
    train(
        script,
        lambda: script.optimizer.param_groups[0].update(lr=0.9 * script.optimizer.param_groups[0]["lr"]),
    )
    assert script.told == {}


def test_what_is_kept_is_not_found_in_its_parts(me: Any) -> None:
    """Schedules inside one, wrappers around the model, a module that holds it, an object's own generator."""

    class Sampler:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(1)

        def state_dict(self) -> dict[str, Any]:
            return self.rng.bit_generator.state  # type: ignore[return-value]

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.rng.bit_generator.state = state

    script = Script(me)
    warm = lr_scheduler.LinearLR(script.optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(script.optimizer, 9)
    schedule = lr_scheduler.SequentialLR(script.optimizer, [warm, cosine], [2])
    system = nn.Sequential(nn.DataParallel(script.model), nn.Flatten())
    sampler = Sampler()
    rng, parts = sampler.rng, [warm, cosine]
    script.keep(schedule=schedule, sampler=sampler)
    for _ in range(2):
        script.step(schedule.step, rng.random, system.train)
    assert (script.told, len(parts)) == ({}, 2)


def test_another_model_that_trains_is_refused_and_a_frozen_one_told(me: Any) -> None:
    """A teacher stays as it is; a loss with a center of its own, as DINO has it, does not."""

    class Loss(nn.Module):
        center: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(2))

    script, criterion, loss = Script(me), nn.CrossEntropyLoss(), Loss()
    teacher = copy.deepcopy(script.model)
    train(script)
    assert script.told == {"teacher": "torch.nn.modules.linear.Linear"}
    script.step(lambda: loss.center.add_(1))
    with pytest.raises(StateError, match=r"loss, a .*Loss, changes"):
        script.snapshot()
    assert (criterion.training, teacher.training) == (True, True)


def test_what_comes_after_keep_is_told_at_the_first_step(me: Any) -> None:
    """Once."""
    script = Script(me)
    script.keep()
    assert script.told == {}
    later = lr_scheduler.StepLR(script.optimizer, 1)
    script.step()
    assert script.told == {"later": "torch.optim.lr_scheduler.StepLR"}
    script.told.clear()
    script.step()
    assert (script.told, later.last_epoch) == ({}, 0)


def test_a_number_that_the_script_moves_and_does_not_hand_back_is_refused(me: Any) -> None:
    """`best = loss` changes a name of the script's alone; with `run.kept["best"] = best` all is well."""
    script, best = Script(me), 9.5
    state = script.keep(best=best)
    script.step()
    best = 3.25
    with pytest.raises(StateError, match=r"best is 3.25 in the script, and run.kept\['best'\] is 9.5"):
        script.step()
    values_of(state)["best"] = best
    script.step()
    script.snapshot()


def test_data_is_not_looked_into(me: Any) -> None:
    """A dataset's generator belongs to the reading of its samples, and a long list is data."""

    class Data:
        def __init__(self) -> None:
            self.rng = np.random.default_rng(1)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> float:
            return float(self.rng.random())

    script, data, numbers = Script(me), Data(), [random.Random(3)] * 2000
    train(script, lambda: data[0], numbers[0].random)
    assert script.told == {}


def test_an_optimizer_that_was_forgotten_is_refused(me: Any) -> None:
    """With the model that it moves."""
    script, critic = Script(me), nn.Linear(1, 1)
    other = SGD(critic.parameters(), lr=0.1, momentum=0.9)
    script.keep()

    def move() -> None:
        critic(torch.ones(1, 1)).sum().backward()
        other.step()

    script.step(move)
    with pytest.raises(StateError, match=r"critic, a torch.nn.modules.linear.Linear, changes"):
        script.step(move)
    assert script.told.keys() == {"critic", "other"}


class Warmup:
    """A schedule made by hand around an optimizer, as transformers are often trained with."""

    def __init__(self, optimizer: Any) -> None:
        self.inner, self.n_steps, self.factor = optimizer, 0, 2.0

    def step(self) -> None:
        """Count."""
        self.n_steps += 1


def test_a_number_that_changes_beside_an_optimizer_is_told(me: Any) -> None:
    """A counter of a schedule made by hand, from which a restart would begin anew; not one that the run's position sets."""
    script = Script(me)
    warmup = Warmup(script.optimizer)
    follows = SimpleNamespace(optimizer=script.optimizer, now=0)
    trainer = SimpleNamespace(model=script.model, schedule=Warmup(script.optimizer))
    kept = Phases(script.optimizer)
    kept.phases.append(Warmup(script.optimizer))
    held = SimpleNamespace(schedule=kept)
    run = SimpleNamespace(position=SimpleNamespace(step=0))
    script.keep(kept=kept)
    steps = warmup.step, trainer.schedule.step, *(each.step for each in held.schedule.phases)
    script.step(*steps)
    assert script.told == {}

    run.position.step = 1
    follows.now = run.position.step
    script.step(*steps)

    assert script.told == dict.fromkeys(
        ("warmup.n_steps", "trainer.schedule.n_steps"), "number that changes with the steps"
    )


class Estimator:
    """Counts its calls, for a file's name, and has a model whose optimizer is elsewhere."""

    def __init__(self, net: nn.Module) -> None:
        self.net, self.seen_batches = net, 0

    def note(self) -> None:
        """Count a call."""
        self.seen_batches += 1


def test_a_number_that_changes_beside_the_model_is_told(me: Any) -> None:
    """A callback may save a file by it."""
    script = Script(me)
    estimator = Estimator(script.model)
    script.keep()
    for _ in range(2):
        estimator.note()
        script.step()
    assert script.told == {"estimator.seen_batches": COUNTER}


class Environment:
    """What an agent plays in."""

    def __init__(self) -> None:
        self.action_space, self.time = 2, 0

    def reset(self) -> None:
        """Begin an episode."""
        self.time = 0

    def step(self) -> None:
        """Go on."""
        self.time += 1


def test_an_environment_is_told(me: Any) -> None:
    """A restart would begin its episode anew: told, and never refused, since the script may reset it before each step."""
    script = Script(me)
    envs = [Environment()]
    script.keep()
    for _ in range(2):
        envs[0].step()
        script.step()
    assert script.told == {"envs[0]": f"{__name__}.Environment"}


class Phases:
    """A schedule by hand that counts in its phases, and may have a state of its own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.phases = optimizer, [Warmup(None), Warmup(None)]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {"n": [each.n_steps for each in self.phases]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the counts."""
        for each, n_steps in zip(self.phases, state["n"], strict=True):
            each.n_steps = n_steps


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_number_in_the_phases_of_a_schedule_is_told_unless_the_schedule_is_kept(
    me: Any, monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    """What has a state of its own, and is kept, tells nothing; nor does a trainer's meter."""
    if not is_kept:
        monkeypatch.delattr(Phases, "state_dict")
    script = Script(me)
    schedule = Phases(script.optimizer)
    trainer = Phases(script.optimizer)
    trainer.model = script.model  # type: ignore[attr-defined]
    script.keep(**({"schedule": schedule, "trainer": trainer} if is_kept else {}))
    for _ in range(2):
        schedule.phases[0].step()
        trainer.phases[0].step()
        script.step()

    told = {} if is_kept else {"schedule.phases[0].n_steps": "number that changes with the steps"}
    assert script.told == told


def test_a_number_that_is_kept_and_handed_back_is_not_told(me: Any) -> None:
    """Its value in `run.kept` is the one that it has."""
    script = Script(me)
    warmup = Warmup(script.optimizer)
    values = values_of(script.keep(n_steps=0))

    def step() -> None:
        warmup.step()
        values["n_steps"] = warmup.n_steps

    script.step(step)
    script.step(step)

    assert script.told == {}


def test_what_one_pass_leaves_to_the_next_is_told(me: Any) -> None:
    """A prefetched batch, an observation, a hidden state and an inner optimizer's state; not what each pass makes, sums to be printed, or a kept tensor."""
    script, queue, total = Script(me), torch.zeros(3), torch.zeros(())
    inputs, targets = torch.rand(2), torch.rand(2)
    observed, hidden = np.zeros(3), (torch.zeros(2), torch.zeros(2))
    result, slots = torch.zeros(2), {"state": {0: torch.zeros(2)}}
    script.keep(queue=queue)
    for number in range(2):
        result = inputs * targets
        moments = dict(slots)["state"][0]
        slots = {"state": {0: moments + 1}}
        inputs, targets = torch.rand(2), torch.rand(2)
        observed = observed + number
        hidden = (hidden[0] + 1, hidden[1] + 1)
        total = total + result.sum()
        queue += result.sum()
        script.step()
    assert script.told == dict.fromkeys(("inputs", "targets", "observed", "hidden", "slots"), CARRIED)


def sampled(pool: Tensor, storage: Tensor) -> Tensor:
    """Return samples that continue from those of the pool, and put them back, as an energy-based model does."""
    samples = pool[:2] + 1
    pool[:2] = samples
    storage[:2] = 3
    return samples


def test_a_tensor_that_a_function_changes_is_told(me: Any) -> None:
    """Not the storage that it fills, what each pass makes, or a kept tensor."""
    script, pool, kept, storage = Script(me), torch.zeros(3), torch.zeros(3), torch.zeros(3)
    script.keep(kept=kept)
    for _ in range(2):
        made = torch.zeros(3)
        loss = sampled(pool, storage).sum() + sampled(kept, storage).sum() + sampled(made, storage).sum()
        script.step(loss.item)
    assert script.told == {"pool": CARRIED}


def test_what_one_pass_writes_into_for_the_next_is_told(me: Any) -> None:
    """The perturbation of free adversarial training, a center, counts; not storage that each pass fills, or a kept tensor."""
    script, storage, shown = Script(me), torch.zeros(3), torch.zeros(3)
    delta, center, counts, kept = torch.zeros(3), torch.zeros(3), np.zeros(3), torch.zeros(3)
    script.keep(kept=kept)
    for number in range(2):
        storage[number] = 1
        shown[:] = number
        result = storage + delta + shown
        delta.data = result.sign()
        delta.data[:1] = 0
        center.mul_(0.9).add_(result)
        counts[number] += 1
        kept.add_(1)
        storage.requires_grad_(False)
        script.step()
    assert script.told == dict.fromkeys(("delta", "center", "counts"), CARRIED)


def test_an_order_that_passes_shuffle_is_told(me: Any) -> None:
    """A list of nodes, as GraphSAGE's, or an array; not a record, a list that each pass makes, or one that is kept."""
    script = Script(me)
    nodes, order, kept, record = list(range(9)), np.arange(9), list(range(9)), [0]
    script.keep(kept=kept)
    for _ in range(2):
        record += nodes[:2] + kept[:2]
        random.shuffle(nodes)
        np.random.shuffle(order)  # noqa: NPY002
        random.shuffle(kept)
        fresh = list(range(9))
        random.shuffle(fresh)
        script.step()
    assert script.told == {"nodes": CARRIED, "order": CARRIED}


def test_a_number_by_which_a_pass_finds_its_data_or_its_layer_is_told(me: Any) -> None:
    """Not one to be printed, one from the run's position, or one that is kept."""
    script, data = Script(me), list(range(9))
    run = SimpleNamespace(position=SimpleNamespace(step=0), kept={"held": 0})
    place = layer = total = count = 0
    step, held = run.position.step, run.kept["held"]
    model = nn.Identity()
    script.keep()
    for _ in range(3):
        sample = data[place] + data[step] + data[held]
        model(layer)
        total += sample
        print(total / max(count, 1))
        place, layer, step, held, count = place + 1, layer + 1, step + 1, held + 1, count + 1
        script.step()
    assert script.told == {"place": COUNTER, "layer": COUNTER}


def test_a_number_that_a_gradient_or_a_rate_depends_on_is_told(me: Any) -> None:
    """A weight that grows, a running length, a rate, a step of every other pass; not a sum to be printed, or its condition."""
    script = Script(me)
    annealed, length, rate_step, turn, total, shown = 0, torch.zeros(()), 0, 0, 0.0, 0
    returns, discounted = torch.zeros(2), 0
    script.keep()
    for _ in range(3):
        returns[0] = 1 / (1 + discounted)
        weight = min(1.0, annealed / 10) * returns[0]
        loss = weight * script.model(torch.ones(3, 2)).sum()
        penalty, length = (loss - length).square(), length + loss.detach()
        (loss + penalty).backward()
        rate = 0.1 / (1 + rate_step)
        for group in script.optimizer.param_groups:
            group["lr"] = rate
        if turn % 2 == 0:
            script.optimizer.step()
        total += loss.item()
        if shown % 2 == 0:
            print(total, script.optimizer.param_groups[0]["lr"])
        annealed, rate_step, turn, shown = annealed + 1, rate_step + 1, turn + 1, shown + 1
        discounted = annealed
        script.step()
    told = ("annealed", "discounted", "length", "rate_step", "turn")
    assert script.told == dict.fromkeys(told, COUNTER)


TEMPERATURE, SHOWN = 1.0, 0


def cool() -> float:
    """Return a weight that falls with each call."""
    global TEMPERATURE  # noqa: PLW0603  # as scripts do
    TEMPERATURE *= 0.9
    return TEMPERATURE


def show() -> None:
    """Count the calls, to print them."""
    global SHOWN  # noqa: PLW0603
    SHOWN += 1
    print(SHOWN)


def test_a_number_that_functions_carry_from_call_to_call_is_told(me: Any) -> None:
    """As a global, in a closure, or in a dict, with a sequence that the loop takes values from; not a number that is only shown."""
    script = Script(me)
    state, held, factor = {"step": 0}, {"step": 0}, 1.0
    weights, phases = itertools.cycle([0.1, 1.0]), iter([1, 2, 3])

    def rate() -> float:
        state["step"] += 1
        held["step"] += 1
        return 1 / (state["step"] + held["step"])

    def factored() -> float:
        nonlocal factor
        factor *= 0.9
        return factor

    script.keep(held=held)
    for _ in range(3):
        weight = cool() * factored() * next(weights)
        loss = weight * script.model(torch.ones(3, 2)).sum()
        for group in script.optimizer.param_groups:
            group["lr"] = rate()
        loss.backward()
        show()
        print(next(phases))
        script.step()
    told = dict.fromkeys(("TEMPERATURE", "factor", "state['step']"), COUNTER)
    assert script.told == {**told, "weights": SEQUENCE}


def test_a_number_by_which_a_schedule_steps_or_the_loop_ends_is_told(me: Any) -> None:
    """A mean loss for ReduceLROnPlateau, the patience of an early end and the best that decides about it; not a best that is only shown."""
    script = Script(me)
    schedule = lr_scheduler.ReduceLROnPlateau(script.optimizer)
    total, bad, best, shown, worse, later = 0.0, 0, 0.0, 9.0, 0, 0
    script.keep(schedule=schedule)
    for _ in range(3):
        total += 1.0
        mean = total / 3
        schedule.step(mean)
        if mean > best + 5:
            best = mean
        else:
            best, bad = best - 1, bad + 1
            if bad >= 9:
                break
        if mean < shown:
            shown = mean - 1
        if mean < 0:
            worse = 0
        else:
            worse += 1
        if best < 0:
            later = worse
        if worse + later > 9:
            break
        script.step()
    assert script.told == dict.fromkeys(("total", "bad", "best", "worse"), COUNTER)


class EarlyStopping:
    """Counts the losses in a row that are no better than the best, as many scripts do."""

    def __init__(self, patience: int) -> None:
        self.patience, self.counter, self.early_stop = patience, 0, False
        self.best_score: float | None = None

    def __call__(self, loss: float) -> None:
        """Compare a loss with the best."""
        if self.best_score is None or -loss > self.best_score:
            self.best_score, self.counter = -loss, 0
        else:
            self.counter += 1
            self.early_stop = self.counter >= self.patience


def test_an_object_or_a_record_by_which_the_loop_ends_is_told(
    me: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early stopping, a trainer's too, and losses that a rate follows; not a meter, a record to be printed, a library's object, or what is kept."""
    library = ModuleType("library")
    library.__file__ = "/venv/lib/python3/site-packages/library/__init__.py"
    monkeypatch.setitem(sys.modules, "library", library)
    accelerator = type("Accelerator", (EarlyStopping,), {"__module__": "library"})(9)
    script = Script(me)
    stopping, ours, meter, kept = (EarlyStopping(9) for _ in range(4))
    trainer = SimpleNamespace(model=script.model, stopping=ours, losses=[])
    losses, shown, latest, best = [9.0], [9.0], [9.0], {"loss": 9.0}
    script.keep(best=best)
    for number in range(3):
        measured = [number, number]
        latest.append(number)
        stopping(-number)
        trainer.stopping(-number)
        accelerator(-number)
        trainer.losses.append(number)
        meter(-number)
        if stopping.early_stop or trainer.stopping.early_stop or accelerator.early_stop:
            break
        if number > max(losses[-3:]) + 9 or number > min(best.values()) + measured[0] + latest[-1]:
            script.optimizer.param_groups[0]["lr"] = 0.1
        losses.append(number)
        shown.append(number)
        best["loss"] = 9.0 + number
        print(meter.best_score, shown[-1], kept.best_score)
        script.step()
    assert script.told == {"stopping": DECIDER, "trainer.stopping": DECIDER, "losses": RECORD}


class Stopper:
    """Callback that ends training, as those of TabNet."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.wait = trainer, 0

    def on_epoch_end(self) -> None:
        """Count an epoch."""
        self.wait += 1
        self.trainer.is_over = self.wait > 9


def test_a_callback_that_ends_training_is_told(me: Any) -> None:
    """By its place in the trainer; not a callback that only counts."""
    script = Script(me)
    trainer = SimpleNamespace(model=script.model, is_over=False, callbacks=[EarlyStopping(9)])
    trainer.callbacks.append(Stopper(trainer))
    script.keep()
    for number in range(3):
        trainer.callbacks[0](number)
        trainer.is_over = False
        trainer.callbacks[1].on_epoch_end()
        if trainer.is_over:
            break
        script.step()
    assert script.told == {"trainer.callbacks[1]": DECIDER}


def test_a_number_by_which_the_script_saves_a_file_is_told(me: Any) -> None:
    """The best loss, a count of the trainer's; not the time of the last file, the epoch, or sums beside a setting."""
    saved: list[float] = []
    script, run = Script(me), SimpleNamespace(epochs=range)
    trainer = SimpleNamespace(model=script.model, best=9.0, save=saved.append)
    best, since, config = 9.0, time.time(), SimpleNamespace(save_every=99, shown=0.0)
    script.keep()
    for epoch in run.epochs(3):
        loss = 3.0 - epoch
        if loss < best:
            best = loss
            torch.save(script.model.state_dict(), io.BytesIO())
        if loss < trainer.best:
            trainer.best = loss
            trainer.save(loss)
        config.shown += loss
        if time.time() - since > 600 or epoch >= 0 or epoch % config.save_every == 0:
            since = time.time()
            torch.save(epoch, io.BytesIO())
        script.step()
    assert script.told == {"best": COUNTER, "trainer.best": COUNTER}


def test_a_number_by_which_a_function_saves_is_told(me: Any) -> None:
    """By a comparison that it is given, as the best accuracy of the ImageNet example, or those in a list; a count in a dict, as BigGAN's; not a mean that it is given."""
    script, lowest, mean, bests = Script(me), 9.0, 0.0, [9.0]
    state, kept, save_checkpoint = {"itr": 0, "shown": 0}, {"itr": 0}, print
    script.keep(counts=kept)
    for number in range(3):
        loss = 3.0 - number
        is_best = loss < lowest
        lowest = min(loss, lowest)
        mean = (mean + loss) / 2
        save_checkpoint({"lowest": lowest}, mean, is_best)
        save_checkpoint({}, loss < bests[0])
        bests[0] = min(loss, bests[0])
        state["itr"] += 1
        state["shown"] += 1
        kept["itr"] += 1
        if state["itr"] % 9 == 0 or kept["itr"] % 9 == 0:
            save_checkpoint({})
        script.step()
    assert script.told == {"lowest": COUNTER, "bests": RECORD, "state['itr']": COUNTER}


def test_a_loop_in_another_file_of_the_script_is_read(me: Any, tmp_path: Path) -> None:
    """As where a base class has the loop, and a subclass in a file of its own the pass; not where an installed package has it."""
    loop = """
        def loop(script):
            worse = 0
            for _ in range(3):
                worse += 1
                if worse > 9:
                    break
                script.step()
        """
    for folder, told in (("project", {"worse": COUNTER}), ("site-packages", {})):
        path = tmp_path / folder / "base.py"
        path.parent.mkdir()
        path.write_text(textwrap.dedent(loop))
        script = Script(me)
        script.keep()
        runpy.run_path(str(path))["loop"](script)
        assert script.told == told


def test_a_number_of_the_run_in_a_trainer_is_not_told(me: Any) -> None:
    """As many trainers note the epoch, and the step of a batch; but their own count."""
    script = Script(me)
    run = SimpleNamespace(epochs=range)
    trainer = SimpleNamespace(model=script.model, optimizer=script.optimizer, epoch=0, done=0, seen=0)
    trainer.tokens, trainer.loss = 0, None
    script.keep()
    for epoch in run.epochs(3):
        batch = SimpleNamespace(end=SimpleNamespace(step=epoch))
        trainer.epoch = epoch
        trainer.done = batch.end.step
        trainer.seen += 1
        trainer.tokens += torch.tensor(8)
        trainer.loss = torch.tensor(1 / (1 + epoch))
        script.step()
    assert script.told == {"trainer.seen": COUNTER, "trainer.tokens": COUNTER}


def test_a_look_does_not_walk_through_the_layers_of_a_model(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through each dict of each of a thousand layers it would take a second before each snapshot."""
    entered: list[Any] = []
    inside_of = reachable.inside_of

    def noted(path: str, thing: Any, names: dict[int, str]) -> Any:
        entered.append(thing)
        return inside_of(path, thing, names)

    monkeypatch.setattr(reachable, "inside_of", noted)
    script = Script(me)
    script.model.layers = nn.Sequential(*(nn.Identity() for _ in range(500)))
    script.keep()
    assert len(entered) < 500


def test_what_each_pass_makes_anew_is_not_told(me: Any) -> None:
    """The optimizer, the copy and the weights of an inner loop, as MAML has them; but an optimizer that only some passes replace."""
    script = Script(me)
    script.keep()
    now_and_then = None
    for number in range(2):
        inner = SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        inner.zero_grad()
        assert [each for each in range(number)] == list(range(number))  # noqa: C416  # names of its own
        for _ in range(2):
            adapted = copy.deepcopy(script.model)
            adapted(torch.zeros(1, 2))
        for weight in reversed([*script.model.state_dict().values()]):
            for moved in (weight + 1, weight + 2):
                weight.copy_(moved)
        if number == 1:
            now_and_then = SGD(nn.Linear(2, 1).parameters(), lr=0.1)
        script.step()
    assert now_and_then is not None
    assert list(script.told) == ["now_and_then"]


def test_what_one_pass_leaves_to_the_next_can_be_declared_no_state(me: Any) -> None:
    """As each object that no step depends on."""
    script, shown = Script(me, ignored=("shown",)), torch.zeros(4)
    script.keep()
    for _ in range(2):
        shown = shown + 1
        script.step()
    assert script.told == {}


def test_what_passes_inside_an_epoch_carry_is_not_told_where_a_restart_begins_the_epoch_again(
    me: Any,
) -> None:
    """The hidden state of an LSTM, in truncated backpropagation through time; but what one epoch leaves to the next."""
    script, bank = Script(me), torch.zeros(2)
    script.repeats_epochs = True
    run = SimpleNamespace(epochs=range)
    script.keep()

    def train() -> None:
        state = torch.zeros(3)
        for _ in range(2):
            state = state + 1
            script.step()

    for _ in run.epochs(1):
        hidden, bank = torch.zeros(2), bank + 1
        train()
        for _ in range(2):
            hidden = hidden + 1
            script.step()
        script.snapshot()
    assert script.told == {"bank": CARRIED}


def test_a_tensor_that_a_kept_optimizer_trains_is_told_by_name_and_refused(me: Any) -> None:
    """The temperature of an agent: it is in no model."""
    agent = SimpleNamespace(log_alpha=torch.zeros(1, requires_grad=True))
    other = SGD([agent.log_alpha], lr=0.1)

    def learn() -> None:
        agent.log_alpha.grad = torch.ones(1)
        other.step()

    script = Script(me, other=other)
    script.keep()
    assert script.told == {"agent.log_alpha": "torch.Tensor"}
    script.step(learn)
    with pytest.raises(
        StateError,
        match=r"agent\.log_alpha, a torch\.Tensor, changes with the steps(.|\n)*run\.keep\(log_alpha=agent\.log_alpha\)",
    ):
        script.step(learn)


def test_a_trained_tensor_that_no_variable_leads_to_is_refused_by_its_place(me: Any) -> None:
    """In the groups of its optimizer."""
    other = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def learn() -> None:
        other.param_groups[0]["params"][0].grad = torch.ones(1)
        other.step()

    script = Script(me, other=other)
    script.keep()
    script.step(learn)
    with pytest.raises(StateError, match=r"other\.param_groups\[0\]\['params'\]\[0\]"):
        script.step(learn)


def test_trained_tensors_of_a_list_are_told_and_kept_together(me: Any) -> None:
    """Weights in full precision, of a model in half."""
    masters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    other = SGD(masters, lr=0.1)

    def learn() -> None:
        masters[2].grad = torch.ones(2)
        other.step()

    script = Script(me, other=other)
    script.keep()
    assert script.told == {"masters": "builtins.list"}
    script.step(learn)
    with pytest.raises(StateError, match=r"masters, a builtins\.list, .*(.|\n)*run\.keep\(masters=masters\)"):
        script.step(learn)

    script = Script(me, other=other, masters=masters)
    script.keep()
    script.step(learn)
    script.step(learn)
    assert script.told == {}


class Agent:
    """Saves and loads a network and a temperature together."""

    def __init__(self) -> None:
        self.net, self.log_alpha = nn.Linear(2, 1), nn.Parameter(torch.zeros(1))

    def state_dict(self) -> dict[str, Any]:
        """Return them."""
        return {"net": self.net.state_dict(), "log_alpha": self.log_alpha.detach()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Apply them."""
        self.net.load_state_dict(state["net"])


@pytest.mark.parametrize("way", ["by itself", "in an object that is kept"])
def test_a_trained_tensor_that_is_kept_is_not_told(me: Any, way: str) -> None:
    """A parameter may be kept as it is."""
    _agent = Agent()
    other = SGD([_agent.log_alpha, *_agent.net.parameters()], lr=0.1)
    kept = {"net": _agent.net, "log_alpha": _agent.log_alpha} if way == "by itself" else {"agent": _agent}
    script = Script(me, other=other, **kept)

    _agent.log_alpha.grad = torch.ones(1)
    script.keep()
    script.step(other.step)
    script.step(other.step)
    assert script.told == {}


def test_a_collection_that_takes_tensors_in_with_the_steps_is_told(me: Any) -> None:
    """A replay buffer, a pool of images; not what each pass makes anew, what does not change, losses, and a kept one."""
    memory = SimpleNamespace(buffer=[(np.zeros(2), 0.0)], size=50)
    pool, known, made, losses, fixed = (
        {"a": torch.zeros(2)},
        [torch.zeros(2)],
        [torch.zeros(2)],
        [torch.zeros(())],
        [torch.ones(2)],
    )
    both = {"known": known, "fixed": fixed}
    full = deque([torch.zeros(2) for _ in range(3)], maxlen=3)
    batch = {"mask": fixed[0]}
    script = Script(me, known=known)
    script.keep()
    for number in range(2):
        batch = {"mask": fixed[0], "inputs": torch.zeros(2), "targets": torch.zeros(2)}
        full.append(torch.zeros(2))
        memory.buffer.append((np.zeros(2), 1.0))
        pool[str(number)] = torch.zeros(2)
        known.append(torch.zeros(2))
        losses.append(torch.zeros(()))
        made = [torch.zeros(2), torch.zeros(2)]
        script.step()
    assert script.told == {"memory.buffer": POOL, "pool": POOL}
    full.append(torch.zeros(2))
    batch = {"mask": fixed[0], "inputs": torch.zeros(2), "targets": torch.zeros(2)}
    script.snapshot()
    assert script.told == {"memory.buffer": POOL, "pool": POOL, "full": POOL}
    assert len(batch) == 3
    assert both["known"] is known
    assert len(made) == 2


def test_an_object_that_takes_rows_in_with_the_steps_is_told(me: Any) -> None:
    """A replay buffer of arrays; not the storage of a rollout, what each pass makes of its batch, or a record of losses."""
    script = Script(me)
    replay = SimpleNamespace(state=np.zeros((9, 2)), reward=np.zeros((9, 1)), at=0)
    rollout = SimpleNamespace(state=torch.zeros(3, 2), done=torch.zeros(3, 1))
    record, made = SimpleNamespace(losses=np.zeros(9)), SimpleNamespace(mask=np.zeros((3, 2)))
    script.keep()
    for number in range(3):
        replay.state[replay.at], replay.at = number + 1, replay.at + 1
        for row in range(3):
            rollout.state[row] = rollout.state[row] + 1
        rollout.done[number] = 1
        record.losses[number] = 1
        made.mask = np.full((3, 2), number)
        script.step()
    script.snapshot()
    assert script.told == {"replay": BUFFER}


def test_an_iterator_over_the_scripts_own_loader_is_told_once_it_goes_on(me: Any) -> None:
    """Unlabeled samples beside `run.batches`; not a look at one batch, nor where a restart begins the epoch again."""
    loader: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(20)))
    unlabeled = SimpleNamespace(batches=iter(loader))
    endless = (batch for _ in range(9) for batch in loader)
    pairs, first = zip(loader, loader, strict=True), iter(loader)
    next(first)
    for is_again, expected in (
        (True, {}),
        (False, {"unlabeled.batches": READER, "endless": READER, "pairs": READER}),
    ):
        script = Script(me)
        script.repeats_epochs = is_again
        script.keep()
        for _ in range(2):
            script.step(lambda: (next(unlabeled.batches), next(endless), next(pairs)))
        assert expected == script.told


def test_a_number_in_a_dict_around_an_optimizer_is_told(me: Any) -> None:
    """The state that many diffusion models are trained with; not a number that the run sets, or that of a kept part."""
    script = Script(me)
    ema, run = Phases(None), SimpleNamespace(position=SimpleNamespace(step=0))
    state: dict[str, Any] = {"optimizer": script.optimizer, "model": script.model, "ema": ema}
    state |= {"step": 0, "done": 0}
    script.keep(ema=ema)
    for _ in range(3):
        state["step"] += 1
        run.position.step += 1
        state["done"] = run.position.step
        ema.phases[0].n_steps += 1
        script.step()
    assert script.told == {"state['step']": COUNTER}


def adjust_rate(optimizer: Any, place: float) -> None:
    """Set a rate."""
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + place)


def train_one(model: Any, optimizer: Any, log: Any) -> None:
    """Do nothing."""


def save_all(optimizer: Any, place: int) -> None:
    """Write nothing."""


def test_a_number_that_sets_a_rate_or_an_average_elsewhere_is_told(me: Any) -> None:
    """Given to a function with an optimizer, to a method of an object with a state, or to a loop over weights; not one to be shown."""

    class Average(nn.Linear):
        def update(self, model: nn.Linear, step: int) -> None:
            self.weight.data.lerp_(model.weight.data, 1 / (1 + step))

    script, run = Script(me), SimpleNamespace(position=SimpleNamespace(step=0))
    average, slow = Average(2, 1), nn.Linear(2, 1)
    rate_step, updates, seen, shown, saved, skipped = 0, 0, 0, 0, 0, 0
    script.keep(average=average, slow=slow)
    for _ in range(3):
        if skipped % 4 == 3:
            skipped += 1
            continue
        adjust_rate(script.optimizer, rate_step / 2)
        adjust_rate(script.optimizer, run.position.step)
        save_all(script.optimizer, saved)
        script.optimizer.step()
        average.update(script.model, step=updates)
        decay = 1 - 1 / (2 + seen)
        for weight, mean in zip(script.model.parameters(), slow.parameters(), strict=True):
            mean.data.mul_(decay).add_(weight.data, alpha=1 - decay)
        if shown % 2 == 0:
            print(shown)
        rate_step, updates, seen, shown, saved = rate_step + 1, updates + 1, seen + 1, shown + 1, saved + 1
        skipped += 1
        script.step()
    assert script.told == dict.fromkeys(("rate_step", "updates", "seen", "skipped"), COUNTER)


class Momentum:
    """Moves a target after a model, the slower the longer."""

    def __init__(self) -> None:
        self.done = 0

    def update(self, model: nn.Module, target: nn.Module) -> None:
        """Move it."""
        self.done += 1
        for weight, mean in zip(model.parameters(), target.parameters(), strict=True):
            mean.data.lerp_(weight.data, 1 / self.done)


def test_an_object_that_gets_the_model_is_told_once_its_numbers_change(me: Any) -> None:
    """The momentum of BYOL; not what shows a loss, or is given to a function with the optimizer."""
    script, target = Script(me), nn.Linear(2, 1)
    trainer = SimpleNamespace(model=script.model, momentum=Momentum(), meter=Warmup(None))
    script.keep(target=target)
    log = Warmup(None)
    for _ in range(3):
        trainer.momentum.update(trainer.model, target)
        trainer.meter.step()
        log.step()
        train_one(script.model, script.optimizer, log)
        script.step()
    assert script.told == {"trainer.momentum": DECIDER}


class Counted:
    """Counts, and has a state."""

    def __init__(self) -> None:
        self.seen = 0

    def step(self) -> None:
        """Count."""
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the count."""
        self.seen = state["seen"]


def test_an_attribute_that_decides_is_told_as_a_tensor_too(me: Any) -> None:
    """The error of the last epoch, above which a batch is skipped; not the loss that each pass makes, or a number of a kept object."""
    script = Script(me)
    trainer = SimpleNamespace(model=script.model, last=torch.tensor(9.0), loss=torch.zeros(()))
    kept = Counted()
    script.keep(kept=kept)
    for number in range(3):
        trainer.loss = script.model(torch.ones(3, 2)).sum()
        shown = trainer.loss.item()
        trainer.error = torch.tensor(shown)
        kept.step()
        if trainer.error < 9 * trainer.last + kept.seen:
            trainer.loss.backward()
        trainer.last = torch.tensor(9.0 + number)
        script.step()
    assert script.told == {"trainer.last": COUNTER}


class Normalizer:
    """Holds a mean of all that it has seen."""

    def __init__(self) -> None:
        self.mean = np.zeros(3)

    def update(self, value: float) -> None:
        """Take a value in."""
        self.mean = 0.9 * self.mean + 0.1 * value


class Shown(Normalizer):
    """Is shown, and begins anew."""

    def reset(self) -> None:
        """Begin anew."""
        self.mean = np.zeros(3)


class PathLength:
    """Compares lengths with their mean, as StyleGAN2 does."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.mean, self.newest = model, torch.zeros(()), torch.zeros(())

    def update(self, value: float) -> None:
        """Take a length in."""
        mean = self.mean.lerp(torch.tensor(value), 0.5)
        self.mean.copy_(mean)
        self.newest = torch.tensor(value)


def test_means_that_an_object_computes_from_themselves_are_told(me: Any) -> None:
    """Wherever the script calls it; not those of a meter, or of an object with a state that is kept."""
    script = Script(me)
    holders: list[Any] = [Normalizer(), Shown(), PathLength(script.model), PathLength(script.model)]
    script.keep(mean=holders[3].mean)
    for number in range(3):
        for holder in holders:
            holder.update(1.0 + number)
        script.step()
    assert script.told == {"holders[0]": RUNNING, "holders[2]": RUNNING}


def test_a_buffer_of_records_with_a_tree_of_priorities_is_told(me: Any) -> None:
    """As that of Rainbow: the root of the tree changes in each step, the rows of the records do not."""
    script = Script(me)
    kind = np.dtype([("state", np.float32, (2,)), ("reward", np.float32)])
    memory = SimpleNamespace(tree=np.zeros(9), records=np.zeros(9, dtype=kind))
    script.keep()
    for number in range(3):
        memory.tree[[0, number + 1]] = number + 1
        memory.records[number] = np.ones(2), 1.0
        script.step()
    script.snapshot()
    assert script.told == {"memory": BUFFER}


def test_a_generator_from_which_passes_draw_is_told(me: Any) -> None:
    """Batches of a second set; not a bar around the run's batches, or a generator that no pass moves on."""
    script = Script(me)
    library = ModuleType("elasticflow.library")
    exec("def batches():\n    yield from range(9)", vars(library))

    def drawn(rows: Any) -> Any:
        """Yield row after row."""
        for row in rows:
            yield row, torch.rand(2)

    others, still = drawn(range(9)), drawn(range(9))
    bar = drawn(enumerate(vars(library)["batches"]()))
    script.keep()
    next(still)
    for _ in bar:
        next(others)
        script.step()
    assert next(still)[0] == 1
    assert script.told == {"others": GENERATOR}


def test_an_average_in_a_list_of_tensors_is_told_once_it_moves(me: Any) -> None:
    """Moved in place, as diffusion models have it; not a copy that stays, the weights themselves, or one that is kept."""
    script = Script(me)
    weights = list(script.model.parameters())
    trainer = SimpleNamespace(averages=[[p.detach().clone() for p in weights] for _ in range(2)])
    still, kept = [[p.detach().clone() for p in weights] for _ in range(2)]
    script.keep(kept=kept)
    for _ in range(2):
        for mean in (trainer.averages[1][0], kept[0]):
            mean.lerp_(weights[0].detach(), 0.5)
        script.step()
    assert len(still) == 2
    assert script.told == {"trainer.averages[1]": AVERAGE}


def test_a_list_that_each_fold_makes_anew_is_not_told(me: Any) -> None:
    """Such as the numbers of its samples."""
    script = Script(me)
    script.keep()
    for fold in range(2):
        samples = [fold + 1]
        for _ in range(1):
            for each in samples:
                (script.model(torch.ones(1, 2)).sum() * each).backward()
                script.step()
    assert script.told == {}


def test_a_list_of_a_fold_that_its_steps_change_is_told(me: Any) -> None:
    """Though the fold makes it anew."""
    script = Script(me)
    script.keep()
    for fold in range(1):
        weights = [float(fold)]
        for _ in range(2):
            (script.model(torch.ones(1, 2)).sum() * sum(weights)).backward()
            weights.append(0.5)
            script.step()
    assert script.told == {"weights": RECORD}


class Printing(Script):
    """Prints how much it has seen, and saves a file by one of its counts."""

    def __init__(self, me: Any) -> None:
        super().__init__(me)
        self.samples_shown, self.losses_shown, self.files_named = 0, 0.0, 0

    def train(self) -> None:
        """Take three steps."""
        for _ in range(3):
            self.note(1.0)
            self.step()

    def note(self, loss: float) -> None:
        """Count a step."""
        self.samples_shown += 8
        self.losses_shown += loss
        self.files_named += 1
        if self.samples_shown % 16 == 0:
            print(f"{self.losses_shown / self.samples_shown:.3f} {self.files_named}")
        if self.files_named % 2 == 0:
            torch.save(self.model.state_dict(), io.BytesIO())


def test_a_number_that_a_trainer_only_prints_is_not_told(me: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """But one by which it also saves a file."""
    # All modules of tests are a script's own.
    monkeypatch.setattr(carried_values, "own_files", set)
    trainer = Printing(me)
    trainer.keep()
    trainer.train()
    assert trainer.told == {"trainer.files_named": COUNTER}


class Annealed(Script):
    """Sets its rate by the tokens that it has seen."""

    tokens = 0

    def train(self) -> None:
        """Take two steps."""
        for _ in range(2):
            self.tokens += 8
            self.optimizer.param_groups[0]["lr"] = 0.1 / self.tokens
            self.step()


def test_a_number_of_a_trainer_is_told_once(me: Any) -> None:
    """Not as that of `self`, too, in whose method the loop is."""
    trainer = Annealed(me)
    trainer.keep()
    trainer.train()
    assert trainer.told == {"trainer.tokens": COUNTER}


def test_a_checkpoint_of_live_weights_is_no_copy(me: Any) -> None:
    """A script makes it under a condition, and writes it to a file: its tensors are the model's, or a kept average's."""
    script, average = Script(me), nn.Linear(2, 1)
    script.keep(average=average)
    for number in range(3):
        script.step()
        if number >= 0:
            checkpoint = {"model": script.model.state_dict(), "average": average.state_dict()}
            torch.save(checkpoint, io.BytesIO())
        script.snapshot()
    assert script.told == {}


def test_a_record_of_norms_by_parameter_is_no_copy(me: Any) -> None:
    """As DeepSDF's; nor are the norms of one step."""
    script = Script(me)
    record: dict[str, list[float]] = {"weight": [], "bias": []}
    norms: dict[str, Tensor] = {}
    script.keep()
    for _ in range(3):
        for name, weight in script.model.named_parameters():
            norms[name] = weight.detach().norm()
            record[name].append(float(norms[name]))
        script.step()
        script.snapshot()
    assert script.told == {}


def test_what_is_only_shown_is_not_told(me: Any) -> None:
    """A mean of losses in a progress bar, and a count by which a picture is made that the next pass makes anew before it learns."""
    script, bar = Script(me), SimpleNamespace(set_description=print)
    mean, pictures = torch.zeros(3), 0
    script.keep()
    for number in range(3):
        made = script.model(torch.ones(1, 2))
        made.sum().backward()
        mean = (mean * number + torch.rand(3)) / (number + 1)
        bar.set_description(f"{number} {mean.tolist()}")
        if pictures % 2 == 0:
            made = script.model(torch.zeros(1, 2)).detach()
            print(made)
        pictures = pictures + 1
        script.step()
    assert script.told == {}


class Timed(Script):
    """Notes its time, its place in the epoch and the newest loss, and counts steps."""

    lasts, began, place, error, seen_steps = 0.0, 0.0, 0, 0.0, 0

    def note(self, place: int) -> None:
        """Note the place."""
        self.place = place

    def train(self) -> None:
        """Take three steps."""
        self.began = time.time()
        for number in range(3):
            self.note(number)
            self.error = 1.0 / (1 + number)
            now = time.time()
            self.lasts = now - self.began
            self.began = now
            self.seen_steps += 1
            self.step()


def test_what_a_trainer_sets_anew_is_not_told(me: Any) -> None:
    """Times, places and losses of its steps; but what it counts on from."""
    trainer = Timed(me)
    trainer.keep()
    trainer.train()
    assert trainer.told == {"trainer.seen_steps": COUNTER}


class Seeded(Environment):
    """Begins an episode by a seed."""

    def reset(self, seed: int | None = None) -> None:
        """Begin one."""
        self.time = seed or 0


def test_an_environment_that_each_pass_begins_by_a_seed_is_not_told(me: Any) -> None:
    """As the guide advises; without a seed its own generator goes on."""
    script, seeded, unseeded, now_and_then = Script(me), Seeded(), Seeded(), Seeded()
    script.keep()
    for number in range(3):
        seeded.reset(seed=number)
        unseeded.reset()
        if number == 1:
            now_and_then.reset(seed=number)
        for each in (seeded, unseeded, now_and_then):
            each.step()
        script.step()
    script.snapshot()
    assert script.told == dict.fromkeys(("unseeded", "now_and_then"), f"{__name__}.Seeded")


def test_what_an_outer_loop_makes_anew_is_not_told_unless_the_inner_one_uses_it(me: Any) -> None:
    """A copy of the weights for a file; but a teacher for the passes of an epoch."""
    script = Script(me)
    script.keep()
    for _ in range(2):
        teacher = copy.deepcopy(script.model)
        for _ in range(2):
            teacher(torch.zeros(1, 2))
            script.step()
            script.snapshot()
        written = copy.deepcopy(script.model.state_dict())
        torch.save(written, io.BytesIO())
    assert script.told == {"teacher": "torch.nn.modules.linear.Linear"}


def test_the_branches_of_a_condition_are_read_apart(me: Any) -> None:
    """One reads what the other one assigns, and an item of a dict is another one's."""
    script, scale, state = Script(me), 1, {"scale": 1, "shown": 1}
    script.keep()
    for number in range(3):
        if number % 2:
            script.optimizer.param_groups[0]["lr"] = 0.1 / scale
        else:
            scale = 2 + number
        script.optimizer.param_groups[0]["lr"] *= 1 / state["scale"]
        state["scale"] = 3 + number
        script.step()
        script.snapshot()
    assert script.told == {"scale": COUNTER, "state['scale']": COUNTER}


def test_a_number_beside_a_model_in_a_dict_is_told(me: Any) -> None:
    """One by which the loop ends; the dict as a whole is no record."""
    script = Script(me)
    state: dict[str, Any] = {"model": script.model, "best": 9.0}
    trainer = SimpleNamespace(state={"model": script.model, "worst": 9.0})
    script.keep()
    for number in range(3):
        if number > state["best"] or number > trainer.state["worst"]:
            break
        state["best"] = trainer.state["worst"] = 9.0 + number
        script.step()
    assert script.told == dict.fromkeys(("state['best']", "trainer.state['worst']"), COUNTER)


def test_what_a_branch_makes_for_itself_is_not_told(me: Any) -> None:
    """A copy that is measured now and then; but a copy that is read behind the branch, or by its next pass."""
    script, best, earlier = Script(me), None, nn.Linear(2, 1)
    script.keep()
    for number in range(4):
        if number % 2:
            measured = copy.deepcopy(script.model)
            measured(torch.zeros(1, 2))
            best = copy.deepcopy(script.model)
        else:
            earlier(torch.zeros(1, 2))
            earlier = copy.deepcopy(script.model)
        script.step()
        script.snapshot()
    assert best is not None
    assert script.told == dict.fromkeys(("best", "earlier"), "torch.nn.modules.linear.Linear")


def test_a_number_in_a_closure_for_the_optimizer_is_told(me: Any) -> None:
    """As LBFGS calls it; not one that a function shows."""
    script, annealed, shown = Script(me), 1, 0
    script.keep()
    for _ in range(3):

        def closure() -> Any:
            loss = script.model(torch.ones(1, 2)).sum() / annealed  # noqa: B023
            loss.backward()
            return loss

        def show() -> None:
            print(shown)  # noqa: B023

        closure()
        show()
        annealed, shown = annealed + 1, shown + 1
        script.step()
    assert script.told == {"annealed": COUNTER}
