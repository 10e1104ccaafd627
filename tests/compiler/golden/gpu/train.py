"""Train the job `gpu`.

Made by elasticflow from tests/compiler/golden/gpu/job.toml (job digest 4323302cee02caa0).
Make it again:          elasticflow compile tests/compiler/golden/gpu/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime import worker
from elasticflow.runtime.data import index_loader, index_schedule
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import ddp
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

# --- values -----------------------------------------------------------------------------------------------

JOB = "gpu"
JOB_DIGEST = "4323302cee02caa0"
SEED = 20261120
STEPS = 2000  # optimizer steps
GLOBAL_BATCH_SIZE = 4096  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 512  # most samples of one forward; None: all of the worker's
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 4  # loader processes of each worker
THREADS = None  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp16"
ON_NONFINITE = "stop"  # what a loss that is not finite does
DDP: dict[str, Any] = {
    "sync_batchnorm": True,
    "bucket_cap_mb": 50,
    "gradient_as_bucket_view": True,
}  # options of DistributedDataParallel
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 10  # steps
LOG_LEVEL = "info"
SNAPSHOTS = Policy(
    uri="s3://bucket/gpu",
    every=("10 min",),
    keep=Keep(last=3),
    options={"client_kwargs": {"endpoint_url": "https://objects.example"}},
)


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")  # random state: by seed and name alone, whatever ran before
    return Net(width=64)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over one micro-batch of (inputs, targets); every rank."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer over the model's parameters; every rank."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.001, fused=True)


def build_scheduler(optimizer: Optimizer) -> LRScheduler:
    """Return the learning-rate schedule; every rank."""
    from torch.optim.lr_scheduler import OneCycleLR

    random_streams.begin(SEED, "scheduler")
    return OneCycleLR(optimizer, max_lr=0.01, total_steps=2000)


def build_dataset() -> Any:
    """Return the training data; every rank."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")  # the same for both splits: one factory permutes alike for either
    return digits(split="train", root="s3://datasets/mnist")


# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    me = worker.join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS, log_level=LOG_LEVEL)
    dataset = index_loader.open_dataset(me, build_dataset, "train")
    schedule = index_schedule.IndexSchedule(
        len(dataset), GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, seed=SEED
    )
    model = build_model().to(me.device)
    model.compile()
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    scaler = GradScaler(me.device.type)
    step = ddp.DDPStep(
        me, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE, ddp=DDP, scaler=scaler
    )
    from tests.compiler.golden.pieces import curriculum as own_curriculum

    state = State(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        include={"curriculum": own_curriculum},
    )
    snapshots = Snapshots(me, state, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    loader = index_loader.IndexLoader(me, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)  # of the global batch, weighted by true counts
        if me.stopped:  # StopTraining on some rank, or asked to leave without data: this step changes nothing
            break
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        me.progress.note_rates(optimizer)  # this step's: the schedule sets the next one's
        with me.stoppable:
            scheduler.step()
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
