"""Gradients of the global batch that are the same bit for bit at every world size.

The batch is cut into a fixed number of virtual shards. Every shard is one forward and backward on its own, from the
same buffers and under its own seed, whichever rank does it; what the shards give is added up in the order of one
fixed binary tree. A rank adds the subtrees it holds, all_to_all and all_gather move bytes and add nothing, and the
owner of a slice adds the rest. A library's reduction would add in an order that depends on the world size, its
buckets and its algorithm.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elasticflow.errors import StateError, StopTraining
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.measuring.scalars import NUM_PLACES, Scalars
from elasticflow.runtime.model import model_buffers, replicable
from elasticflow.runtime.process import environment, stopping
from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.process.torch_private import foreach_div_
from elasticflow.runtime.process.votes import NUM_REQUESTS
from elasticflow.runtime.training import determinism, stoppable_batches
from elasticflow.runtime.training.fixed_order_sum import BucketLayout, FixedOrderAllReduce
from elasticflow.runtime.training.loss import NonFinite, parse_loss
from elasticflow.runtime.training.loss_weights import first_look
from elasticflow.runtime.training.precision import autocast
from elasticflow.runtime.training.virtual_shards import EarlyBuckets, ShardBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.amp import GradScaler

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.training.loss_weights import FirstLook

# Numbers that travel with the gradients: weighted loss, items counted by the user's step, shards that had samples,
# the requests of `vote`, the places of scalars; then for each parameter by how many shards it was used.
_LOSS, _COUNT, _SHARDS, _REQUESTS = 0, 1, 2, slice(3, 3 + NUM_REQUESTS)
_PLACES = slice(_REQUESTS.stop, _REQUESTS.stop + NUM_PLACES)
_USED = _PLACES.stop

_EMPTY = (None, 0), 0  # a virtual shard without samples


class ExactStep:
    """A model with one replica per rank whose steps have the same bits at every world size.

    Float statistics of BatchNorm become the mean of the shards'; every other buffer is what the first shard made it.

    Args:
        worker: This worker.
        model: On its device; every rank has rank 0's weights afterwards.
        training_step: Called with the bare model and a shard's samples; returns what `parse_loss` takes.
        precision: fp32, bf16 or fp16 (autocast).
        on_nonfinite: What a loss that is not finite does: "stop", or "skip" the step.
        virtual_shards: At least the world size; part of the trajectory.
        scaler: For fp16.

    Attributes:
        is_exact: Its steps have the same bits at every world size.
        was_skipped: The last step's loss was not finite, and the step was left out.

    Raises:
        StateError: there are more workers than shards, workers of different kinds, or SyncBatchNorm.
    """

    is_exact = True

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        training_step: Callable[[nn.Module, Any], Any],
        *,
        precision: str,
        on_nonfinite: str,
        virtual_shards: int,
        scaler: GradScaler | None = None,
    ) -> None:
        replicable.require_whole(model)
        _refuse(worker, model, virtual_shards)
        determinism.be_deterministic()
        if worker.device.type == "cpu":
            determinism.keep_freed_memory()
        self._step = training_step
        self._worker, self._model, self._scaler = worker, model, scaler
        self._precision, self.was_skipped = precision, False
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._low, self._high = even_split(virtual_shards, worker.world_size, worker.rank)
        self._nonfinite = NonFinite(worker, on_nonfinite, self._parameters, scaler)
        if worker.world_size > 1:
            model_buffers.send(worker, [t.detach() for t in (*model.parameters(), *model.buffers())])
        self._watch = model_buffers.BufferWatch(worker, model)
        self._buffers = ShardBuffers(model)
        numbers = torch.zeros(_USED + len(self._parameters), device=worker.device)
        leaf = [numbers, *self._buffers.carried(is_first=False), *self._parameters]
        self._leaf_size, self._gradients_from = len(leaf), len(leaf) - len(self._parameters)
        layout = BucketLayout(leaf, worker.world_size)
        self._exchange = FixedOrderAllReduce(layout, virtual_shards, worker.world_size, worker.rank)
        self._early = self._early_of(layout)
        self._first_look: FirstLook | None = None
        self._scalars = Scalars(worker, virtual_shards)

    def _early_of(self, layout: BucketLayout) -> EarlyBuckets:
        first = self._gradients_from
        of_gradients = itertools.takewhile(lambda bucket: min(bucket) >= first, layout.buckets)
        buckets = [[number - first for number in bucket] for bucket in of_gradients]

        def hand_on(gradients: list[Tensor | None]) -> None:
            self._exchange.send_early(self._high - 1, [_dense(g) for g in gradients])

        return EarlyBuckets(self._parameters, buckets if self._worker.world_size > 1 else [], hand_on)

    def forward_backward(self, batch: Batch) -> float:
        """Leave the global batch's gradients in the parameters; return its mean loss. Collective: every rank.

        Where `worker.stopped` is set afterwards, they are not the batch's, and the step is not to be applied.

        Raises:
            NonFiniteLossError: on every rank, if the loss is not finite and on_nonfinite is "stop".
            StateError: an operation has no deterministic form here; named.
        """
        worker = self._worker
        self._watch.before_step()
        if batch.end.step <= 2:
            self._first_look = first_look(worker, batch)
        worker.generators.look()
        self._buffers.begin()
        self._scalars.begin()
        self._exchange.begin()
        pieces = zip(stoppable_batches.micro_batches(batch, worker.vote), batch.model_keys, strict=True)
        for shard in range(self._low, self._high):
            (data, count), key = next(pieces, _EMPTY)  # a last, small batch has none for the last shards
            given = None
            if count:
                worker.generators.seed_model(key)
                given = self._run(shard, data, count, batch.samples)
            elif shard == 0:
                self._buffers.carry_nothing()
            with mark("exchange"):
                self._exchange.push(shard, self._leaf(shard, given))
        with mark("exchange"):
            totals = self._exchange.total()
        return self._outcome(batch.end.step, totals)

    def _run(
        self, shard: int, data: Any, num_samples: int, total: int
    ) -> tuple[Tensor | float, float] | None:
        """Leave a shard's gradients in the parameters; return its weighted loss, and items if the step counts them.

        Returns None, and nothing that counts, once this rank's code wants training to end.
        """
        if self._worker.vote.stop_wanted is not None:
            return None
        self._buffers.restore()
        for parameter in self._parameters:
            parameter.grad = None
        determinism.require_deterministic()
        loss: Tensor | None = None
        try:
            with mark("forward"), autocast(self._precision, self._worker.device):
                result = self._step(self._model, data)
            if self._first_look is not None:
                self._first_look(result, data, num_samples)
            loss, count = parse_loss(result)
            self._scalars.add(shard, result, num_samples if count is None else count)
            if loss is None:
                self._early.begin(is_last=False)
                return 0.0, 0.0
            if count is None and num_samples != total:
                loss = loss * (num_samples / total)
            self._early.begin(is_last=shard == self._high - 1)
            with mark("backward"):
                torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
        except StopTraining as stop:
            if loss is not None:
                raise  # within the backward, of which others may have a part already
            stopping.request_stop(self._worker.vote, stop)
            return None
        except RuntimeError as error:
            raise determinism.named(error) from error
        determinism.require_deterministic()
        return loss.detach(), count or 0.0

    def _leaf(self, shard: int, given: tuple[Tensor | float, float] | None) -> Sequence[Tensor | None]:
        """Return what a shard gives, in the layout's order; the last one carries this rank's requests."""
        is_last = shard == self._high - 1
        if given is None and not is_last:
            return [None] * self._leaf_size
        requests = self._worker.vote.requests() if is_last else (0.0,) * NUM_REQUESTS
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        carried: Sequence[Tensor | None] = [None] * (self._gradients_from - 1)
        used = [0.0] * len(self._parameters)
        loss, count = given or (0.0, 0.0)
        if given is not None:
            gone = self._early.end()
            gradients = [_dense(parameter.grad) for parameter in self._parameters]
            used = [float(g is not None or index in gone) for index, g in enumerate(gradients)]
            carried = self._buffers.carried(is_first=shard == 0)
        numbers = torch.tensor(
            [0.0, count, float(given is not None), *requests, *[0.0] * NUM_PLACES, *used],
            device=self._worker.device,
        )
        numbers[_LOSS] = loss
        for place, number in enumerate(self._scalars.numbers(shard), _PLACES.start):
            numbers[place] = number
        return [numbers, *carried, *gradients]

    def _outcome(self, number: int, totals: list[Tensor]) -> float:
        worker = self._worker
        numbers = totals[0].tolist()  # waits for the device
        worker.vote.resolve(numbers[_REQUESTS])
        if worker.vote.stop:
            self._buffers.restore()
            worker.agree_to_stop()
            return math.nan
        worker.generators.are_used |= worker.vote.random
        used = zip(self._parameters, totals[self._gradients_from :], numbers[_USED:], strict=True)
        for parameter, gradient, shards in used:
            parameter.grad = gradient if shards else None  # as where one process trains: no decay moves it
        loss, scalars = float(numbers[_LOSS]), self._scalars.means(numbers[_PLACES])
        worker.progress.note_step(numbers[_COUNT], scalars)
        if numbers[_COUNT] > 0:
            loss /= numbers[_COUNT]
            foreach_div_(totals[self._gradients_from :], numbers[_COUNT])
        self.was_skipped = not math.isfinite(loss)
        if self.was_skipped:
            self._buffers.restore()
            self._nonfinite.refuse(number, loss)
        else:
            self._buffers.end(totals[1 : self._gradients_from], numbers[_SHARDS])
        return loss


def _refuse(worker: Worker, model: nn.Module, virtual_shards: int) -> None:
    if worker.world_size > virtual_shards:
        raise StateError(
            f"{worker.world_size} workers cannot share {virtual_shards} virtual shards",
            "start fewer workers; a new run may set train.virtual_shards higher",
        )
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise StateError(
            'train.consistency = "exact" cannot use SyncBatchNorm: its statistics are of whatever runs at once',
            "use BatchNorm: running statistics are the mean over all shards anyway",
        )
    environment.require_same(worker)


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient
