"""One line per step and one heartbeat per rank, cheap enough for steps of a millisecond (floor R)."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.environment import HEARTBEAT, HEARTBEAT_SLOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

    from elasticflow.runtime.order import Position


class Heartbeat:
    """This rank's slot in the shared memory that the agent watches; without one, nothing happens."""

    def __init__(self, descriptor: int | None, local_rank: int) -> None:
        self._memory = None if descriptor is None else mmap.mmap(descriptor, 0)
        self._offset = local_rank * HEARTBEAT_SLOT
        self._beats = 0
        self._step = 0
        self._phase = b"starting"

    def phase(self, name: str) -> None:
        """Say what this rank is doing."""
        self._phase = name.encode()
        self.beat()

    def beat(self, step: int | None = None) -> None:
        """Say that this rank lives, and how many steps it has finished."""
        if step is not None:
            self._step = step
        if self._memory is not None:
            self._beats += 1
            HEARTBEAT.pack_into(self._memory, self._offset, self._beats, self._step, time.time(), self._phase)


class Progress:
    """Reports finished steps.

    Args:
        heartbeat: This rank's.
        outputs: File descriptors that step lines go to; none on ranks other than 0.
        bound: Fields of every line (`job`, `run_id`, ...).
        on_first_step: Called once, with the first step finished here.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        outputs: Sequence[int],
        bound: dict[str, Any],
        on_first_step: Callable[[int], None],
    ) -> None:
        self._heartbeat, self._outputs = heartbeat, outputs
        # Serialised once: structlog takes 50 us a line.
        self._bound = json.dumps({"level": "info", "event": events.STEP, **bound})[1:-1]
        self._on_first_step: Callable[[int], None] | None = on_first_step
        self.number = 0
        self._log_every = 1
        self._since, self._steps = time.perf_counter(), 0
        self._second, self._date = 0, ""

    def start(self, step: int, log_every: int) -> None:
        """Begin counting at *step* finished steps."""
        self.number, self._log_every = step, log_every
        self._heartbeat.beat(step)
        self.go_on()

    def go_on(self) -> None:
        """Leave out of the next line's seconds what passed since the last step."""
        self._since, self._steps = time.perf_counter(), 0

    def step(self, position: Position, loss: float, optimizer: Optimizer) -> None:
        """Report a finished step with the global batch's mean loss. Every rank; rank 0 logs it."""
        number = self.number = position.step
        self._steps += 1
        self._heartbeat.beat(number)
        if self._outputs and number % self._log_every == 0:
            self._write(position, loss, optimizer)
        if self._on_first_step is not None:
            self._on_first_step(number)
            self._on_first_step = None

    def _write(self, position: Position, loss: float, optimizer: Optimizer) -> None:
        now = time.perf_counter()
        seconds = (now - self._since) / self._steps
        self._since, self._steps = now, 0
        unix = time.time()
        second = int(unix)
        if second != self._second:  # formatting the date anew would be half of the line's cost
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        rate = float(optimizer.param_groups[0]["lr"])
        line = (
            f'{{"timestamp": "{self._date}.{int((unix - second) * 1e6):06d}Z", {self._bound}, "step": {position.step}, '
            f'"epoch": {position.epoch}, "samples": {position.samples}, '
            f'"loss": {loss if math.isfinite(loss) else "null"}, "lr": {rate}, '
            f'"time": {unix:.3f}, "seconds": {seconds:.6f}}}\n'
        ).encode()
        for output in self._outputs:
            os.write(output, line)
