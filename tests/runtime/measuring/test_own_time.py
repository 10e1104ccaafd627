"""A rank's own part of a step: what it does before it meets the others, and nothing else."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from elasticflow.runtime.data.index_loader import Batch
from elasticflow.runtime.measuring import own_time as own_time_module
from elasticflow.runtime.measuring.own_time import WINDOW_S, DeviceOwnTime, OwnTime, StepTimes, own_time
from elasticflow.runtime.process.context import Worker
from elasticflow.runtime.process.position import Position, even_split
from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.training.replicated_step import micro_batches

if TYPE_CHECKING:
    from typing import Any


class Clock:
    """The host's clock, which the test turns."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        patch.setattr(own_time_module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def step(self, clock: OwnTime, own_s: float, waiting_s: float) -> None:
        """Let a step pass: the rank's own part, then the part in which it waits for others."""
        self.now += own_s
        clock.end_own_part()
        clock.end_own_part()  # in a step with several exchanges
        self.now += waiting_s
        clock.begin_step()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the host's clock."""
    return Clock(monkeypatch)


def test_waiting_for_others_is_not_the_ranks_own(host: Clock) -> None:
    """The own part is the median over the window, so that an odd step does not count; the whole step is the mean."""
    told: list[StepTimes] = []
    clock = OwnTime(told.append)
    clock.begin_step()
    for number in range(12):
        host.step(clock, 5.0 if number == 4 else 0.2, 0.3)
    [first, *_] = told
    assert first.own_s == pytest.approx(0.2)
    assert first.step_s > 0.45


def test_window_has_seconds_and_steps(host: Clock) -> None:
    """Quick steps are told every few seconds; slow steps once there are some."""
    told: list[StepTimes] = []
    clock = OwnTime(told.append)
    for _ in range(int(10 * WINDOW_S / 0.01)):
        host.step(clock, 0.005, 0.005)
    assert 9 <= len(told) <= 10
    told.clear()
    for _ in range(20):
        host.step(clock, 10.0, 0.0)
    assert len(told) == 4


def test_work_between_steps_is_left_out(host: Clock) -> None:
    """An evaluation, say, in which all ranks wait for each other."""
    told: list[StepTimes] = []
    clock = OwnTime(told.append)
    clock.begin_step()
    for _ in range(10):
        host.now += 30.0
        clock.begin_anew()
        host.step(clock, 0.4, 0.2)
    assert {round(times.own_s, 3) for times in told} == {0.4}


def test_vote_ends_the_own_part() -> None:
    """Whoever exchanges anything with the others asks for the requests of this rank."""
    ended: list[int] = []
    vote = Vote()
    vote.end_own_part = lambda: ended.append(1)
    vote.requests()
    assert ended == [1]


class Device:
    """Events of a device that is behind the host; those before `through` are done."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.through = 0.0, 0.0
        device = self

        class Event:
            def __init__(self, _: torch.device, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, _: Any) -> None:
                self.at = device.now

            def query(self) -> bool:
                return self.at <= device.through

            def elapsed_time(self, other: Event) -> float:
                assert self.query()
                assert other.query()
                return 1000 * (other.at - self.at)

        patch.setattr(torch, "Event", Event)
        patch.setattr(torch.accelerator, "current_stream", lambda _: None)


def test_device_is_timed_by_its_own_clock(host: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is through its part at once; nobody waits for the device, whose steps are told once they are done."""
    device, told = Device(monkeypatch), list[StepTimes]()
    clock = own_time(torch.device("cuda", 0), told.append)
    assert isinstance(clock, DeviceOwnTime)
    clock.begin_step()
    for _ in range(40):
        device.now += 0.25  # kernels of the forward
        clock.end_own_part()
        device.now += 0.5  # those that wait for other ranks
        device.through = device.now - 1.5
        host.now += 0.75
        clock.begin_step()
    assert told
    assert {times.own_s for times in told} == {0.25}
    assert {times.step_s for times in told} == {0.75}


def test_device_that_lags_behind_is_not_waited_for(host: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is told, and no more than some events are kept."""
    device, told = Device(monkeypatch), list[StepTimes]()
    clock = DeviceOwnTime(torch.device("cuda", 0), told.append)
    for _ in range(1000):
        device.now += 1.0
        clock.end_own_part()
        host.now += 0.1
        clock.begin_step()
    assert told == []
    assert len(clock._parts) <= 256
    device.through = device.now
    for _ in range(40):
        host.now += 0.1
        clock.begin_step()
    assert told


def test_part_that_is_done_while_the_window_ends_counts_once(
    host: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device goes on while its events are asked for: one is not done, and the next is."""
    device, told = Device(monkeypatch), list[StepTimes]()
    clock = DeviceOwnTime(torch.device("cuda", 0), told.append)
    clock.begin_step()
    for own_s in (1.0, 2.0, 3.0):
        device.now += own_s
        clock.end_own_part()
        clock.begin_anew()
    device.through = 1.0
    answers, query = [], torch.Event.query

    def late(event: Any) -> bool:
        answers.append(query(event))
        if len(answers) == 2:
            device.through = device.now
        return answers[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Event, "query", late)
        taken = clock._taken()
    assert taken + clock._taken() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("shards", [8, 16, 3])
def test_rank_with_more_to_do_is_not_slow(
    host: Clock, monkeypatch: pytest.MonkeyPatch, kind: str, shards: int
) -> None:
    """Shards that seven ranks cannot share evenly: each rank tells the time of an even share, one with none tells nothing."""
    device = Device(monkeypatch)
    told: list[list[float]] = []
    for rank in range(7):
        vote, times = Vote(), list[StepTimes]()
        clock = own_time(torch.device(kind, 0), times.append)
        worker: Any = SimpleNamespace(vote=vote, world_size=7, progress=SimpleNamespace(own_time=clock))
        vote.end_own_part = partial(Worker._end_own_part, worker)
        low, high = even_split(shards, 7, rank)
        clock.begin_step()
        for number in range(1, 40):
            keys, pieces = list(range(low, high)), iter([("data", 5)] * (high - low))
            batch = Batch(5 * shards, Position(number, 0, 0, 0, False), keys, pieces)
            for _ in micro_batches(batch, vote):
                host.now += 0.1
                device.now += 0.1
            vote.requests()
            host.now += 1.0
            device.now += 1.0
            device.through = device.now
            clock.begin_step()
        assert bool(times) == (high > low)
        told.append([each.own_s for each in times])
    assert [own_s for each in told for own_s in each] == pytest.approx(
        [0.1 * shards / 7] * sum(map(len, told))
    )
