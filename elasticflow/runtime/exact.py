"""Gradients of the global batch that are the same bit for bit at every world size (floor R).

The batch is cut into a fixed number of virtual shards. Every shard is one forward and backward on its own, from the
same buffers and under its own seed, whichever rank does it; what the shards give is added up in the order of one
fixed binary tree. A rank adds the subtrees it holds, all_to_all and all_gather move bytes and add nothing, and the
owner of a slice adds the rest. A library's reduction would add in an order that depends on the world size, its
buckets and its algorithm.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elasticflow import StopTraining
from elasticflow.errors import StateError
from elasticflow.runtime import buffers, stopping, treesum
from elasticflow.runtime.exchange import Exchange
from elasticflow.runtime.flat import Flat, Layout
from elasticflow.runtime.loss import NonFinite, parse_loss
from elasticflow.runtime.order import split
from elasticflow.runtime.replicas import AUTOCAST
from elasticflow.runtime.shards import Additions, ShardBuffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.amp import GradScaler

    from elasticflow.runtime.data import Batch
    from elasticflow.runtime.member import Worker

# Numbers that travel with the gradients: weighted loss, samples counted by the user's step, shards that had samples,
# changed buffers, generators drawn from, and the wishes of `vote`.
_LOSS, _COUNT, _SHARDS, _BUFFERS, _DRAWN, _WISHES = range(6)

_EMPTY = (None, 0), 0  # a virtual shard without samples


class FixedOrder:
    """A model with one replica per rank whose steps have the same bits at every world size.

    Float statistics of BatchNorm become the mean of the shards'; every other buffer is what the first shard made it.

    Args:
        me: This worker.
        model: On its device; every rank has rank 0's weights afterwards.
        training_step: Called with the bare model and a shard's samples; returns the mean loss, or (sum of losses,
            count), or a mapping with `loss`.
        precision: fp32, bf16 or fp16 (autocast).
        on_nonfinite: What a loss that is not finite does: "stop", or "skip" the step.
        virtual_shards: At least the world size; part of the trajectory.
        scaler: For fp16.

    Raises:
        StateError: there are more workers than shards.
    """

    def __init__(
        self,
        me: Worker,
        model: nn.Module,
        training_step: Callable[[nn.Module, Any], Any],
        *,
        precision: str,
        on_nonfinite: str,
        virtual_shards: int,
        scaler: GradScaler | None = None,
    ) -> None:
        if me.world_size > virtual_shards:
            raise StateError(
                f"{me.world_size} workers cannot share {virtual_shards} virtual shards",
                "start fewer workers; a new run may set train.virtual_shards higher",
            )
        be_deterministic()
        self._me, self._model, self._step, self._scaler = me, model, training_step, scaler
        self._autocast = me.autocast_dtype = AUTOCAST.get(precision)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._shards = virtual_shards
        self._low, self._high = split(virtual_shards, me.world_size, me.rank)
        self._nonfinite = NonFinite(me, on_nonfinite, self._parameters, scaler)
        if me.world_size > 1:
            buffers.send(me, [t.detach() for t in (*model.parameters(), *model.buffers())])
        self._watch = buffers.Watch(me, model)
        self._send_buffers = False
        self._buffers = ShardBuffers(model)
        numbers = torch.zeros(_WISHES + len(me.vote.wishes()), device=me.device)
        content = [numbers, *self._buffers.carried(), *self._parameters]
        self._layout = Layout(content, me.world_size)
        self._gradients_from = len(content) - len(self._parameters)
        self._adds_once: bool | None = None  # known after the first shard
        self._spare: list[Flat] = []
        self._sum = self._layout.new()
        self._exchange = Exchange(self._layout, virtual_shards, me.world_size, me.rank)

    def gradients(self, batch: Batch) -> float:
        """Leave the global batch's gradients in the parameters; return its mean loss. Collective: every rank.

        Where `me.stopped` is set afterwards, they are not the batch's, and the step is not to be applied.

        Raises:
            NonFiniteLossError: on every rank, if the loss is not finite and on_nonfinite is "stop".
            StateError: an operation has no deterministic form here; named.
        """
        me = self._me
        if self._send_buffers:
            self._watch.make_equal()
        me.generators.look()
        self._buffers.begin()
        tree: treesum.TreeSum[Flat] = treesum.TreeSum(self._shards, self._add)
        pieces = zip(stopping.micro_batches(batch, me.vote), batch.model_keys, strict=True)
        for shard in range(self._low, self._high):
            level, place, flat = self._where(tree, shard)
            piece = next(pieces, None)
            (data, count), key = piece or _EMPTY  # a last, small batch has none for the last shards
            if count:
                me.generators.seed_model(key)
                self._run_shard(flat, shard, data, count, batch.samples)
            elif shard == 0:
                self._buffers.carry_nothing()
            if shard == self._high - 1:
                self._vote(flat)
            tree.push(level, place, flat)
        self._exchange.total(tree.nodes, self._sum)
        self._spare += [node.value for node in tree.nodes]
        return self._outcome(batch.end.step)

    def _where(self, tree: treesum.TreeSum[Flat], shard: int) -> tuple[int, int, Flat]:
        """Return where what a shard gives is added: noughts, or at once what its sibling gave, which is the same sum."""
        if self._adds_once and shard % 2 and tree.nodes and tree.nodes[-1][:2] == (0, shard - 1):
            return 1, shard // 2, tree.nodes.pop().value
        return 0, shard, self._leaf()

    def _run_shard(self, flat: Flat, shard: int, data: Any, count: int, total: int) -> None:
        """Add what a shard gives to *flat*; nothing that counts once this rank's code wants training to end."""
        if self._me.vote.stop_wanted is not None:
            return
        self._buffers.restore()
        for parameter, view in zip(self._parameters, flat.views[self._gradients_from :], strict=True):
            parameter.grad = view
        counts = Additions(self._parameters) if self._adds_once is None else None
        try:
            if self._autocast is None:
                found = self._step(self._model, data)
            else:
                with torch.autocast(self._me.device.type, dtype=self._autocast):
                    found = self._step(self._model, data)
            loss, samples = parse_loss(found)
            weight = count / total if samples is None else 1.0
            numbers = flat.views[0]
            numbers[_LOSS] += loss.detach() * weight
            numbers[_COUNT] += samples or 0.0
            numbers[_SHARDS] += 1.0
            if weight != 1.0:
                loss = loss * weight
            torch.autograd.backward(loss if self._scaler is None else self._scaler.scale(loss))
        except StopTraining as stop:
            stopping.want(self._me.vote, stop)
            return
        except RuntimeError as error:
            raise _named(error) from error
        if counts is not None:
            self._adds_once = counts.were_single()
        self._buffers.carry(flat.views[1 : self._gradients_from], is_first=shard == 0)

    def _vote(self, flat: Flat) -> None:
        me = self._me
        wishes = (self._watch.are_any and self._watch.have_changed(), me.generators.look(), *me.vote.wishes())
        flat.views[0][_BUFFERS:] += torch.tensor(wishes, dtype=torch.float32)

    def _leaf(self) -> Flat:
        if not self._spare:
            return self._layout.new()
        leaf = self._spare.pop()
        leaf.clear()
        return leaf

    def _add(self, left: Flat, right: Flat) -> Flat:
        left.add(right)
        self._spare.append(right)
        return left

    def _outcome(self, number: int) -> float:
        me, views = self._me, self._sum.views
        found = views[0].tolist()  # waits for the device
        me.vote.settle(*found[_WISHES:])
        if me.vote.stop:
            self._buffers.restore()
            me.agree_to_stop()
            return math.nan
        self._send_buffers = found[_BUFFERS] > 0
        me.generators.are_used |= found[_DRAWN] > 0
        self._buffers.end(views[1 : self._gradients_from], found[_SHARDS])
        for parameter, view in zip(self._parameters, views[self._gradients_from :], strict=True):
            parameter.grad = view
        loss = float(found[_LOSS])
        if found[_COUNT] > 0:
            loss /= found[_COUNT]
            torch._foreach_div_(views[self._gradients_from :], found[_COUNT])
        me.skipped_step = not math.isfinite(loss)
        if me.skipped_step:
            self._nonfinite.refuse(number, loss)
        return loss


def be_deterministic() -> None:
    """Have torch refuse, for this process, every operation whose result may differ from run to run."""
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    # Else every new tensor is filled first, in case somebody reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def _named(error: RuntimeError) -> Exception:
    text = str(error)
    if "deterministic" not in text:
        return error
    operation = text.split(" ", 1)[0]
    return StateError(
        f'train.consistency = "exact" cannot use {operation}: it may give other bits each time',
        'use another operation, or consistency = "batch"',
    )
