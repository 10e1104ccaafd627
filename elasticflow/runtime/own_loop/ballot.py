"""What ranks tell each other of the steps of a loop of the script's own: losses, scalars, and requests.

An all-reduce takes as long as a hundredth of a short step, so several steps share one: as many as fit into a tenth of a second.
Nothing is read from the device before, either. What depends on the answer, a snapshot above all, has the steps told first.
"""

from __future__ import annotations

import json
import math
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from elasticflow.runtime.metrics.scalars import require_name, require_room, scalars_in
from elasticflow.runtime.process.step_log import LateNumber
from elasticflow.runtime.process.votes import NUM_REQUESTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.runtime.process.context import Worker

_SHARED_S, _MOST_STEPS = 0.1, 8
# Of a ballot: requests, then how many steps the next one is of, as rank 0 says.
_STEPS = NUM_REQUESTS
_HEAD = _STEPS + 1
# Of a step: its loss times samples, those samples, all samples; then of each scalar the weighted value, and its weight.
_FIXED = 3
_NOTHING = (0.0,) * NUM_REQUESTS


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
        self._names: list[str] = []
        self._scalars: dict[str, Any] = {}
        self._waiting: list[_Step] = []
        self._share, self._since = 1, time.monotonic()

    def note(self, scalars: Mapping[str, Any]) -> None:
        """Remember scalars of this rank's part of the step.

        Raises:
            StepResultError: one cannot have its name, or they are too many.
        """
        found = scalars_in(scalars)
        for name in found:
            require_name(name)
        self._scalars |= found
        require_room(len({*self._names, *self._scalars}))

    def add(self, loss: Any, samples: int) -> tuple[LateNumber, Mapping[str, float]]:
        """Take a step; return its mean loss and scalars over all ranks, which are there after the next `meet`.

        Args:
            loss: Mean over this rank's *samples*, a number or a tensor; None: not given.
            samples: Of this rank.
        """
        self._worker.vote.resolve(_NOTHING)
        step = _Step(LateNumber(), {}, loss, samples, self._scalars)
        self._scalars = {}
        self._waiting.append(step)
        return step.mean, step.means

    @property
    def is_full(self) -> bool:
        """Whether as many steps wait as share a meeting; the same on every rank."""
        return len(self._waiting) >= self._share

    def meet(self) -> int:
        """Tell of the steps that wait, if any; afterwards `worker.vote` says what all ranks want. Collective: every rank.

        Returns the samples of all ranks in these steps.
        """
        worker, waiting = self._worker, self._waiting
        if not waiting:
            return 0
        now = time.monotonic()
        seconds, self._since = (now - self._since) / len(waiting), now
        share = max(1, min(_MOST_STEPS, int(_SHARED_S / max(seconds, 1e-6)))) if worker.rank == 0 else 0
        worker.vote.names_wanted = any(not self._names_of(step) <= {*self._names} for step in waiting)
        totals = self._added((*worker.vote.requests(), share))
        worker.vote.resolve(totals[:NUM_REQUESTS])
        worker.generators.are_used |= worker.vote.random
        if worker.vote.names:
            self._learn()
            totals = self._added((*_NOTHING, share))
        self._share, self._waiting = int(totals[_STEPS]), []
        size = _FIXED + 2 * len(self._names)
        samples = 0
        for number, step in enumerate(waiting):
            low = _HEAD + number * size
            samples += self._settle(step, totals[low : low + size])
        return samples

    def _added(self, head: Sequence[float]) -> list[float]:
        """Return the sums over all ranks of *head* and the numbers of each step. Collective: every rank."""
        rows = [float(number) for step in self._waiting for number in self._row(step)]
        numbers = torch.tensor([*map(float, head), *rows], dtype=torch.float64)
        if self._worker.world_size > 1:
            dist.all_reduce(numbers)
        return numbers.tolist()

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
