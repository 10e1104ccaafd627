"""Base class of the training steps: `DDPStep`, `ExactStep` and `ShardedStep`."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import chain, islice, repeat
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.errors import NonFiniteLossError, StateError, StopTraining
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process.host_copies import HostCopy
from elasticflow.runtime.process.sharded_tensors import is_sharded, require_whole_scalars
from elasticflow.runtime.process.stopping import Leaving, request_stop
from elasticflow.runtime.process.torch_private import foreach_div_
from elasticflow.runtime.process.votes import LEAVE
from elasticflow.runtime.training.loss import parse_loss, require_count
from elasticflow.runtime.training.loss_weights import first_look
from elasticflow.runtime.training.model_buffers import ModelBuffers
from elasticflow.runtime.training.precision import autocast
from elasticflow.runtime.training.scalars import LOSS_KEYS, Scalars

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from torch import Tensor, nn
    from torch.amp import GradScaler

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.votes import Vote
    from elasticflow.runtime.training.loss import StepLoss
    from elasticflow.runtime.training.loss_weights import FirstLook
    from elasticflow.runtime.training.step_row import StepRow

TrainingStep = Callable[["nn.Module", Any], Any]
_EMPTY = (None, 0), 0
_REQUIRES_GRAD = operator.attrgetter("requires_grad")
WHOLE_REPLICA = (
    "leave fully_shard, FSDP, tensor parallelism and device meshes out of model.entry: every worker has a whole replica, "
    "and gradients are exchanged for you; a model that must be sharded is cut by [parallel] of the job file, or by join(shard=...)"
)
"""Remedy for a model that is sharded where every worker needs a whole one."""


class ReplicatedStep(ABC):
    """Computes the gradients of the global batch on replicas of the model; a replica is one rank's, or shared by several ranks.

    Args:
        model: On its device; every rank has rank 0's weights afterwards.
        training_step: Called with the bare model and a part of the batch; its result is an argument of `parse_loss`.
        parts: Number of parts, over all ranks, in whose order scalars are added up.
        on_nonfinite: "stop" at a loss that is not finite, or "skip" the step.

    Attributes:
        is_exact: Steps have the same bits at every world size.
        was_skipped: The last step's loss was not finite, and the step was left out.
    """

    is_exact: bool
    # The forwards of all ranks wait for each other: no rank may leave one out.
    _is_synced = False
    # Several ranks may share a replica.
    _takes_sharded = False
    # Each part of a step begins with the same buffers.
    _keeps_all_buffers = False

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        training_step: TrainingStep,
        *,
        parts: int,
        precision: str,
        on_nonfinite: str,
        scaler: GradScaler | None = None,
    ) -> None:
        if not self._takes_sharded:
            require_whole(model)
        self._worker, self._model, self._training_step = worker, model, training_step
        self._precision, self._on_nonfinite, self._scaler = precision, on_nonfinite, scaler
        self._all = list(model.parameters())
        self._trained = list(map(_REQUIRES_GRAD, self._all))
        self._parameters = [p for p in self._all if p.requires_grad]
        self._scalars = Scalars(worker, parts)
        self._is_here = worker.device.type == "cpu"
        self._model_buffers = ModelBuffers(worker, model, keeps_all=self._keeps_all_buffers)
        self._first_look: FirstLook | None = None
        self.was_skipped = False

    def forward_backward(self, batch: Batch) -> float:
        """Leave the global batch's gradients in the parameters; return the batch's mean loss. Collective: every rank.

        If `worker.stopped` is set afterwards, the gradients are not complete and must not be applied.

        Raises:
            NonFiniteLossError: on every rank, if the loss is not finite and on_nonfinite is "stop".
            StateError: the step is exact, and an operation has no deterministic form; the message names it.
        """
        worker = self._worker
        self._follow_frozen()
        self._model_buffers.before_step()
        worker.generators.look()  # the optimizer may have drawn
        self._scalars.begin()
        if batch.end.step <= 2:
            self._first_look = first_look(worker, batch)
        row = self._sum_of(batch)
        worker.vote.resolve(row.requests)
        if worker.vote.stop:
            self._model_buffers.restore()
            worker.agree_to_stop()
            return math.nan
        worker.generators.are_used |= worker.vote.random
        scalars, loss, num_items = self._scalars.means(row.scalars), row.loss, float(row.num_items)
        if num_items:  # the step returned sums, and only now the count of all ranks is known
            require_count(num_items, f"step {batch.end.step}")
            loss /= num_items
            foreach_div_([p.grad for p in self._parameters if p.grad is not None], num_items)
        worker.progress.note_step(num_items, scalars)
        self.was_skipped = not math.isfinite(loss)
        if self.was_skipped:
            self._model_buffers.restore()
            self._skip(batch.end.step, loss)
        return float(loss)

    def _read(self, row: Tensor) -> list[float]:
        """Return the numbers of a step's row: the only wait of the host for its device in a step.

        The optimizer's step depends on these numbers: all ranks leave a step out if a rank asked for that, and a loss that is not
        finite must change no weight.
        """
        return row.tolist() if self._is_here else HostCopy(row).tolist()

    @abstractmethod
    def _sum_of(self, batch: Batch) -> StepRow:
        """Return the sum of all ranks' rows; leave the sum of their gradients in the parameters. Collective: every rank."""

    def _follow_frozen(self) -> None:
        """Exchange the gradients of the parameters that are trained now: a loop may freeze or unfreeze some between steps."""
        trained = list(map(_REQUIRES_GRAD, self._all))
        if trained == self._trained:
            return
        self._trained, before = trained, self._parameters
        self._parameters = [p for p in self._all if p.requires_grad]
        self._reset_exchange(before)

    @abstractmethod
    def _reset_exchange(self, before: list[nn.Parameter]) -> None:
        """Exchange the gradients of `_parameters` from now on, instead of those of *before*. Collective: every rank."""

    def _pieces(self, batch: Batch, number: int) -> Iterator[tuple[Any, int]]:
        """Yield *number* parts of this rank, each under its own seed; a missing part is (None, 0)."""
        pieces = batch.micro_batches if self._is_synced else micro_batches(batch, self._worker.vote)
        keyed = zip(pieces, batch.model_keys, strict=True)
        for (data, count), key in islice(chain(keyed, repeat(_EMPTY)), number):
            if count:
                self._worker.generators.seed_model(key)
            yield data, count

    def _forward(self, part: int, data: Any, num_samples: int) -> StepLoss | None:
        """Return the loss that the job's step gives for a part; None if it wants training to end."""
        try:
            with mark("forward"), autocast(self._precision, self._worker.device):
                result = self._training_step(self._model, data)
        except StopTraining as stop:
            if self._is_synced:
                raise
            request_stop(self._worker.vote, stop)
            return None
        if self._first_look is not None:
            self._first_look(result, data, num_samples)
        if self._takes_sharded and isinstance(result, dict):
            require_whole_scalars({name: value for name, value in result.items() if name not in LOSS_KEYS})
        loss = parse_loss(result)
        # A count that is still on its device belongs to a sum, and a sum has no scalars beside it.
        self._scalars.add(part, result, loss.num_items if isinstance(loss.num_items, float) else num_samples)
        return loss

    def _skip(self, number: int, loss: float) -> None:
        if self._on_nonfinite == "stop":
            raise NonFiniteLossError(
                f"the loss of step {number} is {loss}",
                'look at the data and the learning rate; train.on_nonfinite = "skip" leaves such steps out',
            )
        if self._worker.rank == 0:
            self._worker.event(events.LOSS_SKIPPED, step=number, loss=str(loss))
        for parameter in self._parameters:
            if self._scaler is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.fill_(math.nan)  # makes the scaler skip the step


def micro_batches(batch: Batch, vote: Vote) -> Iterator[tuple[Any, int]]:
    """Yield the micro-batches of this rank; once the job's code or a request to exit ends training, (None, 0) for each that is left."""
    vote.part = 0.0
    for _ in batch.model_keys:
        piece: tuple[Any, int] = None, 0
        if vote.stop_wanted is None:
            try:
                piece = next(batch.micro_batches)
            except StopTraining as stop:
                request_stop(vote, stop)
            except Leaving:
                vote.stop_wanted = LEAVE
        vote.part += piece[1] / batch.samples
        yield piece


def require_whole(model: nn.Module) -> None:
    """Check that no parameter of *model* is a piece of a larger one.

    Raises:
        StateError: FSDP2 or tensor parallelism has sharded a parameter; the message names it.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise StateError(f"{name} is a DTensor: the model is sharded", WHOLE_REPLICA)


def require_on(model: nn.Module, device: torch.device) -> None:
    """Check that all parameters of *model* are on this rank's device.

    Raises:
        StateError: a parameter is elsewhere; the message names it.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise StateError(
                f"{name} is on the meta device, and has no values: run.wrap gives every rank rank 0's",
                'build the model on the CPU; for one that no worker can hold whole: parallel.init = "meta" in a job file, or a loop that '
                "calls fully_shard itself",
            )
        if parameter.device.type != device.type:
            raise StateError(
                f"{name} is on {parameter.device}, and this rank trains on {device}",
                "model.to(run.device) before it is wrapped",
            )
