"""Schedules with a warm-up: their rates step by step, and resuming in the middle."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticflow import schedules

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

FACTORIES = ("warmup_cosine", "warmup_linear", "warmup_stable_decay")


def optimizer_of(*rates: float) -> Optimizer:
    """Return an optimizer with a parameter group for each rate."""
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates_of(name: str, steps: int, **args: Any) -> list[float]:
    """Return the rate of each step, at a full rate of 1."""
    optimizer = optimizer_of(1.0)
    return advance(getattr(schedules, name)(optimizer, **args), optimizer, steps)


def advance(schedule: LambdaLR, optimizer: Optimizer, steps: int) -> list[float]:
    """Return the rate of each of the next steps."""
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_a_cosine_is_nanogpts() -> None:
    """Karpathy's get_lr, with min_lr as a part of learning_rate."""
    warmup, total, final = 5, 40, 0.1

    def get_lr(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if step > total:
            return final
        over = (step - warmup) / (total - warmup)
        return final + 0.5 * (1.0 + math.cos(math.pi * over)) * (1 - final)

    rates = rates_of("warmup_cosine", 50, warmup=warmup, total=total, final=final)
    assert rates == pytest.approx([get_lr(step) for step in range(50)])


def test_the_others_by_hand() -> None:
    """Linear; stable and then down, in each shape."""
    assert rates_of("warmup_linear", 8, warmup=1, total=5) == pytest.approx(
        [0.5, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    )
    wsd = {"warmup": 1, "total": 8, "decay": 4}
    start = [0.5, 1, 1, 1]
    assert rates_of("warmup_stable_decay", 9, **wsd) == pytest.approx([*start, 1, 0.75, 0.5, 0.25, 0])
    sqrt = [1 - math.sqrt(part) for part in (0, 0.25, 0.5, 0.75)]
    assert rates_of("warmup_stable_decay", 9, **wsd, shape="sqrt") == pytest.approx([*start, *sqrt, 0])
    cosine = rates_of("warmup_stable_decay", 9, **wsd, shape="cosine", final=0.5)
    assert cosine[6] == pytest.approx(0.75)
    assert cosine[8] == pytest.approx(0.5)


@given(data=st.data(), name=st.sampled_from(FACTORIES), final=st.floats(0, 1))
def test_every_rate_is_between_none_and_all(data: st.DataObject, name: str, final: float) -> None:
    """Rises to the full rate at the step after the warm-up, never rises afterwards, and stays at `final`."""
    total = data.draw(st.integers(1, 60))
    warmup = data.draw(st.integers(0, total - 1))
    more = {"decay": data.draw(st.integers(0, total - warmup))} if name == "warmup_stable_decay" else {}
    rates = rates_of(name, total + 3, warmup=warmup, total=total, final=final, **more)
    assert rates[warmup] == pytest.approx(1)
    assert 0 < rates[0]
    assert rates[: warmup + 1] == sorted(rates[: warmup + 1])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[total:] == pytest.approx([final] * 3)


@pytest.mark.parametrize("name", FACTORIES)
def test_it_goes_on_where_it_was(name: str) -> None:
    """Its state is JSON, and a schedule of a new optimizer that loads it has the rates that were still to come."""
    args = {"warmup": 3, "total": 20, **({"decay": 5} if name == "warmup_stable_decay" else {})}
    optimizer, again = optimizer_of(1.0, 0.1), optimizer_of(1.0, 0.1)
    schedule = getattr(schedules, name)(optimizer, **args)
    advance(schedule, optimizer, 7)
    loaded = getattr(schedules, name)(again, **args)
    loaded.load_state_dict(schedule.state_dict())
    again.load_state_dict(optimizer.state_dict())
    assert advance(loaded, again, 15) == advance(schedule, optimizer, 15)
    assert again.param_groups[1]["lr"] == pytest.approx(again.param_groups[0]["lr"] / 10)


WRONG = [
    ("warmup_cosine", {"warmup": -1, "total": 5}, "warmup must be a whole number"),
    ("warmup_cosine", {"warmup": 1.5, "total": 5}, "warmup must be a whole number"),
    ("warmup_linear", {"warmup": True, "total": 5}, "warmup must be a whole number"),
    ("warmup_linear", {"warmup": 6, "total": 5}, "warmup = 6 is more than total = 5"),
    ("warmup_stable_decay", {"warmup": 3, "total": 5, "decay": 3}, r"warmup \+ decay = 6"),
    ("warmup_stable_decay", {"warmup": 3, "total": 5, "decay": 1, "shape": "x"}, "shape must be"),
    ("warmup_cosine", {"warmup": 1, "total": 5, "final": 1e-5 + 1}, "final must be from 0 to 1"),
]


@pytest.mark.parametrize(("name", "args", "message"), WRONG)
def test_numbers_out_of_range_are_refused(name: str, args: dict[str, Any], message: str) -> None:
    """When it is made, not at some step."""
    with pytest.raises(ValueError, match=message):
        getattr(schedules, name)(optimizer_of(1.0), **args)
