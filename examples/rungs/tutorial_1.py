"""The trainer class that tutorials of DistributedDataParallel teach: everything in its methods, epoch by epoch."""

import argparse
import time
from typing import Any

import torch
from small import cross_entropy, load_train_objs
from torch import Tensor, nn

import elasticflow as ef


class Trainer:
    """Trains a model, epoch by epoch."""

    def __init__(
        self, model: nn.Module, dataset: Any, optimizer: torch.optim.Optimizer, batch_size: int, pause: float
    ) -> None:
        self.model, self.dataset, self.optimizer = model, dataset, optimizer
        self.batch_size = batch_size
        self.pause = pause
        run.keep(model=model, optimizer=optimizer)
        self.replicas = run.wrap(model)

    def _run_batch(self, source: Tensor, targets: Tensor, share: float) -> Tensor:
        self.optimizer.zero_grad()
        loss = cross_entropy(self.replicas(source), targets)
        (loss * share).backward()
        self.optimizer.step()
        time.sleep(self.pause)
        return loss

    def train(self, max_epochs: int) -> None:
        """Train to the end of epoch number *max_epochs*."""
        for batch in run.batches(self.dataset, size=self.batch_size, epochs=max_epochs):
            run.step(loss=self._run_batch(batch.inputs, batch.targets, batch.share))
        run.finish()


def main(total_epochs: int, batch_size: int, pause: float) -> None:
    """Train as one worker of torchrun's group."""
    dataset, model, optimizer = load_train_objs()
    trainer = Trainer(model, dataset, optimizer, batch_size, pause)
    trainer.train(total_epochs)


if __name__ == "__main__":
    run = ef.join(seed=1234)
    parser = argparse.ArgumentParser(description="A simple distributed training job.")
    parser.add_argument("total_epochs", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    arguments = parser.parse_args()
    main(arguments.total_epochs, arguments.batch_size, arguments.pause)
