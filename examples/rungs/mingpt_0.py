"""A trainer in the manner of minGPT's: settings in data classes, a loss over a test set after each epoch."""

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from small import GPT, Letters
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class TrainerConfig:
    """How it is trained."""

    max_epochs: int
    batch_size: int = 16
    data_loader_workers: int = 1
    grad_norm_clip: float = 1.0
    learning_rate: float = 3e-3
    snapshot_path: Path = Path("mingpt.pt")
    pause: float = 0.0


class Trainer:
    """Trains on one set, and measures on another."""

    def __init__(self, config: TrainerConfig, model: GPT, train_set: Any, test_set: Any) -> None:
        self.config, self.rank = config, int(os.environ.get("RANK", "0"))
        self.epochs_run = 0
        self.model, self.optimizer = model, model.configure_optimizers(config.learning_rate)
        self.train_set = train_set
        self.train_loader = self._loader(train_set)
        self.test_loader = self._loader(test_set)
        self._load_snapshot()
        self.replicas: nn.Module = DistributedDataParallel(model)

    def _loader(self, dataset: Dataset[Any]) -> Any:
        workers, sampler = self.config.data_loader_workers, DistributedSampler[Any](dataset)
        return DataLoader(dataset, self.config.batch_size, sampler=sampler, num_workers=workers)

    def _load_snapshot(self) -> None:
        try:
            snapshot = torch.load(self.config.snapshot_path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            print("no snapshot: training from the beginning", flush=True)
            return
        self.model.load_state_dict(snapshot["model"])
        self.optimizer.load_state_dict(snapshot["optimizer"])
        self.epochs_run = snapshot["finished_epoch"]
        print(f"resuming after epoch {self.epochs_run}", flush=True)

    def _save_snapshot(self, epoch: int) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "finished_epoch": epoch}, self.config.snapshot_path.with_suffix(".new"))
        self.config.snapshot_path.with_suffix(".new").replace(self.config.snapshot_path)

    def _run_batch(self, source: Tensor, targets: Tensor) -> Tensor:
        _, loss = self.replicas(source, targets)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.optimizer.step()
        time.sleep(self.config.pause)
        return loss

    def _run_epoch(self, epoch: int) -> None:
        self.train_loader.sampler.set_epoch(epoch)
        for iteration, (source, targets) in enumerate(self.train_loader):
            loss = self._run_batch(source, targets)
            if iteration % 10 == 0:
                print(f"[rank {self.rank}] epoch {epoch} | step {iteration} | loss {loss:.4f}", flush=True)

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        self.model.eval()
        losses = [self.model(source, targets)[1] for source, targets in self.test_loader]
        self.model.train()
        print(f"[rank {self.rank}] epoch {epoch} | test loss {sum(losses) / len(losses):.4f}", flush=True)

    def train(self) -> None:
        """Train to the last epoch."""
        for epoch in range(self.epochs_run, self.config.max_epochs):
            self._run_epoch(epoch + 1)
            if self.rank == 0:
                self._save_snapshot(epoch + 1)
            self._evaluate(epoch + 1)


def main(config: TrainerConfig) -> None:
    """Train as one worker of torchrun's group."""
    init_process_group("gloo")
    train_set, test_set = Letters(range(9)), Letters(range(9, 10))
    trainer = Trainer(config, GPT(train_set.vocab_size), train_set, test_set)
    trainer.train()
    destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    parser.add_argument("max_epochs", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    main(TrainerConfig(arguments.max_epochs, pause=arguments.pause))
