"""What ranks tell each other of the steps of a loop of the script's own: losses, scalars, and requests.

An all-reduce takes as long as a hundredth of a short step, so several steps share one: as many as fit into a tenth of a second.
Nothing is read from the device before, either. Whoever depends on the answer, a snapshot above all, has the steps told first.

How many share one follows from the clock. That is soon enough for requests to leave; what has to happen after the same
step at every pace waits for a fixed step (`is_fixed`), at which all ranks meet in any case.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from elasticflow.errors import StateError, StepResultError
from elasticflow.protocol import run_files
from elasticflow.runtime.measuring.scalars import LOSS_KEYS, require_name, require_room, scalars_in
from elasticflow.runtime.process.step_log import LateNumber
from elasticflow.runtime.process.votes import NUM_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

_SHARED_S, _MOST_STEPS = 0.1, 8
# Of a ballot: requests, then how many steps the next one is of, as rank 0 says, and whether the pass is pending.
_STEPS, _PENDING = NUM_REQUESTS, NUM_REQUESTS + 1
_HEAD = _PENDING + 1
# Of a step: its loss times samples, those samples, all samples; then of each scalar the weighted value, and its weight.
_FIXED = 3
_NOTHING = (0.0,) * NUM_REQUESTS


def is_fixed(end: Position, *, is_end: bool) -> bool:
    """Whether all ranks meet after the step that ends at *end*, at every pace and number of ranks."""
    return is_end or end.is_epoch_end or end.step % _MOST_STEPS == 0


def require_loss(loss: Any, samples: Any) -> None:
    """Make sure that a step can be told of *loss* and *samples*, as `Run.step` is given them.

    Raises:
        StateError: *loss* is not one real number, or *samples* is no number of samples.
    """
    is_one = math.prod(getattr(loss, "shape", ())) == 1 and hasattr(loss, "__float__")
    if loss is not None and not (is_one and not getattr(loss, "is_complex", lambda: False)()):
        raise StateError(
            f"run.step was given {_form_of(loss)} as loss, which is not one real number",
            "give it the mean over this rank's samples: loss.mean()",
        )
    if samples is not None and not (hasattr(samples, "__index__") and int(samples) >= 0):
        raise StateError(
            f"run.step(samples={samples!r}): must be a whole number from 0",
            "give it how many this rank had: len(inputs)",
        )


def steps_to_fixed(position: Position) -> int:
    """Return after how many steps from *position* on all ranks meet by number."""
    return _MOST_STEPS - position.step % _MOST_STEPS


class _Step(NamedTuple):
    """A step that the others do not know of yet: what its line says once they do, and what this rank had."""

    mean: LateNumber
    means: dict[str, float]
    loss: Any
    samples: int
    scalars: Mapping[str, Any]


class Ballot:
    """Tells the others of this rank's steps. Every rank has one, and calls it at the same steps."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # In the order of their places; snapshots hold them, so that a restart sends the same numbers at once.
        self._names = worker.scalar_names
        self._scalars: dict[str, Any] = {}
        self._waiting: list[_Step] = []
        self._share, self._since = 1, time.monotonic()
        self._has_met = True  # since the last step that was added

    def note(self, scalars: Mapping[str, Any]) -> None:
        """Remember scalars of this rank's part of the step.

        Raises:
            StepResultError: a value is not one number, a name cannot be used, or they are too many.
        """
        found = scalars_in(scalars)
        for name, value in scalars.items():
            if name in LOSS_KEYS or run_files.is_ours(name):
                raise StepResultError(
                    f"run.log({name}=...): the step's line has a field `{name}` of its own",
                    f"run.step(loss=loss) tells the loss; call another value something else: run.log(own_{name}=value)",
                )
            if name not in found:
                raise StepResultError(
                    f"run.log({name}=...) was given {_form_of(value)}, which is not one number",
                    f"give it a number or a tensor without dimensions: run.log({name}=value.mean())",
                )
            require_name(name)
        self._scalars |= found
        require_room(len({*self._names, *self._scalars}))

    def add(self, loss: Any, samples: int) -> tuple[LateNumber, Mapping[str, float]]:
        """Take a step; return its mean loss and scalars over all ranks, which are there after the next `meet`.

        Args:
            loss: Mean over this rank's *samples*, a number or a tensor; None: not given.
            samples: Of this rank.
        """
        if self._has_met:
            self._worker.vote.resolve(_NOTHING)
            self._has_met = False
        step = _Step(LateNumber(), {}, loss, samples, self._scalars)
        self._scalars = {}
        self._waiting.append(step)
        return step.mean, step.means

    @property
    def is_full(self) -> bool:
        """Whether as many steps wait as share a meeting; the same on every rank."""
        return len(self._waiting) >= self._share

    @property
    def room(self) -> int:
        """How many steps can be added before one of them has to meet; the same on every rank."""
        return self._share - len(self._waiting) - 1

    def meet(self, *, is_pending: bool = False) -> int:
        """Tell of the steps that wait, if any; afterwards `worker.vote` says what all ranks want. Collective: every rank.

        Returns the samples of all ranks in these steps.

        Args:
            is_pending: No optimizer of this rank moved in the last of them.

        Raises:
            StateError: optimizers moved on some ranks only, which every rank sees.
        """
        worker, waiting = self._worker, self._waiting
        if not waiting:
            return 0
        now = time.monotonic()
        seconds, self._since = (now - self._since) / len(waiting), now
        share = max(1, min(_MOST_STEPS, int(_SHARED_S / max(seconds, 1e-6)))) if worker.rank == 0 else 0
        worker.vote.names_wanted = any(not self._names_of(step) <= {*self._names} for step in waiting)
        totals = self._added((*worker.vote.requests(), share, is_pending))
        worker.vote.resolve(totals[:NUM_REQUESTS])
        self._has_met = True
        worker.generators.are_used |= worker.vote.random
        if worker.vote.names:
            self._learn()
            totals = self._added((*_NOTHING, share, is_pending))
        if 0 < totals[_PENDING] < worker.world_size:
            raise StateError(
                "the optimizers moved on some ranks and not on others in one pass through the loop",
                "call optimizer.step() in the same passes on every rank: by batch.end.step, say, not by what a rank measures",
            )
        self._share, self._waiting = int(totals[_STEPS]), []
        size = _FIXED + 2 * len(self._names)
        samples = 0
        for number, step in enumerate(waiting):
            low = _HEAD + number * size
            samples += self._settle(step, totals[low : low + size])
        return samples

    def _added(self, head: Sequence[float]) -> list[float]:
        """Return the sums over all ranks of *head* and the numbers of each step. Collective: every rank."""
        numbers = [*map(float, head)]
        for step in self._waiting:
            numbers += map(float, self._row(step))
        if self._worker.world_size == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _row(self, step: _Step) -> list[Any]:
        weight = 0 if step.loss is None else step.samples
        loss = 0.0 if not weight else float(step.loss.detach() if hasattr(step.loss, "detach") else step.loss)
        row = [loss * weight, weight, step.samples]
        for name in self._names:
            value = step.scalars.get(name)
            counts = 0 if value is None else step.samples
            row += [float(value) * counts if counts else 0.0, counts]  # type: ignore[arg-type]
        return row

    def _settle(self, step: _Step, totals: Sequence[float]) -> int:
        total, weight, samples, *scalars = totals
        step.mean.value = total / weight if weight else math.nan
        pairs = zip(self._names, scalars[::2], scalars[1::2], strict=True)
        step.means.update({name: value / items for name, value, items in pairs if items})
        return int(samples)

    def _learn(self) -> None:
        """Give names that some rank has met the same places on all of them. Collective: every rank."""
        mine = sorted({name for step in self._waiting for name in self._names_of(step)} - {*self._names})
        theirs = [json.loads(text) for text in self._worker.gather_text(json.dumps(mine))]
        self._names += sorted({name for names in theirs for name in names})
        require_room(len(self._names))

    def _names_of(self, step: _Step) -> set[str]:
        return set(step.scalars)


def _form_of(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return (
        repr(value)
        if isinstance(value, str)
        else f"a {kind}"
        if shape is None
        else f"a {kind} of shape {tuple(shape)}"
    )
