"""Hands the measurements of all ranks to rank 0, in the order of the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.process.context import Worker

_GONE = -1


def hand_over(worker: Worker, mine: memoryview | None, take: Callable[[int, memoryview], None]) -> bool:
    """Have rank 0 call *take* with every rank and its bytes, in the order of the ranks. Collective: every rank.

    Rank 0 holds its own bytes and those of one other rank at a time.

    Args:
        mine: This rank's bytes; empty: it has none in this round; None: it was cut short, and no rank continues.
        take: Called on rank 0 with the measurements.

    Returns:
        False if some rank was cut short: nothing was handed over.
    """
    if worker.world_size == 1:
        if mine is not None and len(mine):
            take(0, mine)
        return mine is not None
    sizes = torch.zeros(worker.world_size, dtype=torch.int64)
    sizes[worker.rank] = _GONE if mine is None else len(mine)
    dist.all_reduce(sizes)
    if mine is None or bool((sizes == _GONE).any()):
        return False
    if worker.rank != 0:
        if len(mine):
            dist.send(torch.frombuffer(mine, dtype=torch.uint8), 0)
        return True
    for rank, size in enumerate(sizes.tolist()):
        if rank == 0 and size:
            take(rank, mine)
        elif size:
            received = torch.empty(size, dtype=torch.uint8)
            dist.recv(received, rank)
            take(rank, received.numpy().data)
    return True
