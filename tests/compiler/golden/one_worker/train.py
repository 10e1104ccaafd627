"""Train the job `one-worker`.

Made by elasticflow from tests/compiler/golden/one_worker/job.toml (job digest ae3832a7b5108ef2).
Make it again:          elasticflow plan tests/compiler/golden/one_worker/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import elasticflow
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.runtime.data.index_loader import open_dataset
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.join import join_job
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.worker import program
from torch import Tensor, nn
from torch.optim import Optimizer

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 0  # determines the order of samples and all random numbers
STEPS = 200  # optimizer steps
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
PRECISION = "fp32"
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")
SNAPSHOTS = SnapshotSettings(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="train")


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")
    return Net()


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of one micro-batch of (inputs, targets)."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer."""
    from torch.optim import SGD

    random_streams.begin(SEED, "optimizer")
    return SGD(model.parameters(), lr=0.1)


def train(run: Run, batches: Iterable[Batch], model: nn.Module, optimizer: Optimizer) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        optimizer.step()
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="one-worker",
        digest="ae3832a7b5108ef2",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
    )
    worker = run.worker
    dataset = open_dataset(worker, build_dataset, "train")
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, num_workers=NUM_WORKERS)
    model = build_model()
    model.to(run.device)
    optimizer = build_optimizer(model)
    run.keep(model=model, optimizer=optimizer)  # restored here
    train(run, batches, model, optimizer)
    run.finish()


if __name__ == "__main__":
    program(main)
