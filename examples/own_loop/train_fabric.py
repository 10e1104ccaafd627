"""A loop of Lightning Fabric's that continues in the midst of an epoch, at any number of workers.

    python train_fabric.py
    elasticflow run fabric.toml

Fabric takes torchrun's process group as it is, and is told how many workers there are. Its own launcher, loader and checkpoints
are not needed.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import TensorDataset

import elasticflow as ef


def circles(samples: int = 2048) -> TensorDataset:
    """Return points of a square, and whether each lies within the unit circle."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.square().sum(1) < 1).long())


def main() -> None:
    """Train as one of any number of workers."""
    parser = argparse.ArgumentParser(description="Train on points of a circle.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()

    run = ef.join(seed=1234)  # first: Fabric takes the process group that is there
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(accelerator=run.device.type, devices=workers, num_nodes=run.world_size // workers)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 32, gamma=0.5)
    fabric.launch()
    fabric_model, fabric_optimizer = fabric.setup(model, optimizer)
    run.keep(model=fabric_model, optimizer=fabric_optimizer, scheduler=scheduler)

    for batch in run.batches(circles(), size=64, epochs=options.epochs):
        loss = nn.functional.cross_entropy(fabric_model(batch.inputs), batch.targets)
        fabric.backward(loss * batch.share)
        fabric.clip_gradients(fabric_model, fabric_optimizer, max_norm=1.0)
        fabric_optimizer.step()
        scheduler.step()
        fabric_optimizer.zero_grad()
        run.step(loss=loss)
        time.sleep(options.pause)
        if run.position.is_epoch_end:
            fabric.print(f"epoch {run.position.epoch}: loss {loss.item():.4f}", flush=True)
    run.finish()


if __name__ == "__main__":
    main()
