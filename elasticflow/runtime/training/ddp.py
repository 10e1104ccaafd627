"""Gradients of the global batch on every rank: DistributedDataParallel, weighted by true counts.

Besides the gradients, all ranks learn after each step whether to leave and whether a snapshot is due. This
ballot travels as the gradient of one small parameter of our own, so it costs no collective of its own.
"""

from __future__ import annotations

import math
from ctypes import c_float
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elasticflow.errors import StateError, StopTraining
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.measuring.scalars import NUM_PLACES, Scalars
from elasticflow.runtime.model import model_buffers, replicable
from elasticflow.runtime.process import stopping, torch_private
from elasticflow.runtime.process.torch_private import foreach_div_
from elasticflow.runtime.process.votes import NUM_REQUESTS
from elasticflow.runtime.training import stoppable_batches
from elasticflow.runtime.training.loss import NonFinite, parse_loss
from elasticflow.runtime.training.loss_weights import first_look
from elasticflow.runtime.training.precision import autocast

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp import GradScaler

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.training.loss_weights import FirstLook


def wrap(model: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Return *model* in DistributedDataParallel, its buckets settled. Collective: every rank.

    DistributedDataParallel orders its buckets anew after the first backward: a run that goes on from a snapshot would sum in
    another order than one that was never interrupted (seen at 3 workers). So two empty backwards come first.

    Args:
        model: On *device*.
        device: Where this rank trains.
        options: Options of DistributedDataParallel.
    """
    if device.type == "cuda":
        options = {"device_ids": [device.index], **options}
    replicas = DistributedDataParallel(model, **options)
    if hasattr(model, torch_private.COMPILED_MODEL) or options.get("static_graph"):
        return replicas  # its forward is compiled, or the first two are counted
    own = vars(model).get("forward")  # of this object, as libraries patch it
    model.forward = lambda: _nothing(model)
    try:
        for _ in range(2):
            torch.autograd.backward(replicas())
    finally:
        del model.forward
        if own is not None:
            model.forward = own
        for parameter in model.parameters():
            parameter.grad = None
    return replicas


# The ballot: weighted loss, items counted by the user's step, the requests of `vote`, and the places of scalars.
_LOSS, _PLACES = 0, 2 + NUM_REQUESTS
_BALLOT_SIZE = _PLACES + NUM_PLACES


class DDPStep:
    """A model with one replica per rank.

    Args:
        worker: This worker.
        model: On its device; every rank has rank 0's weights afterwards.
        training_step: Called with the bare model and a micro-batch; returns what `parse_loss` takes.
        precision: fp32, bf16 or fp16 (autocast).
        on_nonfinite: What a loss that is not finite does: "stop", or "skip" the step.
        ddp: Options of DistributedDataParallel, and sync_batchnorm.
        scaler: For fp16.

    Attributes:
        is_exact: Its steps have the same bits at every world size.
        was_skipped: The last step's loss was not finite, and the step was left out.

    Raises:
        StateError: sync_batchnorm without CUDA.
    """

    is_exact = False

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        training_step: Callable[[nn.Module, Any], Any],
        *,
        precision: str,
        on_nonfinite: str,
        ddp: dict[str, Any] | None = None,
        scaler: GradScaler | None = None,
    ) -> None:
        replicable.require_whole(model)
        options = dict(ddp or {})
        self._is_synced = bool(options.pop("sync_batchnorm", False))
        if self._is_synced:
            _require_cuda(worker)
            worker.vote.may_skip = False  # forwards of all ranks wait for each other
            if worker.world_size > 1:
                nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        self._worker, self._precision = worker, precision
        self.was_skipped = False
        self._step = StepModule(worker, model, training_step, scaler, is_synced=self._is_synced).to(
            worker.device
        )
        self._ballot, self._tally, self._scalars = self._step.ballot, self._step.tally, self._step.scalars
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._nonfinite = NonFinite(worker, on_nonfinite, self._parameters, scaler)
        self._ddp: DistributedDataParallel | None = None
        if worker.world_size > 1:
            self._ddp = DistributedDataParallel(self._step, forward_sync_buffers=False, **options)
            self._settle(self._ddp)
        self._buffers = model_buffers.BufferWatch(worker, model)
        self._vote, self._generators = worker.vote, worker.generators

    def _settle(self, ddp: DistributedDataParallel) -> None:
        # DDP orders its buckets anew after the first backward: without these two, a run that goes on from a
        # snapshot would sum in another order than one that was never interrupted (seen at 3 workers).
        for _ in range(2):
            torch.autograd.backward(ddp(None, 0, 1, lambda: (0.0,) * NUM_REQUESTS))
        for parameter in self._step.parameters():
            parameter.grad = None

    def forward_backward(self, batch: Batch) -> float:
        """Leave the global batch's gradients in the parameters; return its mean loss. Collective: every rank.

        Where `worker.stopped` is set afterwards, they are not the batch's, and the step is not to be applied.

        Raises:
            NonFiniteLossError: on every rank, if the loss is not finite and on_nonfinite is "stop".
        """
        worker = self._worker
        self._buffers.before_step()
        self._generators.look()  # what the optimizer drew
        self._tally.clear()
        self._scalars.begin()
        self._ballot.grad = None
        left = len(batch.model_keys)
        if batch.end.step <= 2:
            self._step.first_look = first_look(worker, batch)
        if left == 0:
            if self._is_synced:
                raise StateError(
                    f"step {batch.end.step} has {batch.samples} samples, too few for {worker.world_size} workers: "
                    "ddp.sync_batchnorm needs some on each",
                    'use dataset.tail = "drop", or train.steps instead of epochs',
                )
            self._backward(None, 0, batch.samples, self._vote.requests)
        # SyncBatchNorm's forwards wait for each other: none is left out.
        pieces = (
            batch.micro_batches if self._is_synced else stoppable_batches.micro_batches(batch, self._vote)
        )
        for (data, count), key in zip(pieces, batch.model_keys, strict=True):
            self._generators.seed_model(key)
            left -= 1
            if left and self._ddp is not None:
                with self._ddp.no_sync():
                    self._backward(data, count, batch.samples, None)
            else:
                self._backward(data, count, batch.samples, None if left else self._vote.requests)
        return self._outcome(batch.end.step)

    def _backward(
        self, data: Any, count: int, total: int, requests: Callable[[], tuple[float, ...]] | None
    ) -> None:
        forward = self._step if self._ddp is None else self._ddp
        with mark("forward"), autocast(self._precision, self._worker.device):
            ends = forward(data, count, total, requests)
        with mark("backward"):
            torch.autograd.backward(ends)

    def _outcome(self, number: int) -> float:
        worker = self._worker
        grad = self._ballot.grad
        assert grad is not None
        numbers = grad.tolist()  # waits for the device
        loss, count, *requests = numbers[:_PLACES]
        weight = worker.world_size  # DDP averages over the ranks
        self._vote.resolve(requests)
        if self._vote.stop:
            worker.agree_to_stop()
            return math.nan
        self._generators.are_used |= self._vote.random
        loss *= weight
        scalars = self._scalars.means(numbers[_PLACES:])
        if count > 0:  # the step returned sums: only now is the count of all ranks known
            count = _whole(count * weight)
            loss /= count
            grads = [p.grad for p in self._parameters if p.grad is not None]
            foreach_div_(grads, count)
        worker.progress.note_step(count, scalars)
        self.was_skipped = not math.isfinite(loss)
        if self.was_skipped:
            self._nonfinite.refuse(number, loss)
        return float(loss)


def _whole(count: float) -> float:
    """Return a count that travelled as a mean over the ranks, in single precision; sums of weights stay fractions."""
    nearest = round(count)
    return nearest if abs(count - nearest) <= 1e-6 * nearest else count


def _require_cuda(worker: Worker) -> None:
    if worker.device.type != "cuda":
        raise StateError(
            f"ddp.sync_batchnorm needs CUDA: torch has no SyncBatchNorm for {worker.device.type}",
            'leave it out; with train.consistency = "exact" running statistics are the mean over all shards',
        )


class StepModule(nn.Module):
    """The user's step on the bare model, and the ballot.

    Args:
        worker: This worker.
        model: Bare.
        step: The user's.
        scaler: For fp16.
        is_synced: Forwards of all ranks wait for each other.

    Attributes:
        first_look: Called with what the user's step returned; only in the first step of a run.
    """

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        step: Callable[[nn.Module, Any], Any],
        scaler: GradScaler | None,
        *,
        is_synced: bool,
    ) -> None:
        super().__init__()
        self._is_synced = is_synced
        self.model = model
        self.ballot = nn.Parameter(torch.zeros(_BALLOT_SIZE))
        self.tally = _Tally()
        self.scalars = Scalars(worker, worker.world_size)
        self._rank = worker.rank
        self.first_look: FirstLook | None = None
        self._call, self._world_size, self._scaler, self._vote = step, worker.world_size, scaler, worker.vote
        self._is_here = worker.device.type == "cpu"
        self._values = torch.zeros(_BALLOT_SIZE)
        # Written without torch's bookkeeping: read in the same step only. What a float cannot hold becomes inf.
        memory: Any = self._values.numpy()
        self._array: Any = (c_float * _BALLOT_SIZE).from_buffer(memory)

    def forward(
        self, data: Any, count: int, total: int, requests: Callable[[], tuple[float, ...]] | None
    ) -> tuple[Tensor, ...]:
        """Return what to differentiate: the loss and, with *requests*, what casts the ballot."""
        loss = None
        if data is not None:
            try:
                loss = self._loss(data, count, total)
            except StopTraining as stop:
                if self._is_synced:
                    raise  # other ranks wait for this one within their forwards
                stopping.request_stop(self._vote, stop)
        if loss is None:
            loss = _nothing(self.model)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if requests is None:
            return (loss,)
        # The gradient of this dot product by the ballot is what this rank votes.
        return loss, torch.dot(self.ballot, self._votes(requests()))

    def _loss(self, data: Any, num_samples: int, total: int) -> Tensor | None:
        result = self._call(self.model, data)
        if self.first_look is not None:
            self.first_look(result, data, num_samples)
        loss, count = parse_loss(result)
        self.scalars.add(self._rank, result, num_samples if count is None else count)
        weight = num_samples / total
        if count is not None:
            weight = 1.0
            self.tally.count += count
        if loss is None:
            return None
        self.tally.loss += (loss.item() if self._is_here else loss.detach().float()) * weight
        weight *= self._world_size
        return loss if weight == 1.0 else loss * weight

    def _votes(self, requests: tuple[float, ...]) -> Tensor:
        if self._is_here:
            self._write(self.tally.loss, requests, self.scalars.numbers(self._rank))
            return self._values
        scalars = self.scalars.numbers(self._rank)
        self._write(0.0, requests, [0.0 if isinstance(number, Tensor) else number for number in scalars])
        values = self._values.to(self.ballot.device)
        for place, number in enumerate(scalars, _PLACES):
            if isinstance(number, Tensor):
                values[place] = number
        values[_LOSS] = self.tally.loss  # stays on the device: nothing waits for it here
        return values

    def _write(self, loss: Any, requests: tuple[float, ...], scalars: list[Any]) -> None:
        self._array[:_PLACES] = [loss, self.tally.count, *requests]
        self._array[_PLACES : _PLACES + len(scalars)] = scalars


class _Tally:
    """What this rank has of the step so far: weighted loss, and items if the user's step counts them."""

    loss: float | Tensor
    count: float

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.loss, self.count = 0.0, 0.0


def _nothing(model: nn.Module) -> Tensor:
    # An empty slice: gradients are zeros of the right shape even where a weight is not finite. The order of
    # the sum makes the gradients ready in the order a real backward has: last layer first.
    parts = [(p if p.dim() else p.reshape(1))[:0].sum() for p in model.parameters() if p.requires_grad]
    loss = parts[0].float()
    for part in parts[1:]:
        loss = loss + part
    return loss
