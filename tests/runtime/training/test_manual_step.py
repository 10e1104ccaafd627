"""Steps that move the optimizers themselves, in real worker groups and in one process."""

from __future__ import annotations

import json
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler

from elasticflow import StopTraining
from elasticflow.errors import NonFiniteLossError, StateError
from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import manual_step, several_optimizers
from elasticflow.runtime.training.manual_step import ManualStep
from tests.runtime.state.test_optimizers import net
from tests.runtime.stored import assert_same_state, transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def trained(groups: Callable[..., Any], how: str, world_size: int) -> dict[str, Any]:
    """Return what a group left: loss and weights after each step, by rank."""
    group = groups(f"{how}-{world_size}", "train_own_steps.py")
    ended = group.run(world_size, how)
    assert ended.codes == [0] * world_size, ended.errors
    found: dict[str, Any] = json.loads((group.folder.path / "found.json").read_text())
    return found


def numbers(value: Any) -> list[float]:
    """Return the numbers of nested lists."""
    return list(chain.from_iterable(map(numbers, value))) if isinstance(value, list) else [value]


@pytest.mark.e2e
def test_several_workers_do_what_one_does(groups: Callable[..., Any]) -> None:
    """Uneven shares and a last batch that leaves ranks idle: weights and losses of one worker; the same bits on each rank."""
    alone, together = trained(groups, "idle", 1)["ranks"], trained(groups, "idle", 3)["ranks"]
    assert len(alone[0]) == 4
    assert together == [together[0]] * 3
    assert numbers(together[0]) == pytest.approx(numbers(alone[0]), rel=1e-5, abs=1e-6)


@pytest.mark.e2e
def test_stop_and_another_order_on_one_rank(groups: Callable[..., Any]) -> None:
    """StopTraining before an optimizer moved leaves the step out everywhere; another order on one rank is named."""
    found = trained(groups, "stop", 2)
    assert found["stopped"] == ["enough", 1]
    assert [len(steps) for steps in found["ranks"]] == [2, 2]
    ended = groups("astray", "train_own_steps.py").run(2, "astray", ends=False)
    assert 0 not in ended.codes
    message = "in step 1 the ranks move different optimizers: optimizer.g, optimizer.d"
    assert any(message in text for text in ended.errors), ended.errors


def moving(model: nn.Module, batch: Tensor, optimizer: Any) -> Tensor:
    """Move one optimizer once."""
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    return loss  # type: ignore[no-any-return]


def one_step(me: Any, step: Callable[..., Any], made: Any, model: nn.Module, *, micro: int = 1) -> float:
    """Return the loss of one step of eight samples."""
    torch.manual_seed(1)
    pieces = [(torch.randn(8 // micro, 6), 8 // micro) for _ in range(micro)]
    batch = Batch(8, Position(1, 8, 0, 8, False), [3] * micro, iter(pieces))
    return ManualStep(me, model, step, made).run(batch)


def test_one_optimizer_may_be_moved_by_the_step_too(me: Any) -> None:
    """What the factory returned is what the step gets; gradients of the step before are gone."""
    model = net()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e9)
    before = [p.detach().clone() for p in model.parameters()]
    assert one_step(me, moving, SGD(model.parameters(), lr=0.1), model) > 0
    assert all(0 < (a - b).abs().max() < 1 for a, b in zip(before, model.parameters(), strict=True))


def stop_late(model: nn.Module, batch: Tensor, optimizer: Any) -> None:
    """Want training to end once half of the step is done."""
    moving(model, batch, optimizer)
    raise StopTraining("enough")


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (lambda m, b, _: m(b).sum(), StateError, "took the optimizers, and moved none of them"),
        (stop_late, StateError, "StopTraining was raised in step 1 after an optimizer had moved"),
        (lambda *given: moving(*given) and None, TypeError, "must return the loss to report"),
        (
            lambda m, b, o: moving(m, b * torch.nan, o),
            NonFiniteLossError,
            "the gradients of optimizer in step 1 are not",
        ),
    ],
)
def test_a_step_that_cannot_count_is_refused(
    me: Any, step: Callable[..., Any], error: type[Exception], message: str
) -> None:
    """Nothing moved, nothing reported, gradients that are not finite: the weights are what they were in the last case."""
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(error, match=message):
        one_step(me, step, SGD(model.parameters(), lr=0.1), model)
    if error is not TypeError and step is not stop_late:
        assert all(map(torch.equal, before, model.parameters()))


def test_a_step_that_is_abandoned_changes_no_buffer(me: Any) -> None:
    """StopTraining comes behind a forward, and before an optimizer moves."""
    model = nn.Sequential(nn.BatchNorm1d(6), net())

    def step(model: nn.Module, batch: Tensor, _: Any) -> None:
        model(batch)
        raise StopTraining("enough")

    one_step(me, step, SGD(model.parameters(), lr=0.1), model)
    assert me.stopped == ("enough", 0)
    assert model[0].num_batches_tracked == 0


def test_gradients_of_an_earlier_move_do_not_count_on_a_rank_without_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else decay would move what no sample used, and only where some rank has no samples."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert manual_step._add_up([parameter], 0.0).tolist() == [0.0]


def test_a_closure_and_parts_are_refused(me: Any) -> None:
    """A closure would be called behind the exchange; a step that moves weights is called once."""
    model = net()
    made = LBFGS(model.parameters())

    def step(model: nn.Module, batch: Tensor, made: LBFGS) -> Tensor:
        return made.step(lambda: model(batch).square().mean())  # type: ignore[no-untyped-call, no-any-return]

    with pytest.raises(StateError, match="gives optimizer a closure"):
        one_step(me, step, made, model)
    with pytest.raises(StateError, match="comes in 2 parts"):
        one_step(me, moving, SGD(model.parameters(), lr=0.1), model, micro=2)


def both(model: Any, kind: str) -> tuple[Any, Any]:
    """Return two optimizers and their schedules in a dict or a list."""
    optimizers = {"g": Adam(model[0].parameters(), 0.1), "d": SGD(model[2].parameters(), 0.1, momentum=0.9)}
    schedules = {name: ExponentialLR(each, 0.9) for name, each in optimizers.items()}
    if kind == "dict":
        return optimizers, several_optimizers.Schedules(schedules)
    return list(optimizers.values()), several_optimizers.Schedules(list(schedules.values()))


@pytest.mark.parametrize(("kind", "names"), [("dict", ("g", "d")), ("list", ("0", "1"))])
def test_several_optimizers_and_schedules_come_back_by_name(
    kind: str, names: tuple[str, str], tmp_path: Path
) -> None:
    """Each is a part of the state with a name of its own; another set of names does not fit."""
    states = []
    for seed, steps in ((3, 3), (4, 1)):
        model = net(seed)
        made, schedules = both(model, kind)
        for _ in range(steps):
            model(torch.ones(2, 6)).sum().backward()
            for each in several_optimizers.optimizers(made).values():
                each.step()
            schedules.step()
        states.append(State(model=model, optimizers=made, scheduler=schedules))
    assert list(states[0].optimizers) == [f"optimizer.{name}" for name in names]
    captured = states[0].capture()
    keys = {key for key in captured.tensors if key.startswith("optimizer")}
    assert f"optimizer.{names[0]}/state/0/exp_avg" in keys
    assert {key for key in keys if "/scalars/" not in key} == keys & captured.stepped
    assert not keys & captured.local
    transfer(states[0], states[1], tmp_path)
    assert_same_state(states[0], states[1])
    other = State(model=net(), optimizer=Adam(net().parameters()))
    with pytest.raises(StateError, match=rf"`optimizer(\.{names[1]})?` is only in the"):
        transfer(states[0], other, tmp_path / "other")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "empty dict"),
        ({"a b": None}, "cannot name a part"),
        ([1], r"optimizer\.0 is a builtins\.int, which is no torch\.optim\.Optimizer"),
        (None, r"optimizer is a builtins\.NoneType"),
    ],
)
def test_what_is_no_set_of_optimizers_is_refused(made: Any, message: str) -> None:
    """By name, with what may be returned."""
    with pytest.raises(StateError, match=message):
        several_optimizers.optimizers(made)


def test_an_optimizer_with_its_schedule_is_told_where_the_schedule_belongs() -> None:
    """As the `setup_optimizer` of a public script returns the two."""
    made = SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(
        StateError, match=r"optimizer.1 is a .*ExponentialLR, which is no torch.optim.Optimizer"
    ) as raised:
        several_optimizers.optimizers((made, ExponentialLR(made, 0.9)))
    assert "[lr_scheduler]" in str(raised.value.remedy)


def test_the_same_optimizer_twice_and_several_for_a_plain_step_are_refused() -> None:
    """A step that takes (model, batch) leaves the order to train.py, which knows none."""
    one: Optimizer = SGD(net().parameters(), lr=0.1)
    with pytest.raises(StateError, match="same optimizer under two names"):
        several_optimizers.optimizers({"a": one, "b": one})
    with pytest.raises(StateError, match=r"returned a list of 2, and nothing says in which order") as caught:
        several_optimizers.require_one([one, SGD(net().parameters(), lr=0.1)])
    assert "(model, batch, optimizers)" in str(caught.value.remedy)
    with pytest.raises(StateError, match="returned a dict of 1, and nothing says"):
        State(model=net(), optimizer={"g": one})  # type: ignore[arg-type]  # as a factory may


def test_a_model_that_is_sharded_already_is_refused_with_what_works(me: Any, alone: Any) -> None:
    """FSDP2 inside the model: its parameters are pieces of one another's, and every worker has a whole replica here."""
    model: Any = net()
    fully_shard(model[0], mesh=DeviceMesh.from_group(alone, "cpu"))
    with pytest.raises(StateError, match=r"0\.weight is a DTensor: the model is sharded") as caught:
        ManualStep(me, model, moving, SGD(model.parameters(), lr=0.1))
    assert "fully_shard" in str(caught.value.remedy)


class LikeTimm:
    """A schedule that is told the epoch."""

    def step(self, epoch: int, metric: float | None = None) -> None:
        """Set the learning rate of *epoch*."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}


class Timm:
    """A schedule as timm's are: told the time, and which of the two acts is its own business."""

    def __init__(self, optimizer: Optimizer, *, in_epochs: bool) -> None:
        self.optimizer, self.in_epochs, self.told = optimizer, in_epochs, 0

    def step(self, epoch: int, metric: float | None = None) -> None:
        """Count epochs."""
        if self.in_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        """Count steps."""
        if not self.in_epochs:
            self._set(num_updates)

    def _set(self, time: int) -> None:
        self.told = time
        self.optimizer.param_groups[0]["lr"] = 1 / (1 + time)

    def state_dict(self) -> dict[str, Any]:
        """Return all but the optimizer."""
        return {key: value for key, value in vars(self).items() if key != "optimizer"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it over."""
        vars(self).update(state)


@pytest.mark.parametrize("in_epochs", [True, False])
def test_a_schedule_of_timms_is_told_the_time(in_epochs: bool) -> None:
    """Either way it counts what it is stepped for; another one continues where it was."""
    optimizer = SGD(net().parameters(), lr=1.0)
    schedule = several_optimizers.CountedSchedule(Timm(optimizer, in_epochs=in_epochs))
    several_optimizers.require_callable(schedule)
    for _ in range(3):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == 1 / 4
    other = several_optimizers.CountedSchedule(Timm(optimizer, in_epochs=in_epochs))
    other.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    other.step()
    assert optimizer.param_groups[0]["lr"] == 1 / 5
    with pytest.raises(StateError, match="has no step_update"):
        several_optimizers.CountedSchedule(LikeTimm())


def test_a_schedule_that_is_told_the_epoch_is_refused_with_what_works() -> None:
    """As timm's that a function made: the TypeError came at the end of the first step. A subclass of torch's passes."""
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(StateError, match=r"LikeTimm needs `epoch`, and train.py calls it without") as caught:
        several_optimizers.require_callable(LikeTimm())
    assert "torch.optim.lr_scheduler" in str(caught.value.remedy)

    class Own(LRScheduler):
        def get_lr(self) -> list[float]:  # type: ignore[override]
            return [0.1]

    several_optimizers.require_callable(Own(optimizer))


@pytest.mark.parametrize("logs", [True, False])
def test_scalars_and_norms_are_told(me: Any, *, logs: bool) -> None:
    """What the step returned beside its loss, and the norm of the gradients that each optimizer moved by."""
    model = net()
    made = {"g": SGD(model[0].parameters(), lr=0.1), "d": SGD(model[2].parameters(), lr=0.1)}  # type: ignore[index]

    def step(model: nn.Module, batch: Tensor, optimizers: Any) -> Any:
        loss = model(batch).square().mean()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        return {"loss": loss, "real": 0.25}

    torch.manual_seed(1)
    batch = Batch(8, Position(1, 8, 0, 8, False), [3], iter([(torch.randn(8, 6), 8)]))
    ManualStep(me, model, step, made, logs_grad_norm=logs).run(batch)
    assert me.progress.noted["scalars"] == {"real": 0.25}
    norms = me.progress.noted.get("grad_norm", {})
    assert set(norms) == ({"g", "d"} if logs else set())
    for name, optimizer in made.items() if logs else ():
        parts = [p.grad.norm() ** 2 for p in optimizer.param_groups[0]["params"]]
        assert norms[name] == pytest.approx(float(sum(parts)) ** 0.5)
