"""A training script for torchrun that knows nothing of elasticflow: DistributedDataParallel, a checkpoint of its own."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def circles(samples: int = 2048) -> TensorDataset:
    """Return points of a square, and whether each lies within the unit circle."""
    points = torch.rand(samples, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return TensorDataset(points, (points.square().sum(1) < 1).long())


class Trainer:
    """Trains epoch by epoch; each rank reads the checkpoint, and rank 0 writes it."""

    def __init__(self, checkpoint: Path, pause: float) -> None:
        self.rank = dist.get_rank()
        self.checkpoint, self.pause = checkpoint, pause
        model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        self.epoch = 0
        if checkpoint.exists():
            self._load(model)
        self.model = DistributedDataParallel(model)
        data = circles()
        self.sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, batch_size=64, sampler=self.sampler)

    def train(self, epochs: int) -> None:
        """Train to the end of epoch number *epochs*."""
        while self.epoch < epochs:
            self.sampler.set_epoch(self.epoch)
            loss = torch.zeros(())
            for points, labels in self.loader:
                loss = nn.functional.cross_entropy(self.model(points), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epoch += 1
            time.sleep(self.pause)  # an epoch of real data takes longer
            if self.rank == 0:
                print(f"epoch {self.epoch}: loss {loss.item():.4f}", flush=True)
                self._save()

    def _save(self) -> None:
        """Write the checkpoint beside the old one first: a crash must not leave half of it."""
        state = {
            "epoch": self.epoch,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        new = self.checkpoint.with_suffix(".new")
        torch.save(state, new)
        new.replace(self.checkpoint)

    def _load(self, model: nn.Module) -> None:
        state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch = state["epoch"]
        if self.rank == 0:
            print(f"resuming after epoch {self.epoch}", flush=True)


def main() -> None:
    """Read the arguments, train, and leave."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each epoch")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(arguments.checkpoint, arguments.pause).train(arguments.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
