"""The time of a step that is a rank's own, without the time in which it waits for other ranks: so that slow ranks are known.

A step's own part begins when the step before is finished, and ends when the rank is about to exchange something with the
others: after the forward of the last micro-batch (`DistributedDataParallel` exchanges during the backward), after the backward
in exact mode and where a step moves its optimizers itself; in a loop that the script writes, when the script gets its batch.

A batch that is not cut evenly gives some ranks more to do: the own part is told as for an even share of the samples.
"""

from __future__ import annotations

import time
from itertools import takewhile
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_S = 3.0
_FEWEST_STEPS = 5
# Each step of a device takes two of its events.
_MOST_STEPS = 256


class StepTimes(NamedTuple):
    """Seconds of a step over a window of steps: the rank's own part for an even share (median), and all of it (mean)."""

    own_s: float
    step_s: float


class OwnTime:
    """Measures this rank's own part of each step, by the host's clock.

    Args:
        report: Called with the times of a window of steps: at least `WINDOW_S` seconds and five steps.
    """

    def __init__(self, report: Callable[[StepTimes], None]) -> None:
        self._report = report
        self._began: float | None = None
        self._owns: list[float] = []
        self._since: float | None = None
        self._steps, self._due = 0, 0.0

    def begin_step(self) -> None:
        """Begin a step; the step before is finished. The first call begins the first window: a first step is like no other."""
        now = self._began = time.perf_counter()
        self._steps += 1
        if now >= self._due:
            self._end_window(now)

    def begin_anew(self) -> None:
        """Begin the step after other work, such as an evaluation."""
        self._began = time.perf_counter()

    def end_own_part(self, share: float = 1.0) -> None:
        """End this rank's own part of the step; the first call in a step counts.

        Args:
            share: This rank's samples of the step divided by those of an even share; with 0, the step has no own part.
        """
        if self._began is not None:
            if share > 0:
                self._owns.append((time.perf_counter() - self._began) / share)
            self._began = None

    def _taken(self) -> list[float]:
        """Return the own parts of the window's steps, and forget them."""
        owns, self._owns = self._owns, []
        return owns

    def _end_window(self, now: float) -> None:
        since, steps = self._since, self._steps
        if since is not None and steps < _FEWEST_STEPS:
            return
        self._since, self._steps, self._due = now, 0, now + WINDOW_S
        owns = self._taken()
        if since is not None and owns:
            self._report(StepTimes(median(owns), (now - since) / steps))


class DeviceOwnTime(OwnTime):
    """Measures the same on an accelerator, by events in the stream of the training: the host runs ahead of the device.

    The time in which the device has nothing to do, since the host or the data are late, counts.
    """

    def __init__(self, device: torch.device, report: Callable[[StepTimes], None]) -> None:
        super().__init__(report)
        self._device = device
        self._first: torch.Event | None = None
        self._parts: list[tuple[torch.Event, torch.Event, float]] = []

    def begin_step(self) -> None:
        """Begin a step; see `OwnTime`."""
        super().begin_step()
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin the step after other work."""
        self._first = self._event() if len(self._parts) < _MOST_STEPS else None

    def end_own_part(self, share: float = 1.0) -> None:
        """End this rank's own part of the step; see `OwnTime`."""
        if self._first is not None:
            if share > 0:
                self._parts.append((self._first, self._event(), share))
            self._first = None

    def _taken(self) -> list[float]:
        # Asked one after the other, a later part may be done by now though an earlier was not: it stays for the next window.
        through = list(takewhile(lambda part: part[1].query(), self._parts))
        self._parts = self._parts[len(through) :]
        return [first.elapsed_time(last) / 1000 / share for first, last, share in through]

    def _event(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def own_time(device: torch.device, report: Callable[[StepTimes], None]) -> OwnTime:
    """Return the clock of a rank whose model is on *device*."""
    return OwnTime(report) if device.type == "cpu" else DeviceOwnTime(device, report)
