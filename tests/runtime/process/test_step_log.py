"""What a step's line says of it: the learning rates it used, by the names of the parameter groups."""

from __future__ import annotations

import json
import math
import os
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from elasticflow.protocol.worker_environment import DeviceUsage
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.process.step_log import Heartbeat, LearningRates, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCHEDULE = IndexSchedule(10, 2, epochs=2)

# A line's seconds are rounded to microseconds: of a step of four, an eighth.
A_STEP_S = 0.002


@pytest.fixture
def log(tmp_path: Path) -> Iterator[int]:
    """Return the descriptor of an empty file."""
    descriptor = os.open(tmp_path / "log", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def lines(descriptor: int) -> list[dict[str, Any]]:
    """Return what was written."""
    return [json.loads(line) for line in os.pread(descriptor, 1 << 20, 0).splitlines()]


def parameter() -> nn.Parameter:
    """Return a scalar whose gradient is one."""
    found = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    found.grad = torch.ones_like(found)
    return found


@pytest.mark.parametrize("log_every", [1, 3])
def test_logged_rate_is_how_far_the_step_moved_a_weight(log: int, log_every: int) -> None:
    """Under SGD with a gradient of one; the schedule sets the next step's rate before the line is written."""
    weight, other = parameter(), parameter()
    groups: list[dict[str, Any]] = [{"params": [weight], "name": "first"}, {"params": [other], "lr": 0.5}]
    optimizer = SGD(groups, lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: 0.5**step)
    progress = Progress(Heartbeat(None, 0), [log], {"job": "j"}, lambda _: None)
    progress.start(0, log_every)
    moved, position = [], SCHEDULE.start
    for _ in range(6):
        before = [weight.item(), other.item()]
        optimizer.step()
        moved.append([before[0] - weight.item(), before[1] - other.item()])
        progress.note_rates(optimizer)
        scheduler.step()
        position = SCHEDULE.batch(position)[2]
        progress.step(position, 0.0, optimizer)
    progress.flush()
    found = lines(log)
    assert [line["step"] for line in found] == list(range(log_every, 7, log_every))
    for line in found:
        assert line["lr"] == pytest.approx(dict(zip(("first", "1"), moved[line["step"] - 1], strict=True)))


def test_usage_of_the_device_stands_in_one_line(log: int) -> None:
    """The next line has none until it was read again; what is unknown is left out."""
    optimizer, position = SGD([parameter()], lr=0.1), SCHEDULE.start
    progress = Progress(Heartbeat(None, 0), [log], {"job": "j"}, lambda _: None)
    progress.start(0, 1)
    for usage in (None, DeviceUsage(700, 2000, 900, 87), None, DeviceUsage(800, 2000, 950)):
        progress.usage = usage or progress.usage
        position = SCHEDULE.batch(position)[2]
        progress.step(position, 0.0, optimizer)
    progress.flush()
    found = [{name: line[name] for name in DeviceUsage._fields if name in line} for line in lines(log)]
    memory = {"memory_allocated": 700, "memory_reserved": 2000, "memory_peak": 900}
    assert found == [
        {},
        {**memory, "utilization": 87},
        {},
        {**memory, "memory_allocated": 800, "memory_peak": 950},
    ]


def test_a_warm_up_from_nothing_is_logged_as_nothing(log: int) -> None:
    """The first step used a rate of 0; the next one's is what the optimizer has by then."""
    optimizer = SGD([parameter()], lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: step / 10)
    progress = Progress(Heartbeat(None, 0), [log], {"job": "j"}, lambda _: None)
    progress.start(0, 1)
    position = SCHEDULE.start
    for _ in range(3):
        optimizer.step()
        progress.note_rates(optimizer)
        scheduler.step()
        position = SCHEDULE.batch(position)[2]
        progress.step(position, 0.0, optimizer)
    progress.flush()
    assert [line["lr"] for line in lines(log)] == pytest.approx([0.0, 0.1, 0.2])


def test_rates_without_a_schedule_are_read_with_the_step(log: int) -> None:
    """As train.py of a job without one has it, and an edited one of an earlier version; one group is one number."""
    optimizer = SGD([parameter()], lr=0.25)
    progress = Progress(Heartbeat(None, 0), [log], {}, lambda _: None)
    progress.start(0, 1)
    progress.step(SCHEDULE.batch(SCHEDULE.start)[2], 0.0, optimizer)
    progress.flush()
    assert [line["lr"] for line in lines(log)] == [0.25]


def of(*names: Any) -> SGD:
    """Return an optimizer with groups of these names, at rates 1, 2, ..."""
    groups = [
        {"params": [parameter()], "lr": float(number)} | ({} if name is None else {"name": name})
        for number, name in enumerate(names, 1)
    ]
    return SGD(groups)


@pytest.mark.parametrize(
    ("optimizers", "expected"),
    [
        (of("only"), 1.0),
        (of("decay", "bias"), {"decay": 1.0, "bias": 2.0}),
        (of("decay", None, 7), {"decay": 1.0, "1": 2.0, "2": 3.0}),
        (of("twice", "twice"), {"0": 1.0, "1": 2.0}),
        ({"g": of("only"), "d": of("decay", None)}, {"g": 1.0, "d/decay": 1.0, "d/1": 2.0}),
        ([of("only"), of("only")], {"0": 1.0, "1": 1.0}),
    ],
)
def test_rates_of_several_groups_have_the_groups_names(optimizers: Any, expected: Any) -> None:
    """A group without a name of its own has its number; of several optimizers each has its name or number."""
    rates = LearningRates()
    assert json.loads(rates.json(rates.read(optimizers))) == expected


def test_a_rate_that_is_no_number_is_null() -> None:
    """JSON has no NaN, and an optimizer may have no rate at all."""
    optimizer = of("only")
    rates = LearningRates()
    optimizer.param_groups[0]["lr"] = float("nan")
    assert rates.json(rates.read(optimizer)) == "null"
    del optimizer.param_groups[0]["lr"]
    assert rates.json(rates.read(optimizer)) == "null"


def test_a_line_says_what_the_step_returned_and_how_fast_it_was(log: int) -> None:
    """Scalars beside our own fields, null for what is not finite; items per second by their name."""
    progress = Progress(Heartbeat(None, 0), [log], {}, lambda _: None)
    progress.start(0, 2, count_name="tokens", of_peak=0.01)
    optimizer, position = SGD([parameter()], lr=0.25), SCHEDULE.start
    for number in range(1, 5):
        position = SCHEDULE.batch(position)[2]
        progress.note_step(10.0 * number, {"kl": 0.5 * number, "bad": math.inf})
        if progress.is_next_logged:
            progress.note_grad_norm(float(number))
        time.sleep(A_STEP_S)
        progress.step(position, 1.0, optimizer)
    progress.flush()
    found = lines(log)
    assert [line["count"] for line in found] == [20, 40]
    assert [line["kl"] for line in found] == [1.0, 2.0]
    assert [line["bad"] for line in found] == [None, None]
    assert [line["grad_norm"] for line in found] == [2.0, 4.0]
    for line, items in zip(found, (30, 70), strict=True):
        seconds = 2 * line["seconds"]
        assert line["tokens_per_s"] == pytest.approx(items / seconds, rel=0.05)
        assert line["mfu"] == pytest.approx(0.01 * 4 / seconds, rel=0.05)


def test_what_lies_between_steps_is_in_no_rate(log: int) -> None:
    """An evaluation, a snapshot or a hook: samples and items from before it are not divided by the time after it."""
    progress = Progress(Heartbeat(None, 0), [log], {}, lambda _: None)
    progress.start(0, 4, of_peak=0.01)
    optimizer, position = SGD([parameter()], lr=0.25), SCHEDULE.start
    for number in range(4):
        position = SCHEDULE.batch(position)[2]
        progress.note_step(10.0, {})
        time.sleep(A_STEP_S)
        progress.step(position, 1.0, optimizer)
        if number == 2:
            progress.go_on()
    progress.flush()
    (line,) = lines(log)
    assert line["items_per_s"] == pytest.approx(10 / line["seconds"], rel=0.1)
    assert line["mfu"] == pytest.approx(0.01 * 2 / line["seconds"], rel=0.1)


def test_a_norm_that_is_still_computed_is_waited_for_by_the_next_line(log: int) -> None:
    """A step's line is written one step later then, and never asked for sooner unless something must come after it."""

    class Late:
        def __init__(self) -> None:
            self.has_been_asked = False

        def __float__(self) -> float:
            self.has_been_asked = True
            return 3.0

    progress = Progress(Heartbeat(None, 0), [log], {}, lambda _: None)
    progress.start(0, 1)
    optimizer, position = SGD([parameter()], lr=0.25), SCHEDULE.start
    norms = [Late() for _ in range(10)]
    for number, norm in enumerate(norms):
        position = position._replace(step=number + 1)
        progress.note_grad_norm(norm)
        progress.step(position, 1.0, optimizer)
        assert not norm.has_been_asked
    assert len(lines(log)) >= 7
    progress.flush()
    assert [line["grad_norm"] for line in lines(log)] == [3.0] * 10


def test_norms_of_several_optimizers_are_named(log: int) -> None:
    """As their learning rates are."""
    progress = Progress(Heartbeat(None, 0), [log], {}, lambda _: None)
    progress.start(0, 1)
    progress.note_grad_norm({"g": 1.5, "d": math.nan})
    progress.step(SCHEDULE.batch(SCHEDULE.start)[2], 1.0, SGD([parameter()], lr=0.1))
    progress.flush()
    assert [line["grad_norm"] for line in lines(log)] == [{"g": 1.5, "d": None}]
