"""A loop over a model that its workers share: `fully_shard` of torch (FSDP2), resumed at any number of workers.

    torchrun --nproc-per-node 2 train_sharded.py
    elasticflow run sharded.toml

Each worker holds some rows of every parameter, of its gradient and of the optimizer's state; each block is gathered for as long
as it computes. A snapshot holds every row once, and another number of workers reads only the rows that it needs.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import elasticflow as ef


class Block(nn.Module):
    """A layer whose input is added to its output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, width) for (B, width)."""
        return x + self.layers(x)


class Net(nn.Module):
    """Some blocks between two layers."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, width), nn.Linear(width, 2)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, points: Tensor) -> Tensor:
        """Return scores (B, 2) of points (B, 2)."""
        x = self.first(points)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def circles(samples: int = 2048) -> TensorDataset:
    """Return points of a square, and whether each lies within the unit circle."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.square().sum(1) < 1).long())


def main() -> None:
    """Train as one of any number of workers."""
    parser = argparse.ArgumentParser(description="Train on points of a circle.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--replicas", type=int, default=1, help="copies of the model; the workers of one share it"
    )
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()

    run = ef.join(seed=1234)
    shape = options.replicas, run.world_size // options.replicas
    mesh = init_device_mesh(run.device.type, shape, mesh_dim_names=("replicate", "shard"))
    model = Net().to(run.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # of this worker's rows
    run.keep(model=model, optimizer=optimizer)

    for batch in run.batches(circles(), size=64, epochs=options.epochs):
        loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        (loss * batch.share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        time.sleep(options.pause)
        if run.position.is_epoch_end and run.rank == 0:
            print(f"epoch {run.position.epoch}: loss {loss.item():.4f}", flush=True)
    run.finish()


if __name__ == "__main__":
    main()
