"""Train the job `gpu`.

Made by elasticflow from tests/compiler/golden/gpu/job.toml (job digest 412fb7c4caddff27).
Make it again:          elasticflow plan tests/compiler/golden/gpu/job.toml -o DIR
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
from torch.amp import GradScaler
from torch.optim import Optimizer

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 20261120  # determines the order of samples and all random numbers
STEPS = 2000  # optimizer steps
GLOBAL_BATCH_SIZE = 4096  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 512  # most samples of one forward
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 4  # loader processes of each worker
PRECISION = "fp16"
GRADIENTS = elasticflow.Gradients(
    precision=PRECISION,
    on_nonfinite="stop",
    ddp={"sync_batchnorm": True, "bucket_cap_mb": 50, "gradient_as_bucket_view": True},
)
SNAPSHOTS = SnapshotSettings(
    uri="s3://bucket/gpu",
    every=("10 min",),
    keep=Keep(last=3),
    options={"client_kwargs": {"endpoint_url": "https://objects.example"}},
)


def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="train", root="s3://datasets/mnist")


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")
    return Net(width=64)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of one micro-batch of (inputs, targets)."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.001, fused=True)


def build_scheduler(optimizer: Optimizer) -> Any:
    """Return the learning-rate schedule."""
    from torch.optim.lr_scheduler import OneCycleLR

    random_streams.begin(SEED, "scheduler")
    return OneCycleLR(optimizer, max_lr=0.01, total_steps=2000)


def build_included() -> dict[str, Any]:
    """Return further objects whose state snapshots hold."""
    from tests.compiler.golden.pieces import curriculum

    return {"curriculum": curriculum}


def train(
    run: Run,
    batches: Iterable[Batch],
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: Any,
    scaler: GradScaler,
) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        run.worker.step_scheduler(scheduler, optimizer)
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="gpu",
        digest="412fb7c4caddff27",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
        log_every=10,
    )
    worker = run.worker
    dataset = open_dataset(worker, build_dataset, "train")
    batches = run.batches(
        dataset,
        size=GLOBAL_BATCH_SIZE,
        steps=STEPS,
        tail=TAIL,
        num_workers=NUM_WORKERS,
        micro_batch_size=MICRO_BATCH_SIZE,
    )
    model = build_model()
    model.to(run.device)
    model.compile()
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    scaler = GradScaler(worker.device.type)
    run.keep(
        model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, include=build_included()
    )  # restored here
    train(run, batches, model, optimizer, scheduler, scaler)
    run.finish()


if __name__ == "__main__":
    program(main)
