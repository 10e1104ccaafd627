"""Gradients of a model that several ranks share: the same bits for the same number of virtual shards.

In exact mode that number is fixed for the whole run, whatever the number of ranks and replicas. In batch mode there is a
virtual shard for each micro-batch of each rank.

A virtual shard's gradient is computed from parameters that torch has gathered whole, so its bits do not depend on how
they are shared out. In each round the ranks of a replica compute neighbouring virtual shards, and swap rows: every rank
gets the rows that it holds. Bytes are moved, and nothing is added. Then each rank adds up its rows in the order of the
fixed tree, and exchanges subtrees with the ranks of other replicas that hold the same rows (`fixed_order_sum.py`).

Every forward and backward of a sharded model waits for the other ranks of its replica. So in each round every rank
makes exactly one of each. A rank without samples repeats its last ones for nothing.
"""

from __future__ import annotations

import math
import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticflow.errors import StateError, StopTraining
from elasticflow.runtime.data.device_transfer import transfer_to
from elasticflow.runtime.measuring.marks import mark
from elasticflow.runtime.process import torch_private
from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of, sharded_modules
from elasticflow.runtime.training import determinism, exact
from elasticflow.runtime.training.exact import ShardBuffers
from elasticflow.runtime.training.fixed_order_sum import BucketLayout, FixedOrderAllReduce
from elasticflow.runtime.training.precision import autocast
from elasticflow.runtime.training.replicated_step import ReplicatedStep
from elasticflow.runtime.training.step_row import NO_REQUESTS, ROW_SIZE, StepRow, row_dtype

if TYPE_CHECKING:
    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.shard_layout import ShardLayout
    from elasticflow.runtime.training.replicated_step import TrainingStep

_NO_MORE = -1  # in place of a block's number: a round's forwards are made
_COMPARED_ROUNDS = 16  # in which the losses' parameters are counted: random draws that differ show soon
_NONE = -(2**62)  # in place of a number, of a rank whose loss counts nothing
_ORDER_BITS = 0xFFFFFF  # a float32 holds so many bits of a whole number exactly


class ShardedStep(ReplicatedStep):
    """A model that the ranks of each replica share. For one number of virtual shards the bits are the same at any degree.

    Args:
        virtual_shards: At least the world size.
        is_exact: The number is part of the trajectory, and every operation has the same bits each time.

    Raises:
        StateError: as of `ExactStep`, if exact; or a buffer that travels with the gradients is not of float32; or a gradient scaler.
    """

    _takes_sharded = _keeps_all_buffers = True

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        step: TrainingStep,
        *,
        virtual_shards: int,
        is_exact: bool,
        **options: Any,
    ) -> None:
        super().__init__(worker, model, step, parts=virtual_shards, **options)
        self.is_exact, self.virtual_shards = is_exact, virtual_shards
        if is_exact:
            exact.refuse(worker, model, virtual_shards)
            determinism.be_deterministic()
        if self._scaler is not None:
            raise StateError(
                "precision fp16 needs a gradient scaler, which looks for infinities on one rank alone",
                'precision="bf16", which needs none',
            )
        if worker.device.type == "cpu":
            determinism.keep_freed_memory()
        layout = worker.layout
        self._mine, self._rounds = layout.leaves(virtual_shards), layout.rounds(virtual_shards)
        self._buffers = ShardBuffers(model, self._model_buffers)
        self._row = torch.zeros(ROW_SIZE + 2, dtype=row_dtype(), device=worker.device)
        carried = self._buffers.carried(is_first=False)
        if other := next((b.dtype for b in carried if b.dtype != torch.float32), None):
            raise StateError(
                f"a running statistic of BatchNorm is of {other}, and must be of torch.float32 here"
            )
        self._carried_like = carried
        self._look = exact.ForwardLook(model)
        self._calls = _Calls(model, worker.device)
        self._exchange = _Exchange(layout, virtual_shards, worker.rank, self._calls)
        self._exchange.take_all(model)
        flat = self._packed(self._row, carried)
        rows = BucketLayout([flat], layout.replicas)
        self._rows = FixedOrderAllReduce(rows, virtual_shards, layout.holders, worker.rank)
        self._spare: Any = None
        self._is_first = True

    def _sum_of(self, batch: Batch) -> StepRow:
        self._buffers.begin()
        self._exchange.begin()
        self._rows.begin()
        pieces = self._pieces(batch, len(self._mine))
        for number, leaves in enumerate(self._rounds):
            place = self._mine[number] if number < len(self._mine) else None
            data, count = next(pieces) if place is not None else (None, 0)
            self._give_spare(data)
            given = None
            # Without a spare no rank has samples: those that should have some ask for the end of training.
            if self._spare is not None:
                self._exchange.begin_round(leaves, is_last=number == len(self._rounds) - 1)
                given = self._run_round(place, data, count, batch.samples)
                self._exchange.end_round()
            with mark("exchange"):
                self._push_rows(leaves, place, given)
        with mark("exchange"):
            (total,) = self._rows.total()
            if self._spare is not None:
                self._exchange.finish()
        row, carried = total[: len(self._row)], self._unpacked(total[len(self._row) :])
        result = StepRow.from_sums(self._read(row))
        with_samples, counted = result.extra
        if not counted:
            for parameter in self._parameters:
                parameter.grad = None  # as of a model that is not shared: no momentum moves it
        self._buffers.end(carried, with_samples)
        return result

    def _reset_exchange(self, before: list[nn.Parameter]) -> None:
        for parameter in before:
            parameter.grad = None  # of a parameter that is frozen now no gradient is left
        self._exchange.take_all(self._model)

    def _run_round(
        self, leaf: int | None, data: Any, num_samples: int, total: int
    ) -> tuple[Tensor | float, float | Tensor] | None:
        """Make one forward and one backward; return the loss and items of this rank's virtual shard, None if it has none."""
        vote = self._worker.vote
        self._model_buffers.restore()
        for parameter in self._parameters:
            parameter.grad = None
        self._require_deterministic()
        given = None
        if leaf is not None and num_samples and vote.stop_wanted is None:
            with self._look() if self.is_exact else nullcontext():
                given = self._forward(leaf, data, num_samples)
        loss = None if given is None else given.value
        self._exchange.counts = loss is not None
        if loss is None:
            loss = self._idle()
        elif given is not None and given.num_items is None and num_samples != total:
            loss = loss * (num_samples / total)
        self._calls.end_forwards()
        self._calls.require_same_use(loss if self._exchange.counts else None)
        if is_sharded(loss):
            raise StateError(
                "the loss depends on parameters beside the forward of the sharded model, such as on a sum of their squares",
                "weight_decay of the optimizer; or add the gradient of that term to parameter.grad after run.gradients",
            )
        try:
            with mark("backward"):
                torch.autograd.backward(loss)
        except RuntimeError as error:
            raise determinism.named(error) from error
        self._require_deterministic()
        if given is None:
            return None
        if given.value is None:
            return 0.0, 0.0
        return loss.detach(), 0.0 if given.num_items is None else given.num_items

    def _require_deterministic(self) -> None:
        if self.is_exact:
            determinism.require_deterministic()

    def _idle(self) -> Tensor:
        """Return a loss of zero whose backward waits for the other ranks as that of a real one.

        Makes the forwards of a round that this rank has not made.
        """
        calls = self._calls
        with autocast(self._precision, self._worker.device):
            if not calls.is_within and calls.known is not None:
                for args, kwargs in calls.known[calls.made :]:
                    self._model(*args, **kwargs)
            elif not calls.made and not calls.is_within:
                try:
                    self._training_step(self._model, self._spare)
                except StopTraining as stop:
                    if not calls.has_begun:
                        raise _stopped() from stop
                    # After the model has returned the request is that of the rank whose samples these are.
        if calls.is_within or not calls.made:
            raise _stopped()
        if not calls.outputs:
            raise StateError(
                "the model returned no tensor that can be differentiated, in a forward that counts nothing",
                "let the model's forward return tensors, alone or in a tuple, list, dict or dataclass",
            )
        # Not a number times zero stays what it is: the rows are set to zero before they are sent.
        total = calls.outputs[0].sum() * 0.0
        for output in calls.outputs[1:]:
            total = total + output.sum() * 0.0
        return total

    def _give_spare(self, data: Any) -> None:
        """Keep *data* for rounds without samples; at the first step a rank without any gets some of another rank. Collective then."""
        if data is not None:
            self._spare = data
        if not self._is_first:
            return
        self._is_first = False
        has_some = self._worker.gather_text("" if self._spare is None else "yes")
        if all(has_some) or not any(has_some):
            return
        source = has_some.index("yes")
        box = [transfer_to(torch.device("cpu")).move(self._spare) if self._worker.rank == source else None]
        dist.broadcast_object_list(box, source)
        if self._spare is None:
            self._spare = transfer_to(self._worker.device).move(box[0])

    def _push_rows(
        self, leaves: range, leaf: int | None, given: tuple[Tensor | float, float | Tensor] | None
    ) -> None:
        """Add the numbers of the round's virtual shards, in their order, which each rank of a replica learns of the others."""
        requests = self._worker.vote.requests() if leaf == self._mine[-1] else NO_REQUESTS
        loss, count = given or (0.0, 0.0)
        scalars = () if given is None or leaf is None else self._scalars.numbers(leaf)
        row = StepRow(
            loss, count, requests, scalars, (float(given is not None), float(self._exchange.counts))
        )
        numbers = row.on(self._worker.device)
        if given is None:
            carried = [torch.zeros_like(like) for like in self._carried_like]
        else:
            carried = self._buffers.carried(is_first=leaf == 0)
        mine = self._packed(numbers, carried, self._calls.order())
        layout = self._worker.layout
        gathered = mine.new_empty(layout.degree, len(mine))
        dist.all_gather_single(gathered.view(-1), mine, group=self._exchange.group)
        orders = gathered[:, -1].tolist()
        if len(set(orders)) > 1:
            raise _other_order()
        for place, other in enumerate(leaves):
            self._rows.push(other, [gathered[place, :-1]])

    def _packed(self, row: Tensor, carried: list[Tensor], *more: Tensor) -> Tensor:
        return torch.cat([row, *(tensor.reshape(-1) for tensor in carried), *more])

    def _unpacked(self, flat: Tensor) -> list[Tensor]:
        sizes = [like.numel() for like in self._carried_like]
        return [
            part.view_as(like)
            for part, like in zip(torch.split(flat, sizes), self._carried_like, strict=True)
        ]


def _stopped() -> StateError:
    return StateError(
        "StopTraining was raised in the midst of a forward of a sharded model, or before this process called it for the first time, and "
        "the other ranks wait for that forward",
        "raise StopTraining after the model has returned, or call run.stop(reason) before run.gradients",
    )


class _Calls:
    """Watches the forwards of a round: the model's calls, the order of its blocks in them, and its outputs.

    Every round has the same order on every rank: a block that is left out is noticed before the others wait for it. In the first
    round the ranks of a replica compare each call before torch gathers the block, later each rank looks at its own order.

    It notes arguments and outputs between `begin` and `end_forwards` only: not those of an evaluation, or of recomputed activations.

    Attributes:
        known: Arguments of each call of the model in the last round of this rank's own; None before the first one.
        is_within: A call of the model has begun and did not return.
        outputs: Differentiable tensors that the calls of this round returned.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        first: Any = next(model.parameters())
        self._device, self._group = device, first.device_mesh.get_group()
        self.known: list[tuple[Any, Any]] | None = None
        self._expected: list[int] | None = None
        self._rounds_left = _COMPARED_ROUNDS
        # Before torch's own hook, which waits for the other ranks.
        model.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True)
        for number, module in enumerate(sharded_modules(model)):
            module.register_forward_pre_hook(lambda *_, number=number: self._note(number), prepend=True)
            if not torch_private.is_compiled(module):
                self._watch(module)
        model.register_forward_hook(self._leave)
        self.begin()
        self._is_open = False

    @property
    def has_begun(self) -> bool:
        """True if the model has been called in this round."""
        return self.is_within or self.made > 0

    def begin(self) -> None:
        """Begin a round."""
        self._order: list[int] = []
        self._arguments: list[tuple[Any, Any]] = []
        self.outputs: list[Tensor] = []
        self.made, self.is_within, self._is_open = 0, False, True

    def end_forwards(self) -> None:
        """Make sure that this round's blocks were called as in the rounds before.

        Raises:
            StateError: some were not.
        """
        if self._expected is None:
            self._require_same(_NO_MORE)
            self._expected = list(self._order)
        if self._order != self._expected:
            raise _other_order()
        # The backward does without the outputs' own memory.
        self.known, self.outputs, self._is_open = self._arguments, [], False

    def require_same_use(self, loss: Tensor | None) -> None:
        """Make sure that *loss* depends on as many parameters as that of other ranks, in the first rounds. None: it counts nothing.

        The backward of a block that has none of them exchanges nothing, and the others would wait for it. Collective among the
        ranks of a replica.

        Raises:
            StateError: another rank's loss depends on more parameters, or on fewer.
        """
        if self._rounds_left == 0:
            return
        self._rounds_left -= 1
        number = 0 if loss is None else _number_of_leaves(loss)
        most, least = self._most([_NONE, _NONE] if loss is None else [number, -number])
        if most not in (_NONE, -least):
            raise StateError(
                f"the loss depends on {most} parameters on one rank, and on {-least} on another: a block left out its layers",
                "a forward uses the same parameters on every rank, whatever its data and its random draws are: multiply the output of "
                "a layer that is skipped by 0",
            )

    def order(self) -> Tensor:
        """Return a digest of the order of this round's calls, those of recomputed activations included."""
        text = ",".join(map(str, self._order)).encode()
        return torch.tensor([float(zlib.crc32(text) & _ORDER_BITS)], dtype=row_dtype(), device=self._device)

    def _note(self, number: int) -> None:
        place = len(self._order)
        self._order.append(number)
        if self._expected is None:
            self._require_same(number)
        elif self._is_open and self._expected[place : place + 1] != [number]:
            raise _other_order()

    def _watch(self, module: nn.Module) -> None:
        """Refuse, in the first rounds, a forward that changes parameters of *module*: gathered ones, which torch lets go after it."""
        sums: dict[str, int] = {}

        def begin(*_: Any) -> None:
            if self._is_open and self._rounds_left > _COMPARED_ROUNDS - exact.LOOKS:
                sums.update(exact.parameter_sums(_own_parameters(module).items()))

        def end(*_: Any) -> None:
            if sums:
                now = _own_parameters(module).items()
                exact.require_unchanged(sums, now, "what it changes of a sharded model is lost after it")
                sums.clear()

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, prepend=True)

    def _require_same(self, number: int) -> None:
        """Make sure that all ranks of the replica are about to call the same block. Collective among them."""
        most, least = self._most([number, -number])
        if most != -least:
            raise _other_order()

    def _most(self, numbers: list[int]) -> list[int]:
        mine = torch.tensor(numbers, device=self._device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self._group)
        found: list[int] = mine.tolist()
        return found

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        del module
        if self._is_open:
            self.is_within = True
            self._arguments.append(torch_private.tree_map(_detached, (args, kwargs)))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        del module, args
        if self._is_open:
            self.made, self.is_within = self.made + 1, False
            self.outputs += _differentiable(output)


def _number_of_leaves(loss: Tensor) -> int:
    """Return the number of tensors that a backward of *loss* gives gradients."""
    waiting: list[Any] = [loss.grad_fn]
    seen: set[Any] = set(waiting)
    leaves = 0
    while waiting:
        node = waiting.pop()
        leaves += hasattr(node, "variable")
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        waiting += following
    return leaves


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _other_order() -> StateError:
    return StateError(
        "a forward of a sharded model called its blocks in another order than before or than another rank, or left some of them out",
        "a forward calls the same blocks on every rank and in every step, whatever its data and its random draws are",
    )


def _differentiable(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for each in value for tensor in _differentiable(each)]


class _Exchange:
    """The gradients of all parameters, group by group as torch reduces them."""

    def __init__(self, layout: ShardLayout, leaves: int, rank: int, calls: _Calls) -> None:
        self.layout, self.num_leaves, self.rank, self._calls = layout, leaves, rank, calls
        self.group: dist.ProcessGroup | None = None
        self.counts = False
        self.leaves = range(0)
        self.is_last = False
        self._groups: list[_GroupSum] = []

    def take_all(self, model: nn.Module) -> None:
        """Have the gradients of all parameters of *model* that are trained now go through here."""
        self._groups = []
        for number, module in enumerate(sharded_modules(model)):
            self._take(module, number)

    def _take(self, module: Any, number: int) -> None:
        own: list[Any] = [p for p in _own_parameters(module).values() if p.requires_grad]
        if not own:
            return
        self.group = own[0].device_mesh.get_group()
        made = _GroupSum(self, own, f"block {number} ({type(module).__name__})")
        self._groups.append(made)
        module.set_custom_reduce_scatter(made)
        module.set_all_reduce_hook(made.hook)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)

    def begin(self) -> None:
        """Begin a step."""
        for group in self._groups:
            group.begin()

    def begin_round(self, leaves: range, *, is_last: bool) -> None:
        """Begin a round, in which the replica's ranks compute *leaves*."""
        self.leaves, self.is_last = leaves, is_last
        self._calls.begin()
        for group in self._groups:
            group.calls = 0

    def end_round(self) -> None:
        """Make sure that the backward came to every group once.

        Raises:
            StateError: it did not; the message names the block.
        """
        for group in self._groups:
            if group.calls != 1:
                raise StateError(
                    f"a backward came {group.calls} times to {group.name} of a sharded model",
                    "call the model once for each loss, and let the loss depend on every block; freeze parameters that no loss "
                    "depends on: requires_grad_(False)",
                )

    def finish(self) -> None:
        """Have the totals in the parameters' gradients. Collective: the ranks that hold the same rows."""
        for group in self._groups:
            group.finish()


class _GroupSum:
    """The parameters that torch gathers and reduces together: what it calls in place of a reduce-scatter, and after it.

    On a device torch calls the two on streams of its own. Offloaded gradients it copies to the CPU's memory as soon as `hook` is
    through, so the total is made there already, on that stream, and no sum stays on the device.
    """

    def __init__(self, exchange: _Exchange, parameters: list[Any], name: str) -> None:
        self._exchange, self._parameters, self.name = exchange, parameters, name
        self.calls = 0
        self._is_offloaded = False
        degree = exchange.layout.degree
        self._numel = sum(-(-p.shape[0] // degree) * p.numel() // p.shape[0] for p in parameters)
        self._sum: FixedOrderAllReduce | None = None
        self._got: Tensor | None = None
        self._output: Tensor | None = None

    def begin(self) -> None:
        """Begin a step."""
        if self._sum is not None:
            self._sum.begin()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for torch: for the reduced gradients that of the sum, for all others new memory."""
        exchange, like = self._exchange, self._parameters[0]
        if math.prod(size) == self._numel and self._sum is None:
            self._is_offloaded = device.type != like.device.type
            layout = BucketLayout([torch.empty(*size, dtype=dtype, device=device)], exchange.layout.replicas)
            self._sum = FixedOrderAllReduce(
                layout, exchange.num_leaves, exchange.layout.holders, exchange.rank
            )
            if dtype != like.dtype:
                raise self._elsewhere()
        # A rank that holds all rows reduces nothing: torch copies the gradients of each round to where they would be reduced.
        if math.prod(size) != self._numel or exchange.layout.degree == 1:
            return torch.empty(*size, dtype=dtype, device=device)
        assert self._sum is not None
        return self._sum.memory()[0]

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,  # torch's signature
    ) -> None:
        """Give each rank of the replica the rows that it holds, and receive this rank's rows."""
        del op, async_op
        self._require_all(output_tensor)
        rows = input_tensor.view(self._exchange.layout.degree, -1)
        if not self._exchange.counts:
            rows.zero_()
        self._got = torch.empty_like(rows)
        dist.all_to_all_single(self._got, rows, group=group)

    def hook(self, output: Tensor) -> None:
        """Add what came; torch makes the parameters' gradients of *output*, in which the total lies after `finish`."""
        exchange, got = self._exchange, self._got
        if got is None:
            self._require_all(output)
            got = output.view(1, -1)
            if not exchange.counts:
                got.zero_()
        assert self._sum is not None
        self._got = None
        _keep_for_this_stream(got)
        for place, leaf in enumerate(exchange.leaves):
            self._sum.push(leaf, [got[place]])
        self.calls += 1
        if exchange.is_last and self._is_offloaded:
            (total,) = self._sum.total()
            if total.data_ptr() != output.data_ptr():
                output.copy_(total)
            _keep_for_this_stream(output)
            self._sum.release()
        elif exchange.is_last:
            self._output = output
            self._sum.send_rest()
        elif exchange.layout.degree > 1:
            self._sum.leave(got)

    def finish(self) -> None:
        """Have the total in the parameters' gradients."""
        if self._is_offloaded:
            return
        assert self._sum is not None
        assert self._output is not None
        (total,) = self._sum.total()
        memory = self._output.untyped_storage().data_ptr()
        if total.untyped_storage().data_ptr() != memory:
            self._output.copy_(total)
        for parameter in self._parameters:
            if parameter.grad is None or local_of(parameter.grad).untyped_storage().data_ptr() != memory:
                raise self._elsewhere()
        self._output = None
        # The gradients alone hold the memory now: it is free once they are, and the next forward does without.
        self._sum.release()

    def _require_all(self, reduced: Tensor) -> None:
        if reduced.numel() != self._numel:
            raise StateError(
                f"a trained parameter of {self.name} takes no part in the loss of a virtual shard",
                "freeze parameters that no loss depends on, requires_grad_(False); a sharded model uses all others in each forward",
            )

    def _elsewhere(self) -> StateError:
        return StateError(
            f"torch keeps the gradients of {self.name} elsewhere than it reduces them",
            "leave mixed-precision policies out of fully_shard",
        )


def _keep_for_this_stream(tensor: Tensor) -> None:
    """Keep the memory of *tensor*, which another stream has made, until the current stream is through with its work so far."""
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that the call of `fully_shard` on *module* took: those of no module below that was sharded before."""
    below = {id(p) for inner in sharded_modules(module) if inner is not module for p in inner.parameters()}
    return {name: p for name, p in module.named_parameters() if id(p) not in below}
