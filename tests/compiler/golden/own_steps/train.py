"""Train the job `own_steps`.

Made by elasticflow from tests/compiler/golden/own_steps/job.toml (job digest 8c68c10fb25508ee).
Make it again:          elasticflow compile tests/compiler/golden/own_steps/job.toml -o DIR
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
from elasticflow.runtime.training import own_steps, several_optimizers
from elasticflow.runtime.training.evaluation import Evaluation
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

# --- values -----------------------------------------------------------------------------------------------

JOB = "own_steps"
JOB_DIGEST = "8c68c10fb25508ee"
SEED = 0
EPOCHS = 2  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = None  # most samples of one forward; None: all of the worker's
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
THREADS = None  # CPU threads of each worker; None: the node's cores shared out
CLIP_GRAD_NORM = 1.0
EMA = 0.99  # what the averaged weights keep of themselves at each step
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
LOG_LEVEL = "info"
EVALUATE_EVERY = ("1 epoch",)
BEST = "max top_1"  # which evaluation is the best one
SNAPSHOTS = Policy(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")  # random state: by seed and name alone, whatever ran before
    return Net()


def training_step(model: nn.Module, batch: Any, optimizers: Any) -> Any:
    """Make a step with this worker's samples, which moves the optimizers; return its loss; every rank."""
    from tests.compiler.golden.pieces import own_step

    return own_step(model, batch, optimizers)


def build_optimizer(model: nn.Module) -> Any:
    """Return the optimizer, or several in a dict or list; every rank."""
    from tests.compiler.golden.pieces import two_optimizers

    random_streams.begin(SEED, "optimizer")
    return two_optimizers(model, lr=0.01)


def build_scheduler(optimizers: Any) -> Any:
    """Return the learning-rate schedule; every rank."""
    from tests.compiler.golden.pieces import rates

    random_streams.begin(SEED, "scheduler")
    return rates(optimizers, gamma=0.9)


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


def measure_top_1(model: Any, batch: Any) -> Any:
    """Return the metric `top_1` as a mean over one batch; every rank."""
    from tests.compiler.golden.pieces import top_1

    return top_1(model, batch)


# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    me = worker.join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS, log_level=LOG_LEVEL)
    dataset = index_loader.open_dataset(me, build_dataset, "train")
    schedule = index_schedule.IndexSchedule(
        len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED
    )
    model = build_model().to(me.device)
    optimizers = build_optimizer(model)
    scheduler = several_optimizers.Schedules(build_scheduler(optimizers))
    decay = get_ema_multi_avg_fn(EMA)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    step = own_steps.ManualStep(me, model, training_step, optimizers, clip_grad_norm=CLIP_GRAD_NORM)
    test_set = index_loader.open_dataset(me, build_evaluation_dataset, "evaluation", apart_from=dataset)
    metrics = {"top_1": measure_top_1}
    evaluation = Evaluation(
        me,
        model,
        None,
        test_set,
        schedule,
        every=EVALUATE_EVERY,
        metrics=metrics,
        best=BEST,
        best_of="tests.compiler.golden.pieces:top_1",
        uses_loss=False,
        average=average,
    )
    state = State(model=model, optimizers=optimizers, scheduler=scheduler, ema=average, evaluation=evaluation)
    snapshots = Snapshots(me, state, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    if evaluation.is_owed:  # cut short after this step, when the workers were asked to leave
        evaluation.run(position)
    loader = index_loader.IndexLoader(me, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        loss = step.step(batch)  # of the global batch, weighted by true counts
        if me.stopped:  # StopTraining on some rank, or asked to leave without data: this step changes nothing
            break
        me.progress.note_rates(optimizers)  # this step's: the schedule sets the next one's
        average.update_parameters(model)
        position = batch.end  # finished step, samples consumed
        if position.is_epoch_end:
            with me.stoppable:
                scheduler.step()
        me.progress.step(position, loss, optimizers)
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
