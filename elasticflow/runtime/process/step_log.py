"""One line per step and one heartbeat per rank, cheap enough for steps of a millisecond."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from typing import TYPE_CHECKING, Any

from elasticflow import events, logs
from elasticflow.protocol.worker_environment import HEARTBEAT, HEARTBEAT_SLOT, HELD
from elasticflow.runtime.process.learning_rates import LearningRates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.runtime.process.learning_rates import AnyOptimizers, Rates
    from elasticflow.runtime.process.position import Position


class Heartbeat:
    """This rank's slot in the shared memory that the agent watches; without one, nothing happens.

    A beat is progress. Phases are start, build, restore, compile (the first step, and whatever torch compiles later),
    step, data (waiting for loader processes), evaluate, snapshot and leave: the agent learns how long a rank stands
    still in each.
    """

    def __init__(self, descriptor: int | None, local_rank: int) -> None:
        self._memory = None if descriptor is None else mmap.mmap(descriptor, 0)
        self._offset = local_rank * HEARTBEAT_SLOT
        self._beats = 0
        self._step = 0
        self._phase = b"start"

    def phase(self, name: str) -> str:
        """Say what this rank is doing; return the phase before."""
        before, self._phase = self._phase.decode(), name.encode()
        self.beat()
        return before

    def beat(self, step: int | None = None) -> None:
        """Say that this rank lives, and how many steps it has finished."""
        if step is not None:
            self._step = step
        if self._memory is not None:
            self._beats += 1
            HEARTBEAT.pack_into(self._memory, self._offset, self._beats, self._step, self._phase)

    def hold(self, step: int) -> None:
        """Say that the state after *step* is held in the node's memory."""
        if self._memory is not None:
            HELD.pack_into(self._memory, self._offset + HEARTBEAT.size, step)


# How long and for how many a line waits: formatting several at once is three times as fast as in the midst of a step.
_LATE_S = 0.1
# Fewer than a pipe takes in one piece, so that lines of several ranks on one stdout never tear.
_MOST_WAITING = 8


class Progress:
    """Reports finished steps.

    Lines of quick steps are written together, a tenth of a second late at most while steps go on; `flush` before
    anything that must come after them.

    Args:
        heartbeat: This rank's.
        outputs: File descriptors that step lines go to; none on ranks other than 0.
        bound: Fields of every line (`job`, `run_id`, ...).
        on_first_step: Called once, with the first step finished here.

    Attributes:
        after_step: Called with each finished step and its loss, once all else is done.
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
        self._bound = json.dumps({"level": "info", "event": events.STEP, "origin": logs.OURS, **bound})[1:-1]
        self._on_first_step: Callable[[int], None] | None = on_first_step
        self.after_step: Callable[[Position, float], None] | None = None
        self.number = 0
        self._log_every = 1
        self._since, self._steps = time.perf_counter(), 0
        self._second, self._date = 0, ""
        self._waiting: list[tuple[Position, float, Rates, float, float]] = []
        self._written = self._since
        self._learning_rates = LearningRates()
        # Of the step that is being made, if they were noted.
        self._rates: Rates | None = None

    def start(self, step: int, log_every: int) -> None:
        """Begin counting at *step* finished steps."""
        self.number, self._log_every = step, log_every
        self._heartbeat.beat(step)
        self.go_on()

    def go_on(self) -> None:
        """Leave the time since the last step out of the next line's seconds."""
        self._since, self._steps = time.perf_counter(), 0

    def note_rates(self, optimizers: AnyOptimizers) -> None:
        """Remember the learning rates that the optimizers have just used, before a schedule sets those of the next step."""
        if self._outputs and (self.number + 1) % self._log_every == 0:
            self._rates = self._learning_rates.read(optimizers)

    def step(self, position: Position, loss: float, optimizers: AnyOptimizers) -> None:
        """Report a finished step with the global batch's mean loss. Every rank; rank 0 logs it.

        The learning rates are those that were noted, else those in *optimizers* now.
        """
        number = self.number = position.step
        self._steps += 1
        self._heartbeat.beat(number)
        if self._outputs and number % self._log_every == 0:
            now = time.perf_counter()
            seconds = (now - self._since) / self._steps
            self._since, self._steps = now, 0
            rates, self._rates = self._rates or self._learning_rates.read(optimizers), None
            self._waiting.append((position, loss, rates, time.time(), seconds))
            if now - self._written >= _LATE_S or len(self._waiting) >= _MOST_WAITING:
                self.flush()
                self._written = now
        if self._on_first_step is not None:
            self._on_first_step(number)
            self._on_first_step = None
        if self.after_step is not None:
            self.after_step(position, loss)

    def flush(self) -> None:
        """Write the lines that have waited."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        lines = "".join(map(self._line, waiting)).encode()
        for output in self._outputs:
            os.write(output, lines)

    def _line(self, facts: tuple[Position, float, Rates, float, float]) -> str:
        position, loss, rates, unix, seconds = facts
        second = int(unix)
        if second != self._second:  # formatting the date anew would be half of the line's cost
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return (
            f'{{"timestamp": "{self._date}.{int((unix - second) * 1e6):06d}Z", {self._bound}, "step": {position.step}, '
            f'"epoch": {position.epoch}, "in_epoch": {position.in_epoch}, "samples": {position.samples}, '
            f'"loss": {loss if math.isfinite(loss) else "null"}, "lr": {self._learning_rates.json(rates)}, '
            f'"time": {unix:.3f}, "seconds": {seconds:.6f}}}\n'
        )
