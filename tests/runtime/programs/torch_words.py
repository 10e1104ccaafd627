"""One of two ranks: `torch_words.py RANK FILE CASE`; prints what torch makes of the case, as text."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from elasticflow.runtime.process.torch_private import broadcast_coalesced, loader_processes_of

RANK, CASE = int(sys.argv[1]), sys.argv[3]


class Net(nn.Module):
    """Leaves a layer out, or uses one in two checkpoints that run backward piecemeal."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.left_out = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return something of the shape of *x*."""
        if CASE == "no gradient":
            return self.used(x)  # type: ignore[no-any-return]
        x = self.left_out(x)
        for _ in range(2):
            x = checkpoint(self.used, x, use_reentrant=True)
        return x


def outcome() -> object:
    """Return what this rank gets, or the message of what it is met with."""
    group = dist.group.WORLD
    assert group is not None
    match CASE:
        case "broadcast":
            tensors = [
                torch.full((3,), float(RANK + 1)),
                torch.full((2,), RANK + 5),
                torch.full((3,), RANK * 1.0),
            ]
            broadcast_coalesced(group, tensors, 16)
            return [tensor.tolist() for tensor in tensors]
        case "other sizes":
            dist.all_reduce(torch.ones(10 + 1000 * RANK))
        case "peer lost":
            dist.barrier()  # else rank 0 may lose its peer while it still connects
            if RANK == 1:
                os._exit(0)
            dist.all_reduce(torch.ones(10))
        case "no gradient":
            model = DistributedDataParallel(Net(), find_unused_parameters=True)
            for _ in range(2):
                x = torch.ones(1, 2, requires_grad=True)
                # A penalty on a gradient has none for the last bias.
                (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
                torch.autograd.backward(slope.square().sum())
        case "loader killed":
            batches: Any = iter(DataLoader([1], num_workers=1))  # type: ignore[arg-type]
            loader_processes_of(batches)[0].kill()
            list(batches)
        case _:
            model = DistributedDataParallel(Net())
            for _ in range(2):
                model(torch.ones(1, 2)).sum().backward()
    return "nothing"


dist.init_process_group(
    "gloo", init_method=f"file://{sys.argv[2]}", rank=RANK, world_size=2, timeout=timedelta(seconds=30)
)
try:
    print(json.dumps(outcome()), flush=True)
except RuntimeError as error:
    print(json.dumps(str(error.__cause__ or error)), flush=True)
os._exit(0)  # a group that failed may wait for ever in its destructor
