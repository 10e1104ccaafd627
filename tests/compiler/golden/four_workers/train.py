"""Train the job `four-workers`.

Made by elasticflow from tests/compiler/golden/four_workers/job.toml (job digest 7b7dd117f13dd80a).
Make it again:          elasticflow compile tests/compiler/golden/four_workers/job.toml -o DIR
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
from elasticflow.runtime.training.evaluation import Evaluation
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

# --- values -----------------------------------------------------------------------------------------------

JOB = "four-workers"
JOB_DIGEST = "7b7dd117f13dd80a"
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
DDP: dict[str, Any] = {}  # options of DistributedDataParallel
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
LOG_LEVEL = "info"
EVALUATE_EVERY = ("1 epoch",)
BEST = "max accuracy"  # which evaluation is the best one
SNAPSHOTS = Policy(
    uri=None,
    every=("20 steps", "1 epoch"),
    keep=Keep(last=3, best=1, every="100 steps", within="2 h"),
    integrity="sha256",
    memory="1 step",
    staging_limit="4 GiB",
)


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")  # random state: by seed and name alone, whatever ran before
    return Net(width=16)


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over one micro-batch of (inputs, targets); every rank."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer over the model's parameters; every rank."""
    from torch.optim import AdamW

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.003, weight_decay=0.01)


def build_scheduler(optimizer: Optimizer) -> LRScheduler:
    """Return the learning-rate schedule; every rank."""
    from torch.optim.lr_scheduler import CosineAnnealingLR

    random_streams.begin(SEED, "scheduler")
    return CosineAnnealingLR(optimizer, T_max=10)


def build_dataset() -> Any:
    """Return the training data; every rank."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")  # the same for both splits: one factory permutes alike for either
    return digits(split="train")


def build_evaluation_dataset() -> Any:
    """Return the evaluation data; every rank."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="test")


def measure_accuracy(outputs: Any, targets: Any) -> Any:
    """Return the metric `accuracy` as a mean over one batch; every rank."""
    from examples.mnist import accuracy

    return accuracy(outputs, targets)


# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    me = worker.join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS, log_level=LOG_LEVEL)
    dataset = index_loader.open_dataset(me, build_dataset, "train", samples=1438)
    schedule = index_schedule.IndexSchedule(
        len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED
    )
    model = build_model().to(me.device)
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    step = ddp.DDPStep(me, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE, ddp=DDP)
    test_set = index_loader.open_dataset(me, build_evaluation_dataset, "evaluation", apart_from=dataset)
    metrics = {"accuracy": measure_accuracy}
    evaluation = Evaluation(
        me,
        model,
        training_step,
        test_set,
        schedule,
        every=EVALUATE_EVERY,
        metrics=metrics,
        best=BEST,
        batch_size=8,
        best_of="examples.mnist:accuracy",
    )
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation)
    snapshots = Snapshots(me, state, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    if evaluation.is_owed:  # cut short after this step, when the workers were asked to leave
        evaluation.run(position)
    loader = index_loader.IndexLoader(me, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)  # of the global batch, weighted by true counts
        if me.stopped:  # StopTraining on some rank, or asked to leave without data: this step changes nothing
            break
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        optimizer.step()
        me.progress.note_rates(optimizer)  # this step's: the schedule sets the next one's
        position = batch.end  # finished step, samples consumed
        if position.is_epoch_end:
            with me.stoppable:
                scheduler.step()
        me.progress.step(position, loss, optimizer)
        if evaluation.due(position):
            evaluation.run(position)
        if snapshots.due(position):
            snapshots.stage(position)
        if me.should_leave:  # agreed by all ranks, at the same step
            break
    snapshots.stage(position, final=True)
    worker.leave(me, position, schedule)


if __name__ == "__main__":
    worker.run(main)
