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

import elasticflow
from elasticflow.runtime.data.index_loader import open_dataset
from elasticflow.runtime.own_loop.join import join_job
from elasticflow.runtime.snapshot.snapshots import Keep, Policy
from elasticflow.runtime.worker import program
from torch import Tensor, nn
from torch.amp import GradScaler

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 20261120
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
SNAPSHOTS = Policy(
    uri="s3://bucket/gpu",
    every=("10 min",),
    keep=Keep(last=3),
    options={"client_kwargs": {"endpoint_url": "https://objects.example"}},
)


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
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
    batches = run.batches(
        dataset,
        size=GLOBAL_BATCH_SIZE,
        steps=STEPS,
        tail=TAIL,
        num_workers=NUM_WORKERS,
        micro_batch_size=MICRO_BATCH_SIZE,
    )
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net(width=64)
    model.to(run.device)
    model.compile()
    worker.seed_for("optimizer")
    optimizer = AdamW(model.parameters(), lr=0.001, fused=True)
    worker.seed_for("scheduler")
    scheduler = OneCycleLR(optimizer, max_lr=0.01, total_steps=2000)
    scaler = GradScaler(worker.device.type)
    run.keep(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        include={"curriculum": curriculum},
    )  # restored here

    for batch in batches:  # from where the run stands to its end, or till all ranks leave
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        worker.step_scheduler(scheduler, optimizer)
        run.step(loss=loss)  # its line in the log; evaluation and snapshot where they are due
    run.finish()


if __name__ == "__main__":
    program(main)
