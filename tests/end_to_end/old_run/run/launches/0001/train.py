"""Train the job `old`.

Made by elasticflow from job.toml (job digest 5430774ee1be5940).
Make it again:          elasticflow compile job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime import data, evaluate, order, replicas, snapshot, streams, worker
from elasticflow.runtime.state import State
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

# --- values -----------------------------------------------------------------------------------------------

JOB = "old"
JOB_DIGEST = "5430774ee1be5940"
SEED = 0
EPOCHS = 4  # passes over the dataset
GLOBAL_BATCH_SIZE = 6  # samples per step, the same at any world size
MICRO_BATCH_SIZE = None  # most samples of one forward; None: all of the worker's
TAIL = "spill"  # samples at an epoch's end that fill no batch
LOADER_PROCESSES = 0  # of each worker
THREADS = 1  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"
ON_NONFINITE = "stop"  # what a loss that is not finite does
EMA = 0.9  # what the averaged weights keep of themselves at each step
DDP: dict[str, Any] = {}  # options of DistributedDataParallel
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
LOG_LEVEL = "info"
EVALUATE_EVERY = ("1 epoch",)
BEST = "max accuracy"  # which evaluation is the best one
SNAPSHOTS = snapshot.Policy(uri=None, every=("5 steps",), keep_last=2, keep_best=1)


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from digits import Net

    streams.begin(SEED, "model")  # random state: by seed and name alone, whatever ran before
    return Net()


def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over one micro-batch of (inputs, targets); every rank."""
    from torch.nn.functional import cross_entropy

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer over the model's parameters; every rank."""
    from torch.optim import AdamW

    streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=0.01)


def build_scheduler(optimizer: Optimizer) -> LRScheduler:
    """Return the learning-rate schedule; every rank."""
    from torch.optim.lr_scheduler import StepLR

    streams.begin(SEED, "scheduler")
    return StepLR(optimizer, step_size=10)


def build_dataset() -> Any:
    """Return the training data; every rank."""
    from digits import samples as job_samples

    streams.begin(SEED, "data")  # the same for both splits: one factory permutes alike for either
    return job_samples(split="train")


def build_evaluation_dataset() -> Any:
    """Return the evaluation data; every rank."""
    from digits import samples as job_samples

    streams.begin(SEED, "data")
    return job_samples(split="test")


def measure_accuracy(outputs: Any, targets: Any) -> Any:
    """Return the metric `accuracy` as a mean over one batch; every rank."""
    from digits import accuracy

    return accuracy(outputs, targets)


# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    me = worker.join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS, log_level=LOG_LEVEL)
    dataset = data.open_dataset(me, build_dataset, "train")
    schedule = order.Schedule(len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED)
    model = build_model().to(me.device)
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    decay = get_ema_multi_avg_fn(EMA)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    group = replicas.DataParallel(
        me, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE, ddp=DDP
    )
    test_set = data.open_dataset(me, build_evaluation_dataset, "evaluation", apart_from=dataset)
    metrics = {"accuracy": measure_accuracy}
    evaluation = evaluate.Evaluation(
        me,
        model,
        training_step,
        test_set,
        schedule,
        every=EVALUATE_EVERY,
        metrics=metrics,
        best=BEST,
        best_of="digits:accuracy",
        average=average,
    )
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, ema=average, evaluation=evaluation)
    snapshots = snapshot.Snapshots(me, state, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    if evaluation.is_owed:  # cut short after this step, when the workers were asked to leave
        evaluation.run(position)
    loader = data.Loader(me, dataset, schedule, MICRO_BATCH_SIZE, processes=LOADER_PROCESSES)

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = group.gradients(batch)  # of the global batch, weighted by true counts
        if me.stopped:  # StopTraining on some rank, or asked to leave without data: this step changes nothing
            break
        optimizer.step()
        me.progress.note_rates(optimizer)  # this step's: the schedule sets the next one's
        with me.stoppable:
            scheduler.step()
        average.update_parameters(model)
        position = batch.end  # finished step, samples consumed
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
