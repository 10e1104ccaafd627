"""Train the job `gpu`.

Made by elasticflow from tests/compiler/golden/gpu/job.toml (job digest 412fb7c4caddff27).
Make it again:          elasticflow compile tests/compiler/golden/gpu/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime.data.index_loader import IndexLoader, open_dataset
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.worker import join, leave, run
from torch import Tensor, nn
from torch.amp import GradScaler

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

JOB = "gpu"
JOB_DIGEST = "412fb7c4caddff27"
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
SNAPSHOTS = Policy(
    uri="s3://bucket/gpu",
    every=("10 min",),
    keep=Keep(last=3),
    options={"client_kwargs": {"endpoint_url": "https://objects.example"}},
)


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    worker = join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS)

    from examples.mnist import Net, digits
    from tests.compiler.golden.pieces import curriculum
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import OneCycleLR

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of one micro-batch of (inputs, targets)."""
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    dataset = open_dataset(worker, lambda: digits(split="train", root="s3://datasets/mnist"), "train")
    schedule = IndexSchedule(len(dataset), GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, seed=SEED)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net(width=64)
    model.to(worker.device)
    model.compile()
    worker.seed_for("optimizer")
    optimizer = AdamW(model.parameters(), lr=0.001, fused=True)
    worker.seed_for("scheduler")
    scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=2000)
    scaler = GradScaler(worker.device.type)
    step = DDPStep(
        worker, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE, ddp=DDP, scaler=scaler
    )
    state = State(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        include={"curriculum": curriculum},
    )
    snapshots = Snapshots(worker, state, step, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest state that every rank can read, or the beginning
    worker.start_training(position, schedule, model, restored=snapshots.restored, log_every=LOG_EVERY)
    loader = IndexLoader(worker, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)
        if worker.stopped:  # StopTraining on some rank, or all leave: this step changes nothing
            break
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        position = batch.end  # finished step, samples consumed
        worker.step_scheduler(scheduler, optimizer)
        worker.log_step(position, loss, optimizer)
        snapshots.after_step(position)
        if worker.should_leave:  # all ranks do, after the same step
            break
    snapshots.finish(position)
    leave(worker, position, schedule)


if __name__ == "__main__":
    run(main)
