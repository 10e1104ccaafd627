"""The trainer class that tutorials of DistributedDataParallel teach: everything in its methods, epoch by epoch."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from small import cross_entropy, load_train_objs
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    """Trains a model, epoch by epoch."""

    def __init__(
        self, model: nn.Module, dataset: Any, optimizer: torch.optim.Optimizer, batch_size: int, pause: float
    ) -> None:
        self.rank = int(os.environ["RANK"])
        self.model, self.dataset, self.optimizer = model, dataset, optimizer
        self.batch_size = batch_size
        self.train_data: Any = DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset))
        self.pause = pause
        self.epochs_run, self.snapshot_path = 0, Path("tutorial.pt")
        if self.snapshot_path.exists():
            self._load_snapshot()
        self.replicas = DistributedDataParallel(model)

    def _load_snapshot(self) -> None:
        snapshot = torch.load(self.snapshot_path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["epochs_run"]
        print(f"resuming after epoch {self.epochs_run}", flush=True)

    def _save_snapshot(self, epoch: int) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "epochs_run": epoch}, self.snapshot_path.with_suffix(".new"))
        self.snapshot_path.with_suffix(".new").replace(self.snapshot_path)

    def _run_batch(self, source: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.replicas(source), targets)
        loss.backward()
        self.optimizer.step()
        time.sleep(self.pause)
        return loss

    def _run_epoch(self, epoch: int) -> None:
        self.train_data.sampler.set_epoch(epoch)
        for source, targets in self.train_data:
            self._run_batch(source, targets)

    def train(self, max_epochs: int) -> None:
        """Train to the end of epoch number *max_epochs*."""
        for epoch in range(self.epochs_run, max_epochs):
            self._run_epoch(epoch)
            if self.rank == 0:
                self._save_snapshot(epoch + 1)
                print(f"epoch {epoch + 1} is done", flush=True)


def main(total_epochs: int, batch_size: int, pause: float) -> None:
    """Train as one worker of torchrun's group."""
    init_process_group("gloo")
    dataset, model, optimizer = load_train_objs()
    trainer = Trainer(model, dataset, optimizer, batch_size, pause)
    trainer.train(total_epochs)
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A simple distributed training job.")
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    main(arguments.total_epochs, arguments.batch_size, arguments.pause)
