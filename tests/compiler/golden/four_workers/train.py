"""Train the job `four-workers`.

Made by elasticflow from tests/compiler/golden/four_workers/job.toml (job digest 72dc8e747dec9115).
Make it again:          elasticflow plan tests/compiler/golden/four_workers/job.toml -o DIR
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
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.worker import program
from torch import Tensor, nn
from torch.optim import Optimizer

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 7  # determines the order of samples and all random numbers
EPOCHS = 10  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 8  # most samples of one forward
SAMPLES = 1438  # of the dataset, as the job file states
TAIL = "short"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 1  # loader processes of each worker
PRECISION = "fp32"
CLIP_GRAD_NORM = 1.0
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")
SNAPSHOTS = SnapshotSettings(
    uri=None,
    every=("20 steps", "1 epoch"),
    memory="1 step",
    keep=Keep(last=3, best=1, every="100 steps", within="2 h"),
    integrity="sha256",
    staging_limit="4 GiB",
)


def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="train")


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")
    return Net(width=16)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of one micro-batch of (inputs, targets)."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.003, weight_decay=0.01)


def build_scheduler(optimizer: Optimizer) -> Any:
    """Return the learning-rate schedule."""
    from torch.optim.lr_scheduler import CosineAnnealingLR

    random_streams.begin(SEED, "scheduler")
    return CosineAnnealingLR(optimizer, T_max=10)


def build_evaluation_dataset() -> Any:
    """Return the evaluation data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="test")


def build_metrics() -> dict[str, Any]:
    """Return the metrics by name."""
    from examples.mnist import accuracy

    return {"accuracy": accuracy}


def train(run: Run, batches: Iterable[Batch], model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        run.worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        if batch.end.is_epoch_end:
            run.worker.step_scheduler(scheduler, optimizer)
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="four-workers",
        digest="72dc8e747dec9115",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
        threads=1,
    )
    worker = run.worker
    dataset = open_dataset(worker, build_dataset, "train", samples=SAMPLES)
    batches = run.batches(
        dataset,
        size=GLOBAL_BATCH_SIZE,
        epochs=EPOCHS,
        tail=TAIL,
        num_workers=NUM_WORKERS,
        micro_batch_size=MICRO_BATCH_SIZE,
    )
    model = build_model()
    model.to(run.device)
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    test_set = open_dataset(worker, build_evaluation_dataset, "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        training_step,
        test_set,
        run.schedule,
        precision=PRECISION,
        every=("1 epoch",),
        metrics=build_metrics(),
        best="max accuracy",
        best_of="examples.mnist:accuracy",
        batch_size=8,
    )
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation)  # restored here
    train(run, batches, model, optimizer, scheduler)
    run.finish()


if __name__ == "__main__":
    program(main)
