"""Train the job `transformer`.

Made by elasticflow from tests/compiler/golden/transformer/job.toml (job digest 985ff768f7f446f7).
Make it again:          elasticflow plan tests/compiler/golden/transformer/job.toml -o DIR
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
from elasticflow.runtime.data.dataset import OpenedDataset
from elasticflow.runtime.data.index_loader import open_dataset
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.join import join_job
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.training.param_groups import Group, log_groups, parameter_groups
from elasticflow.runtime.training.unwrap import unwrap_model
from elasticflow.runtime.worker import program
from torch import nn
from torch.optim import Optimizer

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 0  # determines the order of samples and all random numbers
STEPS = 1000  # optimizer steps
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
VALUES = {"width": "model.args.config.args.n_embd"}  # attributes of the dataset that arguments need
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
PRECISION = "fp32"
CLIP_GRAD_NORM = 1.0
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")
SNAPSHOTS = SnapshotSettings(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


def build_dataset() -> Any:
    """Return the training data."""
    from tests.compiler.golden.pieces import sentences

    random_streams.begin(SEED, "data")
    return sentences(block_size=32)


def build_model(dataset: OpenedDataset) -> nn.Module:
    """Return the model with its initial weights."""
    from tests.compiler.golden.pieces import GPT, GPTConfig

    random_streams.begin(SEED, "model")
    return GPT(config=GPTConfig(n_layer=4, n_embd=dataset.values["width"]))


def training_step(model: nn.Module, batch: Any) -> Any:
    """Return the loss of one micro-batch, computed by the job's own step."""
    from tests.compiler.golden.pieces import GPT

    return unwrap_model(model, GPT).training_step(batch)


def build_parameter_groups() -> list[Group]:
    """Return the groups of parameters that have options of their own."""
    from torch.nn import Embedding

    return [
        Group(module=Embedding, args={"lr": 6e-05, "weight_decay": 0.0}),
        Group(match=["*.bias", "*norm*"], ndim=[0, 1], args={"weight_decay": 0.0}, name="no decay"),
    ]


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(parameter_groups(model, build_parameter_groups()), lr=0.0006, weight_decay=0.1)


def build_scheduler(optimizer: Optimizer) -> Any:
    """Return the learning-rate schedule."""
    from elasticflow.schedules import warmup_cosine

    random_streams.begin(SEED, "scheduler")
    return warmup_cosine(optimizer, warmup=100, total=1000, final=0.1)


def train(run: Run, batches: Iterable[Batch], model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        run.worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        run.worker.step_scheduler(scheduler, optimizer)
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="transformer",
        digest="985ff768f7f446f7",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
    )
    worker = run.worker
    dataset = open_dataset(worker, build_dataset, "train", values=VALUES)
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, num_workers=NUM_WORKERS)
    model = build_model(dataset)
    model.to(run.device)
    optimizer = build_optimizer(model)
    log_groups(worker, optimizer, build_parameter_groups())
    scheduler = build_scheduler(optimizer)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # restored here
    train(run, batches, model, optimizer, scheduler)
    run.finish()


if __name__ == "__main__":
    program(main)
