"""A schedule that is stepped with a metric of the evaluations."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from elasticflow.errors import StateError
from elasticflow.runtime.loop.kept import parts_by_name
from elasticflow.runtime.process.context import Moments
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.process.stopping import Stoppable
from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.state.codec import Decoder, Encoder
from elasticflow.runtime.training.metric_schedule import MetricSchedule

if TYPE_CHECKING:
    from collections.abc import Iterable

LOSSES = {4: 3.0, 8: 2.0, 12: 2.5, 16: 2.6, 20: 1.0, 24: 1.5, 28: 1.6}


def plateau() -> tuple[SGD, ReduceLROnPlateau]:
    """Return an optimizer of rate 1 and a schedule that halves it after each evaluation that is not better."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    return optimizer, ReduceLROnPlateau(optimizer, factor=0.5, patience=0)


def followed(made: Any, metric: str = "val.loss", every: tuple[str, ...] = ("4 steps",)) -> tuple[Any, Any]:
    """Return a schedule that follows a worker, and that worker."""
    vote = Vote()
    worker = SimpleNamespace(moments=Moments(), vote=vote, stoppable=Stoppable(vote))
    schedule = MetricSchedule(made, metric, every)
    schedule.follow(worker)  # type: ignore[arg-type]  # as far as it needs one
    return schedule, worker


def evaluate(worker: Any, step: int, **metrics: float) -> None:
    """Have the worker end an evaluation after *step*."""
    position = Position(step=step, offset=0, epoch=0, samples=step * 8, is_epoch_end=False)
    for action in worker.moments.evaluation:
        action(position, {name.replace("_", "."): value for name, value in metrics.items()})


def rates(optimizer: SGD, worker: Any, steps: Iterable[int]) -> list[float]:
    """Return the rate after each evaluation."""
    found = []
    for step in steps:
        evaluate(worker, step, val_loss=LOSSES[step])
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_it_is_stepped_with_its_metric() -> None:
    """As torch's own loop steps it; an evaluation of other sets alone changes nothing."""
    optimizer, made = plateau()
    _, worker = followed(made)
    alone, expected = plateau()
    evaluate(worker, 2, train_loss=9.0)
    for step, rate in zip(LOSSES, rates(optimizer, worker, LOSSES), strict=True):
        expected.step(LOSSES[step])
        assert rate == alone.param_groups[0]["lr"]
    assert rate == 0.0625


@pytest.mark.parametrize("cut", [4, 12, 20])
def test_a_snapshot_holds_it(cut: int) -> None:
    """Wherever the run is cut, and through the JSON of a snapshot, the rates are those of a run that was never cut."""
    optimizer, made = plateau()
    _, worker = followed(made)
    whole = rates(optimizer, worker, LOSSES)

    optimizer, made = plateau()
    schedule, worker = followed(made)
    first = rates(optimizer, worker, [step for step in LOSSES if step <= cut])
    tree = json.loads(json.dumps(Encoder().encode(schedule.state_dict(), "scheduler"), allow_nan=False))
    lr = optimizer.param_groups[0]["lr"]

    optimizer, made = plateau()
    schedule, worker = followed(made)
    optimizer.param_groups[0]["lr"] = lr
    schedule.load_state_dict(Decoder({}, {}, copies=True).decode(tree))
    assert first + rates(optimizer, worker, [step for step in LOSSES if step > cut]) == whole


def test_the_evaluation_at_the_end_alone_does_not_count() -> None:
    """A run of 10 steps that is made longer has the rates of a run that was as long from the beginning."""
    optimizer, made = plateau()
    _, worker = followed(made)
    evaluate(worker, 4, val_loss=1.0)
    evaluate(worker, 8, val_loss=0.9)
    evaluate(worker, 10, val_loss=5.0)
    assert optimizer.param_groups[0]["lr"] == 1.0
    evaluate(worker, 12, val_loss=5.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_schedules_that_take_no_metric_are_refused() -> None:
    """A schedule that counts would take the metric for its count."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    with pytest.raises(StateError, match=r"StepLR takes no metric"):
        MetricSchedule(StepLR(optimizer, 1), "loss", ("1 epoch",))
    with pytest.raises(StateError, match="has no step"):
        MetricSchedule(object(), "loss", ("1 epoch",))


def test_a_schedule_that_goes_by_a_metric_names_it() -> None:
    """A function of the job may return one without the job file saying so: that is told before the first step."""
    optimizer, made = plateau()
    with pytest.raises(StateError, match="needs a metric, and lr_scheduler names none"):
        parts_by_name({"model": nn.Linear(1, 1), "optimizer": optimizer, "scheduler": made})
    schedule, _ = followed(made)
    assert parts_by_name({"scheduler": schedule})["scheduler"] is schedule
    assert schedule.optimizer is optimizer
    assert torch.is_tensor(optimizer.param_groups[0]["params"][0])
