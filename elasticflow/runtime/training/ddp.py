"""Gradients of the global batch on every rank: DistributedDataParallel, weighted by true counts.

Besides the gradients, all ranks learn after each step whether to exit and whether a snapshot is due. This
ballot, a `StepRow`, travels as the gradient of a small parameter that we add, so it costs no extra collective.
"""

from __future__ import annotations

import inspect
import math
from ctypes import c_float
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elasticflow.errors import StateError
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.training.replicated_step import ReplicatedStep
from elasticflow.runtime.training.step_row import NO_REQUESTS, ROW_SIZE, StepRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.training.replicated_step import TrainingStep


def wrap(model: nn.Module, device: torch.device, **options: Any) -> DistributedDataParallel:
    """Return *model* in DistributedDataParallel, its buckets settled. Collective: every rank.

    DistributedDataParallel orders its buckets anew after the first backward: a run that resumes from a snapshot would sum in
    another order than one that was never interrupted (seen at 3 workers). So two empty backwards come first.
    """
    if device.type != "cpu":
        options = {"device_ids": [device.index], **options}
    replicas = DistributedDataParallel(model, **options)
    # Neither the forward of the model nor its hooks may run without inputs.
    replicas.module = _WithBallot(model, lambda: (_zero_loss(model),))
    _settle_buckets(replicas, options)
    replicas.module = model
    for parameter in model.parameters():
        parameter.grad = None
    return replicas


def require_options(options: Iterable[str]) -> None:
    """Check that DistributedDataParallel has all of *options*, also where a single rank needs none.

    Raises:
        StateError: it has no such option.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    for name in options:
        if name not in known:
            raise StateError(
                f"run.wrap has no option {name}", f"DistributedDataParallel has {', '.join(list(known)[1:])}"
            )


def _settle_buckets(replicas: DistributedDataParallel, options: Mapping[str, Any], *given: Any) -> None:
    """Make two backwards that do nothing, each after a forward of *given*, unless an option keeps torch from ordering its buckets anew.

    With static_graph the first real step decides; with find_unused_parameters the order stays, and torch would warn that these
    backwards use all parameters.
    """
    for _ in range(0 if options.get("static_graph") or options.get("find_unused_parameters") else 2):
        torch.autograd.backward(replicas(*given))


class DDPStep(ReplicatedStep):
    """A model with one replica per rank, whose gradients DistributedDataParallel adds up.

    Args:
        ddp: Options of DistributedDataParallel, and sync_batchnorm.

    Raises:
        StateError: sync_batchnorm without CUDA.
    """

    is_exact = False

    def __init__(
        self, worker: Worker, model: nn.Module, step: TrainingStep, *, ddp: Any = (), **options: Any
    ) -> None:
        of_ddp = dict(ddp)
        self._is_synced = bool(of_ddp.pop("sync_batchnorm", False))
        if self._is_synced:
            _require_cuda(worker)
            worker.vote.may_skip = False  # forwards of all ranks wait for each other
            if worker.world_size > 1:
                nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        super().__init__(worker, model, step, parts=worker.world_size, **options)
        self._loss: float | Tensor = 0.0
        self._count: float | Tensor = 0.0
        self._values = torch.zeros(ROW_SIZE, dtype=torch.float32)
        # Written without torch's bookkeeping: read in the same step only. What a float cannot hold becomes inf.
        memory: Any = self._values.numpy()
        self._array: Any = (c_float * ROW_SIZE).from_buffer(memory)
        replica = _WithBallot(model, self._roots).to(worker.device)
        self._ballot, self._replica, self._of_ddp = replica.ballot, replica, of_ddp
        self._ddp: DistributedDataParallel | None = None
        self._reset_exchange([])

    def _reset_exchange(self, before: list[nn.Parameter]) -> None:
        del before
        if self._worker.world_size == 1:
            return
        self._ddp = None  # its hooks end with it
        held = [(parameter, parameter.grad) for parameter in self._replica.parameters()]
        self._ddp = DistributedDataParallel(self._replica, forward_sync_buffers=False, **self._of_ddp)
        _settle_buckets(self._ddp, self._of_ddp, None, 0, 1, lambda: NO_REQUESTS)
        for parameter, gradient in held:
            parameter.grad = gradient

    def _sum_of(self, batch: Batch) -> StepRow:
        left = max(1, len(batch.model_keys))
        if self._is_synced and not batch.model_keys:
            raise StateError(
                f"step {batch.end.step} has {batch.samples} samples, too few for {self._worker.world_size} workers: "
                "ddp.sync_batchnorm needs some on each",
                'use dataset.tail = "drop", or train.steps instead of epochs',
            )
        self._loss, self._count, self._ballot.grad = 0.0, 0.0, None
        for data, count in self._pieces(batch, left):
            left -= 1
            if left and self._ddp is not None:
                with self._ddp.no_sync():
                    self._backward(data, count, batch.samples, None)
            else:
                self._backward(data, count, batch.samples, None if left else self._worker.vote.requests)
        assert self._ballot.grad is not None
        loss, count, *others = self._read(self._ballot.grad)
        ranks = self._worker.world_size  # over which DistributedDataParallel averages
        return StepRow.from_sums([loss * ranks, _rounded_count(count * ranks) if count else 0.0, *others])

    def _backward(
        self, data: Any, count: int, total: int, requests: Callable[[], Sequence[float]] | None
    ) -> None:
        roots = (self._replica if self._ddp is None else self._ddp)(data, count, total, requests)
        with mark("backward"):
            torch.autograd.backward(roots)

    def _roots(
        self, data: Any, num_samples: int, total: int, requests: Callable[[], Sequence[float]] | None
    ) -> tuple[Tensor, ...]:
        """Return the tensors to differentiate: the loss and, with *requests*, the product that casts the ballot."""
        loss = self._weighted_loss(data, num_samples, total) if num_samples else None
        if loss is None:
            loss = _zero_loss(self._model)
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        if requests is None:
            return (loss,)
        # The gradient of this dot product by the ballot is what this rank votes.
        return loss, torch.dot(self._ballot, self._votes(requests()))

    def _weighted_loss(self, data: Any, num_samples: int, total: int) -> Tensor | None:
        loss, count = self._forward(self._worker.rank, data, num_samples) or (None, None)
        if count is not None:
            self._count += count
        if loss is None:
            return None
        weight = num_samples / total if count is None else 1.0
        self._loss += (loss.item() if self._is_here else loss.detach().float()) * weight
        weight *= self._worker.world_size
        return loss if weight == 1.0 else loss * weight

    def _votes(self, requests: Sequence[float]) -> Tensor:
        row = StepRow(self._loss, self._count, requests, self._scalars.numbers(self._worker.rank))
        if not self._is_here:
            return row.on(self._ballot.device, torch.float32)
        numbers = row.to_numbers(places=0)
        self._array[: len(numbers)] = numbers
        return self._values


class _WithBallot(nn.Module):
    """The model and the ballot in one module, as DistributedDataParallel takes them."""

    def __init__(self, model: nn.Module, forward: Callable[..., tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.model, self._call = model, forward
        self.ballot = nn.Parameter(torch.zeros(ROW_SIZE, dtype=torch.float32))

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        """Return the tensors to differentiate."""
        return self._call(*given)


def _rounded_count(count: float) -> float:
    """Return a count that travelled as a mean over the ranks, in single precision; sums of weights stay fractions."""
    if not math.isfinite(count):
        return count
    nearest = round(count)
    return nearest if abs(count - nearest) <= 1e-6 * nearest else count


def _require_cuda(worker: Worker) -> None:
    if worker.device.type != "cuda":
        raise StateError(
            f"ddp.sync_batchnorm needs CUDA: torch has no SyncBatchNorm for {worker.device.type}",
            'leave it out; with train.consistency = "exact" running statistics are the mean over all shards',
        )


def _zero_loss(model: nn.Module) -> Tensor:
    # DistributedDataParallel expects sparse gradients of these layers, and refuses dense ones.
    sparse = {
        id(layer.weight)
        for layer in model.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse
    }
    # An empty slice: gradients are zeros of the right shape even where a weight is not finite. The order of
    # the sum makes the gradients ready in the order a real backward has: last layer first.
    parts = [_empty_sum(p, id(p) in sparse) for p in model.parameters() if p.requires_grad]
    loss = parts[0].float()
    for part in parts[1:]:
        loss = loss + part
    return loss


def _empty_sum(parameter: nn.Parameter, is_sparse: bool) -> Tensor:
    if is_sparse:
        none = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return nn.functional.embedding(none, parameter, sparse=True).sum()
    return (parameter if parameter.dim() else parameter.reshape(1))[:0].sum()
