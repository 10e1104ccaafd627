"""One line per step and one heartbeat per rank, cheap enough for steps of a millisecond."""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Mapping
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat, cast

from torch import Tensor

from elasticflow import events
from elasticflow.protocol.run_files import COUNT, GRAD_NORM, MFU, RATE
from elasticflow.protocol.worker_environment import (
    FIGURES,
    HEARTBEAT,
    HEARTBEAT_SLOT,
    HELD,
    PROFILE,
    numbers_of_usage,
)
from elasticflow.runtime.process.host_copies import copy_to_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch.optim import Optimizer

    from elasticflow.protocol.worker_environment import DeviceUsage
    from elasticflow.runtime.measuring.own_time import OwnTime, StepTimes
    from elasticflow.runtime.process.position import Position

    AnyOptimizers = Optimizer | Mapping[str, Optimizer] | Sequence[Optimizer]
    """One optimizer, or several by name or number."""


class Heartbeat:
    """This rank's slot in the shared memory that the agent watches; does nothing without a slot.

    A beat means progress. Phases are start, build, restore, compile (the first step and later compilations), step, data
    (waiting for loader processes), evaluate, snapshot, profile (writing a trace) and leave (the exit): for each phase the
    agent learns how long a rank stands still.
    """

    def __init__(self, descriptor: int | None, local_rank: int) -> None:
        self._memory = None if descriptor is None else mmap.mmap(descriptor, 0)
        self._offset = local_rank * HEARTBEAT_SLOT
        self._beats = self._windows = 0
        self._step = 0
        self._phase = b"start"

    def stop(self) -> None:
        """Stop reporting."""
        self._memory = None

    def phase(self, name: str) -> str:
        """Report a new phase of this rank; return the phase before."""
        before, self._phase = self._phase.decode(), name.encode()
        self.beat()
        return before

    def beat(self, step: int | None = None) -> None:
        """Report that this rank lives, and the number of finished steps."""
        if step is not None:
            self._step = step
        if self._memory is not None:
            self._beats += 1
            HEARTBEAT.pack_into(self._memory, self._offset, self._beats, self._step, self._phase)

    def hold(self, step: int) -> None:
        """Report that the node's memory holds the state after *step*."""
        if self._memory is not None:
            HELD.pack_into(self._memory, self._offset + HEARTBEAT.size, step)

    def figures(self, times: StepTimes, device: str, usage: DeviceUsage | None) -> None:
        """Report the times of a window of steps, and the device with its usage."""
        if self._memory is not None:
            self._windows += 1
            offset = self._offset + HEARTBEAT.size + HELD.size + PROFILE.size
            of_device = *numbers_of_usage(usage), device.encode()
            FIGURES.pack_into(self._memory, offset, self._windows, *times, *of_device)

    def requested_profile(self) -> int:
        """Return the number of the newest request for a trace that this rank has got; 0: none."""
        if self._memory is None:
            return 0
        number: int = PROFILE.unpack_from(self._memory, self._offset + HEARTBEAT.size + HELD.size)[0]
        return number


# Longest wait of a line: formatting several lines at once is three times as fast as in the middle of a step.
_LATE_S = 0.1
# A pipe takes more lines than this in one piece, so that lines of several ranks on one stdout never tear.
_MOST_WAITING = 8


GradientNorm = SupportsFloat | dict[str, float] | None
"""A norm that a GPU may still be computing, or norms by the optimizers' names; None: no norm was computed."""


class LateNumber:
    """A number that arrives after its step, once all ranks have sent their parts.

    Attributes:
        value: The number; None before it arrives.
    """

    def __init__(self) -> None:
        self.value: float | None = None

    def __float__(self) -> float:
        return math.nan if self.value is None else self.value


Rates = tuple[SupportsFloat, ...]
"""One rate per parameter group, in the optimizers' order. A rate that is a tensor of a device arrives late: `copy_to_host`."""


class LearningRates:
    """Reads the rates of all parameter groups of one optimizer or several, and formats them as JSON."""

    def __init__(self) -> None:
        self._keys: list[str] = []

    def read(self, optimizers: AnyOptimizers) -> Rates:
        """Return the current rates of the parameter groups; NaN for a group without a rate."""
        groups: list[dict[str, Any]] | None = getattr(optimizers, "param_groups", None)
        # One optimizer; an isinstance check would take most of the time.
        if groups is not None:
            if len(groups) == 1:
                self._keys = []
                return (_rate(groups[0]),)
            if len(groups) != len(self._keys):
                self._keys = [json.dumps(name) for name in _names_of(groups)]
            return tuple(map(_rate, groups))
        is_named = isinstance(optimizers, Mapping)
        given = cast("Any", optimizers)
        several: Iterable[Optimizer] = given.values() if is_named else given
        rates = tuple([_rate(group) for optimizer in several for group in optimizer.param_groups])
        if len(rates) != len(self._keys):
            names: Iterable[Any] = given if is_named else count()
            named = zip(names, several, strict=False)
            by_name = {str(name): optimizer.param_groups for name, optimizer in named}
            self._keys = [json.dumps(name) for name in _of_several(by_name)]
        return rates

    def json(self, rates: Rates) -> str:
        """Return *rates*, which must be those read last, as JSON: a number for a single group, else an object by name."""
        if len(rates) != len(self._keys):
            return json_number(rates[0]) if rates else "null"
        return "{" + ", ".join(map("{}: {}".format, self._keys, map(json_number, rates))) + "}"


def _of_several(by_name: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Return each group's name: `discriminator` if the optimizer has a single group, `generator/decay` if it has several."""
    names = []
    for optimizer, groups in by_name.items():
        group_names = _names_of(groups)
        names += [optimizer] if len(group_names) == 1 else [f"{optimizer}/{name}" for name in group_names]
    return names


def _names_of(groups: list[dict[str, Any]]) -> list[str]:
    """Return the name of each group, or its number if the name is missing or shared."""
    names = [group.get("name") for group in groups]
    return [
        name if isinstance(name, str) and name and names.count(name) == 1 else str(number)
        for number, name in enumerate(names)
    ]


def _rate(group: dict[str, Any]) -> SupportsFloat:
    rate = group.get("lr", math.nan)
    return copy_to_host(rate) if isinstance(rate, Tensor) else float(rate)


def json_number(value: SupportsFloat) -> str:
    """Return a number as JSON; one that is not finite is null."""
    number = float(value)
    return repr(number) if math.isfinite(number) else "null"


class _Facts(NamedTuple):
    """Content of a step's line. `per_s`: items per second; `of_peak`: share of the devices' peak; `usage`: of rank 0's device."""

    position: Position
    loss: float | LateNumber
    rates: Rates
    unix: float
    seconds: float
    scalars: Mapping[str, float]
    num_items: float
    per_s: float
    of_peak: float | None
    grad_norm: GradientNorm
    usage: DeviceUsage | None


class Progress:
    """Reports finished steps.

    Lines of quick steps are written together, at most a tenth of a second late while steps continue. Call `flush` before
    writing anything that must follow them.

    Args:
        outputs: File descriptors of the step lines; empty on ranks other than 0.
        on_first_step: Called once, with the number of the first step that this process finishes.

    Attributes:
        after_step: Called last after each finished step, with its position and loss.
        scalars: Scalars that the job's step returned in the last step, as means over the global batch; on every rank.
        loss: Loss of the last step; None before the first.
        own_time: Measures the part of each step that is this rank's own; None: not measured.
        usage: Memory and use of the device, for the next line; None: they were in a line already, or there is no device.
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
        self._bound = json.dumps({"level": "info", "event": events.STEP, "origin": events.OURS, **bound})[
            1:-1
        ]
        self._on_first_step: Callable[[int], None] | None = on_first_step
        self.after_step: Callable[[Position, float], None] | None = None
        self.number = 0
        self._log_every = 1
        self._since, self._steps = time.perf_counter(), 0
        self._second, self._date = 0, ""
        self._waiting: list[_Facts] = []
        self.scalars: Mapping[str, float] = {}
        self.loss: float | LateNumber | None = None
        self.own_time: OwnTime | None = None
        self.usage: DeviceUsage | None = None
        self._count, self._counted = 0.0, 0.0  # items of the step, and of all steps since the last line
        self._grad_norm: GradientNorm = None
        self._count_field = f"items{RATE}"
        # Samples trained on by now, and at the start of the next line's time.
        self._trained = self._samples = 0
        self._of_peak: float | None = None
        self._written = self._since
        self._learning_rates = LearningRates()
        # Rates of the current step, if noted.
        self._rates: Rates | None = None

    def start(
        self,
        step: int,
        log_every: int,
        *,
        samples: int = 0,
        count_name: str = "items",
        of_peak: float | None = None,
    ) -> None:
        """Begin counting at *step* finished steps.

        Args:
            of_peak: Share of the devices' peak that one sample per second needs; None: unknown.
        """
        self.number, self._log_every = step, log_every
        self._count_field, self._of_peak, self._trained = f"{count_name}{RATE}", of_peak, samples
        self._heartbeat.beat(step)
        self.go_on()

    def go_on(self) -> None:
        """Exclude the time since the last step from the next line's seconds."""
        self._since, self._steps = time.perf_counter(), 0
        self._counted, self._samples = 0.0, self._trained
        if self.own_time is not None:
            self.own_time.begin_anew()

    @property
    def is_next_logged(self) -> bool:
        """True if this rank writes a line of the current step."""
        return bool(self._outputs) and (self.number + 1) % self._log_every == 0

    def note_step(self, count: float, scalars: Mapping[str, float]) -> None:
        """Remember the current step's scalars and the number of its loss's items; 0: the items are its samples."""
        self._count, self.scalars = count, scalars

    def note_grad_norm(self, norm: GradientNorm) -> None:
        """Remember the gradient norm of the current step."""
        self._grad_norm = norm

    def note_rates(self, optimizers: AnyOptimizers) -> None:
        """Remember the learning rates that the optimizers have just used, before a schedule sets the next step's rates."""
        if self.is_next_logged:
            self._rates = self._learning_rates.read(optimizers)

    def step(self, position: Position, loss: float | LateNumber, optimizers: AnyOptimizers) -> None:
        """Report a finished step with the global batch's mean loss. Every rank; rank 0 logs it once the loss has arrived.

        The line shows the noted learning rates, else the current rates of *optimizers*.
        """
        number, self.loss = position.step, loss
        self.number = number
        self._steps += 1
        self._counted += self._count
        self._trained = position.samples
        self._heartbeat.beat(number)
        if self._outputs and number % self._log_every == 0:
            self._report(position, loss, optimizers)
        if self._on_first_step is not None:
            self._on_first_step(number)
            self._on_first_step = None
        if self.after_step is not None:
            self.after_step(position, float(loss))
        if self.own_time is not None:
            self.own_time.begin_step()

    def _report(self, position: Position, loss: float | LateNumber, optimizers: AnyOptimizers) -> None:
        now = time.perf_counter()
        passed, steps = now - self._since, self._steps
        self._since, self._steps = now, 0
        rates, self._rates = self._rates or self._learning_rates.read(optimizers), None
        norm, self._grad_norm = self._grad_norm, None
        per_s, self._counted = self._counted / passed if passed > 0 else 0.0, 0.0
        of_peak = None
        if self._of_peak is not None and passed > 0:
            of_peak = self._of_peak * (position.samples - self._samples) / passed
        self._samples = position.samples
        is_due = now - self._written >= _LATE_S or len(self._waiting) >= _MOST_WAITING - 1
        # A device still computes the norm or a rate: it arrives by the next step, without a wait.
        is_late = not (norm is None or isinstance(norm, float | dict)) or any(
            type(r) is not float for r in rates
        )
        if is_late and is_due:
            self.flush()
        is_finite = isinstance(loss, LateNumber) or math.isfinite(loss)
        usage, self.usage = self.usage, None
        self._waiting.append(_Facts(
            position, loss, rates, time.time(), passed / steps, self.scalars, self._count, per_s, of_peak,
            norm if is_finite else None, usage,
        ))  # fmt: skip
        if is_due and not is_late:
            self.flush()
        if is_due:
            self._written = now

    def flush(self) -> None:
        """Write the waiting lines, up to the first line whose loss has not arrived."""
        late = (n for n, facts in enumerate(self._waiting) if getattr(facts.loss, "value", 0.0) is None)
        first = next(late, len(self._waiting))
        waiting, self._waiting = self._waiting[:first], self._waiting[first:]
        if not waiting:
            return
        lines = "".join(map(self._line, waiting)).encode()
        for output in self._outputs:
            os.write(output, lines)

    def _line(self, facts: _Facts) -> str:
        position, late, rates, unix, seconds, *_ = facts
        loss = float(late)
        second = int(unix)
        if second != self._second:  # formatting the date for each line would be half of its cost
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return (
            f'{{"timestamp": "{self._date}.{int((unix - second) * 1e6):06d}Z", {self._bound}, "step": {position.step}, '
            f'"epoch": {position.epoch}, "in_epoch": {position.in_epoch}, "samples": {position.samples}, '
            f'"loss": {loss if math.isfinite(loss) else "null"}, "lr": {self._learning_rates.json(rates)}, '
            f'"time": {unix:.3f}, "seconds": {seconds:.6f}{self._more(facts)}}}\n'
        )

    def _more(self, facts: _Facts) -> str:
        """Return the fields that only some jobs have."""
        text = ""
        if items := facts.num_items:
            count = int(items) if float(items).is_integer() else items
            text += f', "{COUNT}": {count}, "{self._count_field}": {facts.per_s:.1f}'
        if facts.of_peak is not None:
            text += f', "{MFU}": {facts.of_peak:.4f}'
        if facts.grad_norm is not None:
            text += f', "{GRAD_NORM}": {_norm(facts.grad_norm)}'
        if facts.usage is not None:
            text += "".join(
                f', "{name}": {value}' for name, value in facts.usage._asdict().items() if value is not None
            )
        return text + "".join(f', "{name}": {json_number(value)}' for name, value in facts.scalars.items())


def _norm(norm: SupportsFloat | dict[str, float]) -> str:
    if not isinstance(norm, dict):
        return json_number(norm)
    return "{" + ", ".join(f"{json.dumps(name)}: {json_number(value)}" for name, value in norm.items()) + "}"
