"""Keeps the ranks of a loop together where they share a model: the next call of each is that of all the others.

A forward of a sharded model waits for other ranks. A rank that leaves the loop by itself, or leaves a forward out, would have them
wait for ever, or mix gradients of two steps. So all ranks exchange the kind of their next call before each forward and before all
that they do together, such as a step's end: an all-reduce of 32 bytes, beside the dozens of exchanges in a forward and a backward.

Ranks that call other blocks in a forward, such as a layer that is skipped at random, would mix the blocks' weights. In the first
forwards they compare each block; later a digest of the blocks that were called goes with the next call, before a step has ended.
"""

from __future__ import annotations

import zlib
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from elasticflow.errors import StateError
from elasticflow.runtime.process import process_group, torch_private
from elasticflow.runtime.process.sharded_tensors import sharded_modules

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

    from elasticflow.runtime.process.context import Worker


class Call(StrEnum):
    """A call that all ranks of a loop make together, in words for messages."""

    FORWARD = "calls the sharded model"
    GRADIENTS = "calls run.gradients"
    STEP = "calls run.step"
    LEAVE = "leaves its loop"
    BATCHES = "calls run.batches"
    EVALUATE = "calls run.evaluate"
    EPOCH = "ends an epoch"
    PASS = "ends its pass"  # noqa: S105  # no password
    RETURN = "calls no further block"
    GATHER = "gathers a parameter, as by full_tensor"
    FINISH = "calls run.finish"


_CALLS = list(Call)
_FIRST_BLOCK = 100  # behind the calls: the numbers of blocks
_COMPARED_FORWARDS = 16  # whose blocks are compared one by one: random draws that differ show soon
_SAME_BLOCKS = (
    "a forward calls the same blocks on every rank, whatever its data and its random draws are: draw what is skipped from a "
    "generator that has one seed on all ranks, or multiply a layer's output by 0"
)
_ON_EVERY_RANK = "gather parameters on every rank, and write them on one of them"
_EQUALLY_OFTEN = (
    "every rank calls the model equally often, and ends its loop after the same step: run.stop(reason), called by any rank, "
    "ends training on all, and a batch of share 0 is a batch, too"
)


class Lockstep:
    """Compares the next call of each rank. Every rank has one. Collective."""

    def __init__(self, worker: Worker, model: nn.Module) -> None:
        self._world_size, self._last, self._is_off = worker.world_size, Call.STEP, False
        self._owes_leave = False
        self._forwards = 0
        self._blocks = 0  # a digest of the blocks that were called since the last exchange
        # A group of its own: other collectives of the loop may wait for each other meanwhile.
        self._group = process_group.new_group(worker.identity)
        modules = sharded_modules(model)
        inner = {id(below) for module in modules for below in module.modules() if below is not module}
        # torch.compile cannot trace an exchange whose result decides about an error.
        hook = torch.compiler.disable(self._before_forward)  # type: ignore[no-untyped-call]
        for root in (module for module in modules if id(module) not in inner):
            root.register_forward_pre_hook(hook, prepend=True)
            root.register_forward_hook(torch.compiler.disable(self._after_forward))  # type: ignore[no-untyped-call]
        names = {id(module): name for name, module in model.named_modules()}
        self._names = [names[id(module)] or "the model" for module in modules]
        for number, module in enumerate(modules):
            if id(module) in inner:
                note = torch.compiler.disable(partial(self._before_block, number))  # type: ignore[no-untyped-call]
                module.register_forward_pre_hook(note, prepend=True)
        torch_private.before_gathers(self._before_gather)

    @classmethod
    def of(cls, worker: Worker, model: nn.Module) -> Lockstep | None:
        """Return what compares the calls; None where no rank shares *model* with another one. Collective: every rank."""
        return cls(worker, model) if worker.world_size > 1 and sharded_modules(model) else None

    def meet(self, call: Call, limit_s: float | None = None) -> None:
        """Make sure that all ranks are about to make the same call. A rank that has left its loop does not leave it again.

        Args:
            limit_s: Seconds to wait for the other ranks. None: as long as it takes.

        Raises:
            StateError: another rank is about to make another call; on every rank.
            RuntimeError: another rank has ended, or did not come in time.
        """
        if self._is_off:
            return
        if self._owes_leave:
            self._owes_leave = False
            self.meet(Call.LEAVE, limit_s)
        if call is Call.LEAVE and self._last is Call.LEAVE:
            return
        self._last = call
        self._compare(_CALLS.index(call), limit_s)

    def _compare(self, call: int, limit_s: float | None = None) -> None:
        blocks, self._blocks = self._blocks, 0
        ends = torch.tensor([call, -call, blocks, -blocks])
        work = dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait(*(() if limit_s is None else (timedelta(seconds=limit_s),)))
        most, least, most_blocks, least_blocks = ends.tolist()
        if most != -least:
            raise self._other_calls(call)
        if most_blocks != -least_blocks:
            raise StateError(
                "the ranks that share a model called other blocks of it in a forward", _SAME_BLOCKS
            )

    def note_left(self) -> None:
        """Have the next call be preceded by `LEAVE`: an exception may have closed the loop, and others wait for this rank's end then."""
        self._owes_leave = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Compare nothing within."""
        self._is_off = True
        try:
            yield
        finally:
            self._is_off = False

    def _before_gather(self, mesh: Any) -> None:
        # Where there are several replicas, the ranks of one may gather its parameters by themselves.
        if max(mesh.shape) == self._world_size:
            self.meet(Call.GATHER)

    def _before_forward(self, module: nn.Module, args: object) -> None:
        del module, args
        self.meet(Call.FORWARD)
        self._forwards += 1

    def _after_forward(self, *_: object) -> None:
        if not self._is_off and self._forwards <= _COMPARED_FORWARDS:
            self._compare(_CALLS.index(Call.RETURN))

    def _before_block(self, number: int, *_: object) -> None:
        if self._is_off:
            return
        if self._forwards <= _COMPARED_FORWARDS:
            self._compare(_FIRST_BLOCK + number)
        else:
            self._blocks = zlib.crc32(number.to_bytes(4), self._blocks)

    def _other_calls(self, call: int) -> StateError:
        calls = [torch.zeros(1, dtype=torch.int64) for _ in range(self._world_size)]
        dist.all_gather(calls, torch.tensor([call]), group=self._group)
        ranks: dict[int, list[int]] = {}
        for rank, other in enumerate(calls):
            ranks.setdefault(int(other), []).append(rank)
        told = ", and ".join(f"rank {of[0]}{_more(of[1:])} {self._does(each)}" for each, of in ranks.items())
        return StateError(f"the ranks that share a model do not make the same call: {told}", _remedy(ranks))

    def _does(self, call: int) -> str:
        return _CALLS[call] if call < _FIRST_BLOCK else f"calls {self._names[call - _FIRST_BLOCK]}"


def _remedy(calls: Collection[int]) -> str:
    if any(call >= _FIRST_BLOCK for call in calls):
        return _SAME_BLOCKS
    return _ON_EVERY_RANK if _CALLS.index(Call.GATHER) in calls else _EQUALLY_OFTEN


def _more(ranks: list[int]) -> str:
    return f" (as {', '.join(map(str, ranks))})" if ranks else ""
