"""Options that the job changed count after a restart; what was learned, and what the step has moved, stays."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from elasticflow import schedules
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.several_optimizers import CountedSchedule, Schedules
from tests.runtime.state.test_optimizers import net, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


def timm(optimizer: Optimizer, **options: Any) -> CountedSchedule:
    """Return a schedule of timm's."""
    module = pytest.importorskip("timm.scheduler")
    return CountedSchedule(module.CosineLRScheduler(optimizer, t_in_epochs=False, **options))


def cut(step: int, *, by: float = 0.5) -> float:
    """Return a part of the rate."""
    return by**step


# Each as it was, and as the job has it now.
SCHEDULES: dict[str, Any] = {
    "StepLR": (partial(lr_scheduler.StepLR, step_size=2), partial(lr_scheduler.StepLR, step_size=3)),
    "MultiStepLR": tuple(partial(lr_scheduler.MultiStepLR, milestones=at) for at in ([2, 4], [1, 3])),
    "CosineAnnealingLR": tuple(partial(lr_scheduler.CosineAnnealingLR, T_max=n) for n in (20, 30)),
    "OneCycleLR": tuple(partial(lr_scheduler.OneCycleLR, max_lr=lr, total_steps=40) for lr in (0.1, 0.4)),
    "WarmRestarts": tuple(partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=n) for n in (3, 4)),
    "SequentialLR": tuple(
        partial(
            lambda o, n: lr_scheduler.SequentialLR(
                o, [lr_scheduler.LinearLR(o, total_iters=n), lr_scheduler.ExponentialLR(o, 0.9)], [n]
            ),
            n=n,
        )
        for n in (3, 4)
    ),
    "ChainedScheduler": tuple(
        partial(
            lambda o, n: lr_scheduler.ChainedScheduler(
                [lr_scheduler.LinearLR(o, total_iters=n), lr_scheduler.ExponentialLR(o, 0.9)]
            ),
            n=n,
        )
        for n in (3, 4)
    ),
    "LambdaLR": tuple(partial(lr_scheduler.LambdaLR, lr_lambda=partial(cut, by=by)) for by in (0.5, 0.75)),
    "ours": tuple(partial(schedules.warmup_cosine, warmup=2, total=n) for n in (20, 30)),
    "timm": tuple(partial(timm, t_initial=n, warmup_t=2, warmup_lr_init=1e-4) for n in (20, 30)),
}
STEPS = 5


class Job(NamedTuple):
    """A small job's objects."""

    model: nn.Module
    optimizer: Optimizer
    schedule: Any
    state: State


def job(
    make: Callable[..., Optimizer] = torch.optim.AdamW,
    schedule: Callable[..., Any] | None = None,
    groups: dict[str, Any] | None = None,
    **options: Any,
) -> Job:
    """Return a job whose second group has *groups*."""
    model = net()
    first, second = model.parameters()
    optimizer = make([{"params": [first]}, {"params": [second], **(groups or {})}], **options)
    made = None if schedule is None else schedule(optimizer)
    return Job(model, optimizer, made, State(model=model, optimizer=optimizer, scheduler=made))


def trained(run: Job, steps: range) -> Job:
    """Train it."""
    train(run.model, run.optimizer, steps, *([] if run.schedule is None else [run.schedule]))
    return run


def go_on(before: Job, after: Job) -> list[str]:
    """Have *after* resume from a snapshot of *before*; return what has changed."""
    captured = before.state.capture()
    content = json.loads(json.dumps(captured.tree, allow_nan=False))
    tensors = {key: tensor.detach().clone() for key, tensor in captured.tensors.items()}
    options = json.loads(json.dumps(before.state.options.to_json()))
    changes = after.state.options.changes_since(options)
    after.state.apply(content, tensors, captured.memory_formats, changes, options)
    return [change.option for change in changes]


class ScheduleFree(torch.optim.SGD):
    """An optimizer that writes an option of its own in its first step."""

    def step(self, closure: Any = None) -> Any:
        """Write the rate down, and step."""
        for group in self.param_groups:
            group["scheduled_lr"] = group["lr"] / 2
        return super().step(closure)


def test_an_option_that_an_optimizer_writes_in_its_first_step_is_the_snapshots() -> None:
    """As `scheduled_lr` of AdamWScheduleFree: an optimizer that has just been made has no such option."""
    before, after = job(ScheduleFree, lr=0.5), job(ScheduleFree, lr=0.5)
    trained(before, range(STEPS))
    assert go_on(before, after) == []
    assert after.optimizer.param_groups[0]["scheduled_lr"] == 0.25


def rates(run: Job) -> list[float]:
    """Return the rates of its groups."""
    return [group["lr"] for group in run.optimizer.param_groups]


def test_changed_options_count_and_moments_stay() -> None:
    """The first step after it is the one the old optimizer takes whose options somebody has set by hand."""
    before = trained(job(lr=0.1, groups={"weight_decay": 0.2}), range(STEPS))
    after = job(lr=0.5, betas=(0.8, 0.9), groups={"weight_decay": 0.3})
    assert go_on(before, after) == ["betas", "lr", "betas", "lr", "weight_decay"]
    for group, decay in zip(before.optimizer.param_groups, (0.01, 0.3), strict=True):
        group |= {"lr": 0.5, "betas": (0.8, 0.9), "weight_decay": decay}
    for run in (before, after):
        trained(run, range(STEPS, STEPS + 3))
    assert before.optimizer.param_groups[1]["weight_decay"] == 0.3
    assert all(
        torch.equal(*pair) for pair in zip(before.model.parameters(), after.model.parameters(), strict=True)
    )


def test_what_the_step_has_moved_stays_where_the_job_is_as_it_was() -> None:
    """A step may set the rate itself: only an option that the job has changed is the job's."""
    before = trained(job(lr=0.1), range(STEPS))
    before.optimizer.param_groups[0]["lr"] = 0.03
    after = job(lr=0.1, weight_decay=0.5)
    assert go_on(before, after) == ["weight_decay"] * 2
    assert rates(after) == [0.03, 0.1]
    again = job(lr=0.1, weight_decay=0.5)
    assert go_on(after, again) == []
    assert rates(again) == [0.03, 0.1]
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("changes", ["rate", "schedule", "decay"])
def test_schedule_is_where_it_would_be_had_the_job_begun_like_this(name: str, changes: str) -> None:
    """Rates after a change are those of a job that had the new options from its first step; else those of the old."""
    then, now = SCHEDULES[name]
    options: dict[str, Any] = {"lr": 0.2, "weight_decay": 0.1}
    before = trained(job(schedule=then, **options), range(STEPS))
    options |= {"rate": {"lr": 0.7}, "schedule": {}, "decay": {"weight_decay": 0.4}}[changes]
    new = now if changes == "schedule" else then
    after, whole = job(schedule=new, **options), trained(job(schedule=new, **options), range(STEPS))
    # OneCycleLR sets its own rates: an optimizer's says nothing.
    assert go_on(before, after) or (name, changes) == ("OneCycleLR", "rate")
    for step in range(STEPS, STEPS + 6):
        assert after.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
        assert after.optimizer.param_groups[0]["weight_decay"] == options["weight_decay"]
        assert after.optimizer.param_groups[0]["betas"] == whole.optimizer.param_groups[0]["betas"]
        for run in (after, whole):
            trained(run, range(step, step + 1))


def test_schedule_of_the_optimizer_that_changed_alone_is_played_through() -> None:
    """Of two optimizers the one that is as it was keeps the rate that the step has set."""
    model = net()
    before = {key: torch.optim.SGD([p], lr=0.1) for key, p in zip("ab", model.parameters(), strict=True)}
    several = Schedules({key: lr_scheduler.StepLR(o, 1, 0.5) for key, o in before.items()})
    state = State(model=model, optimizers=before, scheduler=several)
    for optimizer in before.values():
        optimizer.step()
    several.step()
    several.step()
    before["b"].param_groups[0]["lr"] = 0.009
    other = net()
    after = {
        key: torch.optim.SGD([p], lr=lr)
        for key, p, lr in zip("ab", other.parameters(), (0.8, 0.1), strict=True)
    }
    target = State(
        model=other,
        optimizers=after,
        scheduler=Schedules({key: lr_scheduler.StepLR(o, 1, 0.5) for key, o in after.items()}),
    )
    captured = state.capture()
    changes = target.options.changes_since(state.options.to_json())
    target.apply(captured.tree, captured.tensors, captured.memory_formats, changes)
    assert {change.part for change in changes} == {"optimizer.a", "scheduler.a"}
    assert after["a"].param_groups[0]["lr"] == pytest.approx(0.2)
    assert after["b"].param_groups[0]["lr"] == 0.009


@pytest.mark.parametrize(
    ("make", "then", "now"),
    [
        (torch.optim.Adam, {}, {"amsgrad": True}),
        (torch.optim.RMSprop, {}, {"momentum": 0.9, "centered": True}),
        (torch.optim.SGD, {}, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {}, {"fused": True}),
        (torch.optim.AdamW, {"fused": True}, {"foreach": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.2)}),
        (torch.optim.AdamW, {"lr": 0.1}, {"lr": torch.tensor(0.2)}),
    ],
)
def test_optimizer_goes_on_with_options_that_need_more(
    make: Callable[..., Optimizer], then: dict[str, Any], now: dict[str, Any]
) -> None:
    """What an option keeps for each parameter begins as it does in a new optimizer; the optimizer's own form is kept."""
    before = trained(job(make, **{"lr": 0.01, **then}), range(STEPS))
    after = job(make, **{"lr": 0.01, **now})
    assert go_on(before, after)
    trained(after, range(STEPS, STEPS + 2))
    for group in after.optimizer.param_groups:
        assert {key: group[key] for key in now} == now
    assert all(p.isfinite().all() for p in after.model.parameters())


def test_options_of_an_older_snapshot_are_unknown() -> None:
    """A part that nobody wrote down has not changed."""
    assert job(lr=0.5).state.options.changes_since({}) == []


def test_functions_differ_by_what_they_were_given() -> None:
    """A factor's name, closure, defaults and partial arguments count; the place of an object in memory does not."""

    def made(by: float) -> dict[str, Any]:
        return job(
            lr=0.1, schedule=lambda o: lr_scheduler.LambdaLR(o, lambda n: by**n)
        ).state.options.to_json()

    assert made(0.5) == made(0.5)
    assert made(0.5) != made(0.6)
