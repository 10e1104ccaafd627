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

from elasticflow.runtime.data.index_loader import IndexLoader, open_dataset
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.worker import join, leave, run
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

JOB = "four-workers"
JOB_DIGEST = "72dc8e747dec9115"
SEED = 7
EPOCHS = 10  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 8  # most samples of one forward; None: all of the worker's
TAIL = "short"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 1  # loader processes of each worker
THREADS = 1  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"
ON_NONFINITE = "stop"  # what a loss that is not finite does
CLIP_GRAD_NORM = 1.0
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
SNAPSHOTS = Policy(
    uri=None,
    every=("20 steps", "1 epoch"),
    keep=Keep(last=3, best=1, every="100 steps", within="2 h"),
    integrity="sha256",
    memory="1 step",
    staging_limit="4 GiB",
)


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    worker = join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS)

    from examples.mnist import Net, accuracy, digits
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import CosineAnnealingLR

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of one micro-batch of (inputs, targets)."""
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    dataset = open_dataset(worker, lambda: digits(split="train"), "train", samples=1438)
    schedule = IndexSchedule(len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net(width=16)
    model.to(worker.device)
    worker.seed_for("optimizer")
    optimizer = AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    worker.seed_for("scheduler")
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    step = DDPStep(worker, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE)
    test_set = open_dataset(worker, lambda: digits(split="test"), "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        training_step,
        test_set,
        schedule,
        precision=PRECISION,
        every=("1 epoch",),
        metrics={"accuracy": accuracy},
        best="max accuracy",
        best_of="examples.mnist:accuracy",
        batch_size=8,
    )
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation)
    snapshots = Snapshots(worker, state, step, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest state that every rank can read, or the beginning
    worker.start_training(position, schedule, model, restored=snapshots.restored, log_every=LOG_EVERY)
    evaluation.run_if_owed(position)  # one that was cut short, when the workers were asked to leave
    loader = IndexLoader(worker, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)
        if worker.stopped:  # StopTraining on some rank, or all leave: this step changes nothing
            break
        worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        position = batch.end  # finished step, samples consumed
        if position.is_epoch_end:
            worker.step_scheduler(scheduler, optimizer)
        worker.log_step(position, loss, optimizer)
        evaluation.after_step(position)
        snapshots.after_step(position)
        if worker.should_leave:  # all ranks do, after the same step
            break
    snapshots.finish(position)
    leave(worker, position, schedule, evaluation)


if __name__ == "__main__":
    run(main)
