"""The exchange by which ranks learn each other's losses, scalars and requests in a training loop that the script writes.

An all-reduce takes as long as a hundredth of a short step, so several steps share one: as many as fit into a tenth of a second.
Nothing is read from the device before, either. Whoever depends on the answer, a snapshot above all, has the steps told first.

How many share one follows from the clock. That is soon enough for requests to leave; what has to happen after the same
step at every pace waits for a fixed step (`is_fixed`), at which all ranks meet in any case.
"""

from __future__ import annotations

import json
import math
import os
import time
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from elasticflow.errors import StateError, StepResultError
from elasticflow.protocol import run_files, worker_environment
from elasticflow.runtime.data.notes import form
from elasticflow.runtime.process.host_copies import read_together
from elasticflow.runtime.process.sharded_tensors import require_whole_scalars
from elasticflow.runtime.process.step_log import LateNumber
from elasticflow.runtime.process.stopping import Stopped, reason_of
from elasticflow.runtime.training.scalars import LOSS_KEYS, require_name, require_room, scalars_in
from elasticflow.runtime.training.step_row import NO_REQUESTS, StepRow

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position

_SHARED_S, _MOST_STEPS = 0.1, 8


def is_fixed(end: Position, *, is_end: bool) -> bool:
    """Return True if all ranks meet after the step that ends at *end*, at every speed and number of ranks."""
    return is_end or end.is_epoch_end or end.step % _MOST_STEPS == 0


def require_loss(loss: Any, samples: Any) -> None:
    """Check the *loss* and *samples* given to `Run.step`.

    Raises:
        StateError: *loss* is not one real number, or *samples* is no number of samples.
    """
    is_one = math.prod(getattr(loss, "shape", ())) == 1 and hasattr(loss, "__float__")
    if loss is not None and not (is_one and not getattr(loss, "is_complex", lambda: False)()):
        raise StateError(
            f"run.step was given {form(loss)} as loss, which is not one real number",
            "give it the mean over this rank's samples: loss.mean()",
        )
    if samples is not None and not (hasattr(samples, "__index__") and int(samples) >= 0):
        raise StateError(
            f"run.step(samples={samples!r}): must be a whole number from 0",
            "give it how many this rank had: len(inputs)",
        )


class _Step(NamedTuple):
    """A step that the other ranks do not know yet: the values of its log line, which come later, and this rank's values."""

    mean: LateNumber
    means: dict[str, float]
    loss: float | torch.Tensor | None
    samples: int
    scalars: Mapping[str, float | torch.Tensor]


class Ballot:
    """Tells the other ranks of this rank's steps. Every rank has a ballot, and all ranks call it at the same steps.

    Attributes:
        is_end_due: Before the next step the ranks agree on whether training ends.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # In the order of their places; snapshots hold them, so that a restart sends the same numbers at once.
        self._names = worker.scalar_names
        self._scalars: dict[str, float | torch.Tensor] = {}
        self._waiting: list[_Step] = []
        self._share, self._since = 1, time.monotonic()
        self._has_met = True  # since the last step that was added
        # Only rank 0 records, but every rank has to meet it after each step.
        self._is_recorded = bool(os.environ.get(worker_environment.TRAJECTORY))
        self._is_owed = self.is_end_due = False  # a request came in a pass that only added to gradients
        self._why_end: str | None = None

    def note(self, scalars: Mapping[str, Any]) -> None:
        """Remember scalars of this rank's part of the step.

        Raises:
            StepResultError: a value is not one number, a name cannot be used, or they are too many.
        """
        require_whole_scalars(scalars)
        found = scalars_in(scalars)
        for name, value in scalars.items():
            if name in LOSS_KEYS or run_files.is_ours(name):
                raise StepResultError(
                    f"run.log({name}=...): the step's line has a field `{name}` of its own",
                    f"run.step(loss=loss) tells the loss; call another value something else: run.log(own_{name}=value)",
                )
            if name not in found:
                raise StepResultError(
                    f"run.log({name}=...) was given {form(value)}, which is not one number",
                    f"give it a number or a tensor without dimensions: run.log({name}=value.mean())",
                )
            require_name(name)
        self._scalars |= {name: _as_now(value) for name, value in found.items()}
        require_room(len({*self._names, *self._scalars}))

    def add(self, loss: Any, samples: int) -> tuple[LateNumber, Mapping[str, float]]:
        """Add a step; return its mean loss and scalars over all ranks, which have their values after the next `meet`.

        Args:
            loss: Mean over this rank's *samples*, a number or a tensor; None: not given.
        """
        if self._has_met:
            self._worker.vote.resolve(NO_REQUESTS)
            self._has_met = False
        step = _Step(LateNumber(), {}, None if loss is None else _as_now(loss), samples, self._scalars)
        self._scalars = {}
        self._waiting.append(step)
        return step.mean, step.means

    def room_after(self, position: Position) -> int:
        """Return the number of steps after *position* that need no meeting; the same on every rank."""
        if self._is_recorded or self._is_owed:
            return 0
        return min(self._share - len(self._waiting), _MOST_STEPS - position.step % _MOST_STEPS) - 1

    def hold_back(self) -> None:
        """Defer requests to the step in which an optimizer moves: a snapshot now would lose the accumulated gradients."""
        vote = self._worker.vote
        self._is_owed |= vote.leave or vote.snapshot or vote.memory
        vote.leave = vote.snapshot = vote.memory = False

    def request_end(self, reason: object) -> None:
        """Ask for training to end on all ranks."""
        self._why_end = reason_of(reason)
        self._worker.vote.end_wanted = True

    def recall_end(self, reason: str | None) -> None:
        """Ask again for what had been asked for when the snapshot was taken that the run resumes from; None: nothing."""
        if reason is not None:
            self.request_end(reason)

    def end_wanted(self) -> str | None:
        """Return the reason of the first request to end training; None: there is none. Collective: every rank."""
        return next(filter(None, self._worker.gather_text(self._why_end or "")), None)

    def agree_on_end(self, step: int, *, is_over: bool = False) -> None:
        """End training before the step after *step* if some rank asked for it. Collective: every rank.

        Args:
            is_over: This rank has left its loop.

        Raises:
            StateError: a rank has left its loop, and others left theirs after another step, or continue.
        """
        self.is_end_due = False
        asked = "" if is_over and self._worker.should_leave else self._why_end or ""
        ranks = [json.loads(text) for text in self._worker.gather_text(json.dumps([step, is_over, asked]))]
        for rank, (*end, reason) in enumerate(ranks):
            if end != ranks[0][:2]:
                first = _how_it_goes_on(0, *ranks[0][:2])
                raise StateError(
                    f"{first}, and {_how_it_goes_on(rank, *end)}",
                    "decide by a value that is the same on every rank, as run.evaluate returns it; or call run.stop(reason), "
                    "which any rank may do, and which ends training after the same step on all",
                )
            if reason and self._worker.stopped is None:
                self._worker.stopped = Stopped(reason, rank)

    def meet_if_due(self, end: Position, *, is_end: bool, is_needed: bool, is_pending: bool) -> None:
        """Meet after the step that ends at *end*, if it *is_needed* or time to; the rest is as for `meet`."""
        is_now = is_needed or self._is_recorded or self._is_owed or len(self._waiting) >= self._share
        if is_now or is_fixed(end, is_end=is_end):
            self._is_owed = False
            self.meet(is_pending=is_pending)

    def meet(self, *, is_pending: bool = False) -> int:
        """Exchange the waiting steps, if any; afterwards `worker.vote` holds the requests of all ranks. Collective: every rank.

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
        if worker.device.type != "cpu":
            self._bring_here()
        worker.vote.names_wanted = any(not step.scalars.keys() <= {*self._names} for step in waiting)
        rows = self._sums(worker.vote.requests(), share, is_pending=is_pending)
        worker.vote.resolve(rows[-1].requests)
        self._has_met = True
        worker.generators.are_used |= worker.vote.random
        if worker.vote.names:
            self._learn()
            rows = self._sums(NO_REQUESTS, share, is_pending=is_pending)
        _, share, pending = map(int, rows[-1].extra)
        if 0 < pending < worker.world_size:
            raise StateError(
                "the optimizers moved on some ranks and not on others in one pass through the loop",
                "call optimizer.step() in the same passes on every rank: by batch.end.step, say, not by what a rank measures",
            )
        self._share, self._waiting = share, []
        return sum(map(self._settle, waiting, rows))

    def _bring_here(self) -> None:
        """Replace the values of the waiting steps by numbers; the host waits for the device once."""
        given = [
            ((0.0 if step.loss is None else step.loss), *step.scalars.values()) for step in self._waiting
        ]
        numbers = iter(read_together(list(chain.from_iterable(given))))
        for place, step in enumerate(self._waiting):
            loss, scalars = next(numbers), {name: next(numbers) for name in step.scalars}
            self._waiting[place] = step._replace(loss=None if step.loss is None else loss, scalars=scalars)

    def _sums(self, requests: Sequence[float], share: int, *, is_pending: bool) -> list[StepRow]:
        """Return the sum over all ranks of each waiting step's row. Collective: every rank."""
        places = 2 * len(self._names)
        numbers: list[float] = []
        for step in self._waiting:
            weight = 0 if step.loss is None else step.samples
            loss = float(step.loss) if step.loss is not None and weight else 0.0
            # Behind the row: all samples; for how many steps the next meeting is, as rank 0 says.
            extra = step.samples, share, is_pending
            row = StepRow(loss * weight, weight, requests, self._scalars_of(step), extra)
            numbers += row.to_numbers(places)
        if self._worker.world_size > 1:
            tensor = torch.tensor(numbers, dtype=torch.float64)
            dist.all_reduce(tensor)
            numbers = tensor.tolist()
        size = len(numbers) // len(self._waiting)
        return [StepRow.from_sums(numbers[low : low + size], places) for low in range(0, len(numbers), size)]

    def _scalars_of(self, step: _Step) -> list[float]:
        scalars: list[float] = []
        for name in self._names:
            value = step.scalars.get(name)
            weight = 0 if value is None else step.samples
            scalars += [float(value) * weight if value is not None and weight else 0.0, weight]
        return scalars

    def _settle(self, step: _Step, row: StepRow) -> int:
        """Give *step* its means over all ranks; return its samples."""
        step.mean.value = row.loss / row.num_items if row.num_items else math.nan
        pairs = zip(self._names, row.scalars[::2], row.scalars[1::2], strict=True)
        step.means.update({name: value / weight for name, value, weight in pairs if weight})
        return int(row.extra[0])

    def _learn(self) -> None:
        """Give each scalar's name that some rank has seen the same place on all ranks. Collective: every rank."""
        mine = sorted({name for step in self._waiting for name in step.scalars} - {*self._names})
        theirs = [json.loads(text) for text in self._worker.gather_text(json.dumps(mine))]
        self._names += sorted({name for names in theirs for name in names})
        require_room(len(self._names))


def _how_it_goes_on(rank: int, step: int, is_over: bool) -> str:
    return f"rank {rank} {'left its loop' if is_over else 'continues'} after step {step}"


def _as_now(value: Any) -> float | torch.Tensor:
    """Return *value* as it is now, since the script may change it in place before the ranks meet; the host waits for no device."""
    given = value.detach() if isinstance(value, torch.Tensor) else value
    if isinstance(given, torch.Tensor) and given.device.type != "cpu":
        return given.clone()
    return float(given)
