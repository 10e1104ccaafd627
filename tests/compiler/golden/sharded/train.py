"""Train the job `sharded`.

Made by elasticflow from tests/compiler/golden/sharded/job.toml (job digest a8e81d8d5f3520e5).
Make it again:          elasticflow plan tests/compiler/golden/sharded/job.toml -o DIR
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
from elasticflow.runtime.training.deferred_build import DeferredBuild
from elasticflow.runtime.training.shard_model import shard_model
from elasticflow.runtime.worker import program
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 0  # determines the order of samples and all random numbers
STEPS = 1000  # optimizer steps
GLOBAL_BATCH_SIZE = 32  # samples per step, the same at any world size
VALUES = {"vocab_size": "model.args.config.args.vocab_size"}  # attributes of the dataset that arguments need
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
PRECISION = "bf16"
CLIP_GRAD_NORM = 1.0
EMA = 0.999  # decay of the averaged weights at each step
SHARDING = elasticflow.Sharding(shard=4, wrap=("examples.gpt.gpt:Block",), reshard_after_forward=False)
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop", virtual_shards=8)
SNAPSHOTS = SnapshotSettings(uri="s3://bucket/gpt", every=("10 min", "1 epoch"), keep=Keep(last=3))


def build_dataset() -> Any:
    """Return the training data."""
    from examples.gpt.gpt import Sonnets

    random_streams.begin(SEED, "data")
    return Sonnets(split="train")


def build_model(dataset: OpenedDataset) -> nn.Module:
    """Return the model with its initial weights."""
    from examples.gpt.gpt import GPT, GPTConfig

    random_streams.begin(SEED, "model")
    return GPT(config=GPTConfig(vocab_size=dataset.values["vocab_size"]))


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of one micro-batch of (inputs, targets)."""
    from examples.gpt.gpt import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.002)


def build_average(model: nn.Module) -> AveragedModel:
    """Return the averaged model."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))  # type: ignore[no-untyped-call]


def train(
    run: Run, batches: Iterable[Batch], model: nn.Module, optimizer: Optimizer, average: AveragedModel
) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        run.worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        average.update_parameters(model)
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="sharded",
        digest="a8e81d8d5f3520e5",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        shard=SHARDING,
        compare_replicas="1000 steps",
        threads=1,
    )
    worker = run.worker
    dataset = open_dataset(worker, build_dataset, "train", values=VALUES)
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, num_workers=NUM_WORKERS)
    build = DeferredBuild(resumes=run.finds_snapshot())  # filled in block by block
    model = build.call(build_model, dataset)
    average = build.call(build_average, model)  # a sharded model cannot be copied
    shard_model(worker, model, SHARDING, build=build)
    shard_model(worker, average.module, SHARDING, build=build)
    optimizer = build_optimizer(model)
    run.keep(model=model, optimizer=optimizer, ema=average)  # restored here
    train(run, batches, model, optimizer, average)
    run.finish()


if __name__ == "__main__":
    program(main)
