"""A trainer in the manner of minGPT's: settings in data classes, a loss over a test set after each epoch."""

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from small import GPT, Letters
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import elasticflow as ef


@dataclass
class TrainerConfig:
    """How it is trained."""

    max_epochs: int
    batch_size: int = 16
    data_loader_workers: int = 1
    grad_norm_clip: float = 1.0
    learning_rate: float = 3e-3
    pause: float = 0.0


class Trainer:
    """Trains on one set, and measures on another."""

    def __init__(self, config: TrainerConfig, model: GPT, train_set: Any, test_set: Any) -> None:
        self.config, self.rank = config, int(os.environ.get("RANK", "0"))
        self.model, self.optimizer = model, model.configure_optimizers(config.learning_rate)
        self.train_set = train_set
        self.test_loader = self._loader(test_set)
        run.keep(model=model, optimizer=self.optimizer)

    def _loader(self, dataset: Dataset[Any]) -> Any:
        workers, sampler = self.config.data_loader_workers, DistributedSampler[Any](dataset)
        return DataLoader(dataset, self.config.batch_size, sampler=sampler, num_workers=workers)

    def _run_batch(self, batch: ef.Batch) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = run.gradients(lambda part: self.model(part.inputs, part.targets)[1], batch)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.optimizer.step()
        time.sleep(self.config.pause)
        return loss

    @torch.no_grad()
    def _evaluate(self, epoch: int) -> None:
        self.model.eval()
        losses = [self.model(source, targets)[1] for source, targets in self.test_loader]
        self.model.train()
        print(f"[rank {self.rank}] epoch {epoch} | test loss {sum(losses) / len(losses):.4f}", flush=True)

    def train(self) -> None:
        """Train to the last epoch."""
        for epoch in run.epochs(self.config.max_epochs):
            for batch in run.batches(self.train_set, size=self.config.batch_size):
                run.step(loss=self._run_batch(batch))
            self._evaluate(epoch + 1)
        run.finish()


def main(config: TrainerConfig) -> None:
    """Train as one worker of torchrun's group."""
    train_set, test_set = Letters(range(9)), Letters(range(9, 10))
    trainer = Trainer(config, GPT(train_set.vocab_size), train_set, test_set)
    trainer.train()


if __name__ == "__main__":
    run = ef.join(seed=1234, virtual_shards=4)
    parser = argparse.ArgumentParser(description="Train a small GPT.")
    parser.add_argument("max_epochs", type=int)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    main(TrainerConfig(arguments.max_epochs, pause=arguments.pause))
