"""A loop of Accelerate's that continues in the midst of an epoch, at any number of workers.

    python train_accelerate.py
    accelerate launch train_accelerate.py
    elasticflow run accelerate.toml

What Accelerate does stays Accelerate's: devices, mixed precision, DistributedDataParallel, clipping, accumulation. Its loader is
not prepared, because the batches come from `run.batches`; nor is the schedule, which Accelerate would step once per process.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticflow as ef


def circles(samples: int = 2048) -> TensorDataset:
    """Return points of a square, and whether each lies within the unit circle."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.square().sum(1) < 1).long())


def accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return which part of the points is told right."""
    return (outputs.argmax(1) == labels).float().mean()


def main() -> None:
    """Train as one of any number of workers."""
    parser = argparse.ArgumentParser(description="Train on points of a circle.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()

    run = ef.join(seed=1234)  # first: Accelerate takes the process group that is there
    accelerator = Accelerator(cpu=run.device.type == "cpu")
    model: nn.Module = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 32, gamma=0.5)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)

    for batch in run.batches(circles(), size=64, epochs=options.epochs):
        with accelerator.autocast():
            loss = nn.functional.cross_entropy(model(batch.inputs), batch.targets)
        accelerator.backward(loss * batch.share)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss=loss)
        time.sleep(options.pause)
        if run.position.is_epoch_end:
            measured = run.evaluate(
                circles(512), metrics={"accuracy": accuracy}, loss=nn.functional.cross_entropy
            )
            accelerator.print(f"epoch {run.position.epoch}: accuracy {measured['accuracy']:.4f}", flush=True)
    run.finish()


if __name__ == "__main__":
    main()
