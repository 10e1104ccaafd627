"""Train the job `exact`.

Made by elasticflow from tests/compiler/golden/exact/job.toml (job digest bdc35f5c2cce8fe7).
Make it again:          elasticflow compile tests/compiler/golden/exact/job.toml -o DIR
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

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 3
EPOCHS = 5  # passes over the dataset
GLOBAL_BATCH_SIZE = 128  # samples per step, the same at any world size
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
PRECISION = "fp32"
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop", virtual_shards=8)
SNAPSHOTS = Policy(uri="s3://bucket/exact", every=("10 min", "1 epoch"), keep=Keep(last=3))


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    run = join_job(
        name="exact",
        digest="bdc35f5c2cce8fe7",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
        threads=1,
    )
    worker = run.worker

    from examples.mnist import Net, digits
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of one micro-batch of (inputs, targets)."""
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    dataset = open_dataset(worker, lambda: digits(split="train"), "train")
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, num_workers=NUM_WORKERS)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net()
    model.to(run.device)
    worker.seed_for("optimizer")
    optimizer = AdamW(model.parameters(), lr=0.001)
    run.keep(model=model, optimizer=optimizer)  # restored here

    for batch in batches:  # from where the run stands to its end, or till all ranks leave
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        optimizer.step()
        run.step(loss=loss)  # its line in the log; evaluation and snapshot where they are due
    run.finish()


if __name__ == "__main__":
    program(main)
