"""Train the job `four-workers`.

Made by elasticflow from tests/compiler/golden/four_workers/job.toml (job digest 72dc8e747dec9115).
Make it again:          elasticflow compile tests/compiler/golden/four_workers/job.toml -o DIR
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
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.worker import program
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 7
EPOCHS = 10  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 8  # most samples of one forward
TAIL = "short"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 1  # loader processes of each worker
PRECISION = "fp32"
CLIP_GRAD_NORM = 1.0
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")
SNAPSHOTS = Policy(
    uri=None,
    every=("20 steps", "1 epoch"),
    memory="1 step",
    keep=Keep(last=3, best=1, every="100 steps", within="2 h"),
    integrity="sha256",
    staging_limit="4 GiB",
)


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
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

    from examples.mnist import Net, accuracy, digits
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import CosineAnnealingLR

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of one micro-batch of (inputs, targets)."""
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    dataset = open_dataset(worker, lambda: digits(split="train"), "train", samples=1438)
    batches = run.batches(
        dataset,
        size=GLOBAL_BATCH_SIZE,
        epochs=EPOCHS,
        tail=TAIL,
        num_workers=NUM_WORKERS,
        micro_batch_size=MICRO_BATCH_SIZE,
    )
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net(width=16)
    model.to(run.device)
    worker.seed_for("optimizer")
    optimizer = AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    worker.seed_for("scheduler")
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    test_set = open_dataset(worker, lambda: digits(split="test"), "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        training_step,
        test_set,
        run.schedule,
        precision=PRECISION,
        every=("1 epoch",),
        metrics={"accuracy": accuracy},
        best="max accuracy",
        best_of="examples.mnist:accuracy",
        batch_size=8,
    )
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation)  # restored here

    for batch in batches:  # from where the run stands to its end, or till all ranks leave
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        if batch.end.is_epoch_end:
            worker.step_scheduler(scheduler, optimizer)
        run.step(loss=loss)  # its line in the log; evaluation and snapshot where they are due
    run.finish()


if __name__ == "__main__":
    program(main)
