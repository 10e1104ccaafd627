"""Gradients of the global batch that are the same bit for bit at every world size.

The batch is cut into a fixed number of virtual shards. Every shard is one forward and backward on its own, from the
same buffers and under its own seed, whichever rank does it; what the shards give is added up in the order of one
fixed binary tree. A rank adds the subtrees it holds and sends their slices to the slices' owners, each of which adds the
rest and sends the total to all (`fixed_order_sum.py`). The library's part is `send` and `recv`, which add nothing; its
reductions would add in an order that depends on the world size, its buckets and its algorithm.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from elasticflow.errors import StateError
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import environment
from elasticflow.runtime.process.checksums import sums_of
from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of
from elasticflow.runtime.process.torch_private import (
    buffers_of,
    collectives_so_far,
    foreach_copy_,
    foreach_div_,
)
from elasticflow.runtime.training import determinism, model_buffers
from elasticflow.runtime.training.fixed_order_sum import BucketLayout, FixedOrderAllReduce
from elasticflow.runtime.training.replicated_step import ReplicatedStep
from elasticflow.runtime.training.step_row import NO_REQUESTS, ROW_SIZE, StepRow, row_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.training.replicated_step import TrainingStep


LOOKS = 2
"""Forwards of a rank that are looked at."""


class ExactStep(ReplicatedStep):
    """A model with one replica per rank whose steps have the same bits at every world size.

    Float statistics of BatchNorm become the mean of the shards'; every other buffer is what the first shard made it.

    Args:
        virtual_shards: At least the world size; part of the trajectory.

    Raises:
        StateError: there are more workers than shards, workers of different kinds, or SyncBatchNorm.
    """

    is_exact = True
    _keeps_all_buffers = True

    def __init__(
        self, worker: Worker, model: nn.Module, step: TrainingStep, *, virtual_shards: int, **options: Any
    ) -> None:
        super().__init__(worker, model, step, parts=virtual_shards, **options)
        refuse(worker, model, virtual_shards)
        determinism.be_deterministic()
        if worker.device.type == "cpu":
            determinism.keep_freed_memory()
        self._low, self._high = even_split(virtual_shards, worker.world_size, worker.rank)
        model_buffers.send(worker, [t.detach() for t in (*model.parameters(), *model.buffers())])
        self._buffers = ShardBuffers(model, self._model_buffers)
        self._virtual_shards, self._look = virtual_shards, ForwardLook(model)
        self._lay_out()

    def _lay_out(self) -> None:
        """Lay out what travels of a virtual shard: the step's row, BatchNorm's buffers and the gradients of the trained parameters."""
        worker = self._worker
        # Behind the requests and scalars in how many shards there were samples, and in how many each parameter was used.
        numbers = torch.zeros(ROW_SIZE + 1 + len(self._parameters), dtype=row_dtype(), device=worker.device)
        leaf = [numbers, *self._buffers.carried(is_first=False), *self._parameters]
        self._leaf_size, self._gradients_from = len(leaf), len(leaf) - len(self._parameters)
        layout = BucketLayout(leaf, worker.world_size)
        self._exchange = FixedOrderAllReduce(
            layout, self._virtual_shards, range(worker.world_size), worker.rank
        )
        self._early = self._early_of(layout)

    def _reset_exchange(self, before: list[nn.Parameter]) -> None:
        self._early.close()
        for parameter in before:
            parameter.grad = None  # of a parameter that is frozen now no gradient is left
        self._lay_out()

    def _early_of(self, layout: BucketLayout) -> EarlyBuckets:
        first = self._gradients_from
        of_gradients = itertools.takewhile(lambda bucket: min(bucket) >= first, layout.buckets)
        buckets = [[number - first for number in bucket] for bucket in of_gradients]

        def hand_on(gradients: list[Tensor | None]) -> None:
            self._exchange.send_early(self._high - 1, [_dense(g) for g in gradients])

        return EarlyBuckets(self._parameters, buckets if self._worker.world_size > 1 else [], hand_on)

    def _sum_of(self, batch: Batch) -> StepRow:
        self._buffers.begin()
        self._exchange.begin()
        shards = range(self._low, self._high)  # a last, small batch has no samples for the last ones
        for shard, (data, count) in zip(shards, self._pieces(batch, len(shards)), strict=True):
            given = None
            if count:
                given = self._run(shard, data, count, batch.samples)
            with mark("exchange"):
                self._exchange.push(shard, self._leaf(shard, given))
        with mark("exchange"):
            totals = self._exchange.total()
        row = StepRow.from_sums(self._read(totals[0]))
        with_samples, *used = row.extra
        gradients = totals[self._gradients_from :]
        for parameter, gradient, uses in zip(self._parameters, gradients, used, strict=True):
            parameter.grad = gradient if uses else None  # as where one process trains: no decay moves it
        self._buffers.end(totals[1 : self._gradients_from], with_samples)
        return row

    def _run(
        self, shard: int, data: Any, num_samples: int, total: int
    ) -> tuple[Tensor | float, float | Tensor] | None:
        """Leave a shard's gradients in the parameters; return its weighted loss, and items if the step counts them.

        Returns None, and nothing that counts, once this rank's code wants training to end.
        """
        if self._worker.vote.stop_wanted is not None:
            return None
        self._model_buffers.restore()
        for parameter in self._parameters:
            parameter.grad = None
        determinism.require_deterministic()
        try:
            with self._look() if shard == self._low else nullcontext():
                given = self._forward(shard, data, num_samples)
            if given is None:
                return None
            loss, count = given
            self._early.begin(is_last=loss is not None and shard == self._high - 1)
            if loss is None:
                return 0.0, 0.0
            if count is None and num_samples != total:
                loss = loss * (num_samples / total)
            with mark("backward"):
                torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
            self._look.after_backward()
        except RuntimeError as error:
            raise determinism.named(error) from error
        determinism.require_deterministic()
        return loss.detach(), 0.0 if count is None else count

    def _leaf(
        self, shard: int, given: tuple[Tensor | float, float | Tensor] | None
    ) -> Sequence[Tensor | None]:
        """Return a shard's tensors in the layout's order; the last tensor carries this rank's requests."""
        is_last = shard == self._high - 1
        if given is None and not is_last:
            return [None] * self._leaf_size
        requests = self._worker.vote.requests() if is_last else NO_REQUESTS
        gradients: list[Tensor | None] = [None] * len(self._parameters)
        carried: Sequence[Tensor | None] = [None] * (self._gradients_from - 1)
        used = [0.0] * len(self._parameters)
        loss, count = given or (0.0, 0.0)
        if given is not None:
            gone = self._early.end()
            gradients = [_dense(parameter.grad) for parameter in self._parameters]
            used = [float(g is not None or index in gone) for index, g in enumerate(gradients)]
            carried = self._buffers.carried(is_first=shard == 0)
        extra = (float(given is not None), *used)
        row = StepRow(loss, count, requests, self._scalars.numbers(shard), extra)
        numbers = row.on(self._worker.device)
        return [numbers, *carried, *gradients]


def refuse(worker: Worker, model: nn.Module, virtual_shards: int) -> None:
    """Make sure that exact steps of *model* can be made. Collective: every rank.

    Raises:
        StateError: there are more workers than shards, workers of different kinds, or SyncBatchNorm.
    """
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


class ForwardLook:
    """Looks in a rank's first forwards for acts whose results depend on which rank runs which shards; a context for each."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._left = model, LOOKS
        self._sums: dict[str, int] = {}
        self._rows: dict[str, nn.Parameter] = {}

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context of a forward, after which StateError is raised if the forward called a collective or changed a parameter."""
        self._sums = {}
        if not self._left:
            yield
            return
        self._left -= 1
        named = dict(self._model.named_parameters())
        # Blocks that stay gathered until the backward have whole parameters meanwhile: these remain this rank's rows.
        self._rows = {name: parameter for name, parameter in named.items() if is_sharded(parameter)}
        self._sums, begun = parameter_sums(named.items()), collectives_so_far()
        yield
        if collectives_so_far() != begun:
            raise StateError(
                "the forward calls a collective of torch.distributed, and each virtual shard runs by itself: the bits would depend on "
                "the number of workers",
                'let the forward see its own samples alone, or leave out virtual_shards (consistency = "batch")',
            )
        self._require_unchanged("forward")

    def after_backward(self) -> None:
        """Raise StateError if the backward of a forward that was looked at changed a parameter."""
        if self._sums:
            self._require_unchanged("backward")
            self._sums = {}

    def _require_unchanged(self, part: str) -> None:
        therefore = f"a rank runs one {part} for each of its virtual shards: the bits would depend on the number of workers"
        named = dict(self._model.named_parameters()) | self._rows
        require_unchanged(self._sums, named.items(), therefore, part)


def parameter_sums(named: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
    """Return a sum over the bits of each parameter, of a sharded one over this rank's rows."""
    return sums_of({name: local_of(parameter) for name, parameter in named})


def require_unchanged(
    before: Mapping[str, int], named: Iterable[tuple[str, Tensor]], therefore: str, part: str = "forward"
) -> None:
    """Make sure that parameters have the sums *before*.

    Raises:
        StateError: a *part* of a step has changed one; the message names it.
    """
    for name, total in parameter_sums(named).items():
        if total != before[name]:
            raise StateError(
                f"the {part} changes the parameter {name}, and {therefore}",
                "change it after the optimizer's step, as a momentum encoder or an average may be",
            )


def _dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


class ShardBuffers:
    """The model's buffers within a step: each shard begins with the same; BatchNorm's travel with the gradients."""

    def __init__(self, model: nn.Module, buffers: model_buffers.ModelBuffers) -> None:
        self._buffers = buffers
        norms = [m for m in model.modules() if isinstance(m, model_buffers.BATCHNORMS)]
        own = [(norm, b) for norm in norms for b in norm.buffers(recurse=False)]
        self._means = [b for _, b in own if b.is_floating_point()]
        self._norms = [norm for norm, b in own if b.is_floating_point()]  # of each of the means
        self._counters = [b for _, b in own if not b.is_floating_point()]
        others = [m for m in model.modules() if not isinstance(m, model_buffers.BATCHNORMS)]
        self._others = [table for table in map(buffers_of, others) if table]
        self._counted: list[Tensor] = []
        self._first: list[tuple[dict[str, Tensor | None], str, Tensor]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._counted, self._first = [b.clone() for b in self._counters], []

    def carried(self, *, is_first: bool) -> list[Tensor]:
        """Return the buffers after a shard: the statistics, and the amount by which the first shard raised each counter."""
        raised = [b.new_zeros((), dtype=torch.float32) for b in self._counters]
        if is_first:
            for number, counter, was in zip(raised, self._counters, self._counted, strict=True):
                number.copy_(counter - was)
            # A forward may have assigned other tensors.
            self._first = [
                (table, name, buffer.detach().clone())
                for table in self._others
                for name, buffer in table.items()
                if buffer is not None
            ]
        return [*(b.clone() for b in self._means), *raised]

    def end(self, totals: list[Tensor], shards: float) -> None:
        """Load the combined result of all shards into the buffers. Without samples for the first shard the others are as before."""
        self._buffers.restore()
        means = len(self._means)
        # A mean of equal statistics, as of a frozen layer, may be rounded otherwise.
        moved = [place for place, norm in enumerate(self._norms) if norm.training]
        if moved:
            foreach_copy_([self._means[place] for place in moved], [totals[place] for place in moved])
            foreach_div_([self._means[place] for place in moved], shards)
        for total, counter in zip(totals[means:], self._counters, strict=True):
            counter.add_(total.to(counter.dtype))
        for table, name, value in self._first:
            buffer = table[name]
            if buffer is None or buffer.shape != value.shape:
                table[name] = value
            else:
                buffer.copy_(value)


class EarlyBuckets:
    """Hands on buckets of gradients while a backward still makes others.

    A backward may add to a gradient several times (checkpoints that run it piecemeal). Where one did, nothing more is
    handed on early: it is unknown when such a gradient is whole.

    Args:
        buckets: Indices of *parameters*, in the order in which they are to be handed on.
        hand_on: Called with a bucket's gradients, which are its own from then on.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        buckets: list[list[int]],
        hand_on: Callable[[list[Tensor | None]], None],
    ) -> None:
        self._parameters, self._buckets, self._hand_on = parameters, buckets, hand_on
        self._bucket_of = {index: number for number, bucket in enumerate(buckets) for index in bucket}
        self._seen: set[int] = set()
        self._has_looked = self._is_piecemeal = self._is_open = False
        self._gone = 0
        self._hooks: list[Any] = [
            parameters[index].register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index in self._bucket_of
        ]

    def close(self) -> None:
        """Look at no gradient any more."""
        for hook in self._hooks:
            hook.remove()

    def begin(self, *, is_last: bool) -> None:
        """Get ready for a backward.

        Args:
            is_last: The sums of this call may be handed on.
        """
        self._seen.clear()
        self._gone = 0
        self._is_open = is_last and self._has_looked and not self._is_piecemeal

    def end(self) -> set[int]:
        """Stop; return the indices of the gradients that were handed on since `begin`."""
        self._is_open = False
        # A shard whose loss counts nothing has no backward.
        self._has_looked = self._has_looked or bool(self._seen)
        return {index for bucket in self._buckets[: self._gone] for index in bucket}

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda _: self._arrived(index)

    def _arrived(self, index: int) -> None:
        if index in self._seen:
            self._is_piecemeal, self._is_open = True, False
            if self._bucket_of[index] < self._gone:
                raise StateError(
                    "a backward added to a gradient again after it was complete in every backward before",
                    "use checkpoint(..., use_reentrant=False)",
                )
        self._seen.add(index)
        while self._is_open and self._gone < len(self._buckets):
            bucket = self._buckets[self._gone]
            if not self._seen.issuperset(bucket):
                return
            self._gone += 1
            gradients = [self._parameters[p].grad for p in bucket]
            for p in bucket:
                self._parameters[p].grad = None
            self._hand_on(gradients)
