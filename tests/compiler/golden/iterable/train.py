"""Train the job `iterable`.

Made by elasticflow from tests/compiler/golden/iterable/job.toml (job digest 32d2d99d83d6aa47).
Make it again:          elasticflow compile tests/compiler/golden/iterable/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime import worker
from elasticflow.runtime.data import shard_loader, shard_schedule
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import exact
from torch import Tensor, nn
from torch.optim import Optimizer

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

# --- values -----------------------------------------------------------------------------------------------

JOB = "iterable"
JOB_DIGEST = "32d2d99d83d6aa47"
SEED = 0
EPOCHS = 5  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = None  # most samples of one forward; None: all of the worker's
SHARDS = 16  # of the data; each is read in order, by one worker at a time
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 2  # loader processes of each worker
THREADS = 1  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"
ON_NONFINITE = "stop"  # what a loss that is not finite does
VIRTUAL_SHARDS = 8  # of each batch, added up in a fixed order
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
LOG_LEVEL = "info"
SNAPSHOTS = Policy(uri="s3://bucket/iterable", every=("10 min", "1 epoch"), keep=Keep(last=3))


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")  # random state: by seed and name alone, whatever ran before
    return Net()


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over one micro-batch of (inputs, targets); every rank."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer over the model's parameters; every rank."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.001)


def build_dataset(shard: int, shards: int) -> Any:
    """Return what yields the samples of one data shard in order; the rank that reads it, in each epoch."""
    from tests.compiler.golden.pieces import rows

    return rows(folder="data", shard=shard, shards=shards)


# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    me = worker.join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS, log_level=LOG_LEVEL)
    dataset = shard_loader.open_shards(me, build_dataset, "train", SHARDS)
    schedule = shard_schedule.ShardSchedule(
        SHARDS, GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, virtual_shards=VIRTUAL_SHARDS
    )
    model = build_model().to(me.device)
    optimizer = build_optimizer(model)
    step = exact.ExactStep(
        me,
        model,
        training_step,
        precision=PRECISION,
        on_nonfinite=ON_NONFINITE,
        virtual_shards=VIRTUAL_SHARDS,
    )
    state = State(model=model, optimizer=optimizer)
    snapshots = Snapshots(me, state, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    loader = shard_loader.ShardLoader(
        me, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS, virtual_shards=VIRTUAL_SHARDS
    )

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)  # of the global batch, weighted by true counts
        if me.stopped:  # StopTraining on some rank, or asked to leave without data: this step changes nothing
            break
        optimizer.step()
        position = batch.end  # finished step, samples consumed
        me.progress.step(position, loss, optimizer)
        if snapshots.due(position):
            snapshots.stage(position)
        if me.should_leave:  # agreed by all ranks, at the same step
            break
    snapshots.stage(position, final=True)
    worker.leave(me, position, schedule)


if __name__ == "__main__":
    worker.run(main)
