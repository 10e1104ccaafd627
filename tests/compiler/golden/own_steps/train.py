"""Train the job `own_steps`.

Made by elasticflow from tests/compiler/golden/own_steps/job.toml (job digest a96a0be2ca85247d).
Make it again:          elasticflow compile tests/compiler/golden/own_steps/job.toml -o DIR
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
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.training.manual_step import ManualStep
from elasticflow.runtime.training.several_optimizers import Schedules
from elasticflow.runtime.worker import join, leave, run
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

JOB = "own_steps"
JOB_DIGEST = "a96a0be2ca85247d"
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
SNAPSHOTS = Policy(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    worker = join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS)

    from examples.mnist import Net, digits
    from tests.compiler.golden.pieces import own_step, rates, top_1, two_optimizers

    def training_step(model: nn.Module, batch: Any, optimizers: Any) -> Any:
        """Make a step with this worker's samples, which moves the optimizers; return its loss."""
        return own_step(model, batch, optimizers)

    dataset = open_dataset(worker, lambda: digits(split="train"), "train")
    schedule = IndexSchedule(len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net()
    model.to(worker.device)
    worker.seed_for("optimizer")
    optimizers = two_optimizers(model, lr=0.01)
    worker.seed_for("scheduler")
    scheduler = Schedules(rates(optimizers, gamma=0.9))
    decay = get_ema_multi_avg_fn(EMA)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    step = ManualStep(worker, model, training_step, optimizers, clip_grad_norm=CLIP_GRAD_NORM)
    test_set = open_dataset(worker, lambda: digits(split="test"), "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        None,
        test_set,
        schedule,
        every=("1 epoch",),
        metrics={"top_1": top_1},
        best="max top_1",
        best_of="tests.compiler.golden.pieces:top_1",
        uses_loss=False,
        average=average,
    )
    state = State(model=model, optimizers=optimizers, scheduler=scheduler, ema=average, evaluation=evaluation)
    snapshots = Snapshots(worker, state, step, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest state that every rank can read, or the beginning
    worker.start_training(position, schedule, model, restored=snapshots.restored, log_every=LOG_EVERY)
    evaluation.run_if_owed(position)  # one that was cut short, when the workers were asked to leave
    loader = IndexLoader(worker, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        loss = step.run(batch)
        if worker.stopped:  # StopTraining on some rank, or all leave: this step changes nothing
            break
        average.update_parameters(model)
        position = batch.end  # finished step, samples consumed
        if position.is_epoch_end:
            worker.step_scheduler(scheduler, optimizers)
        worker.log_step(position, loss, optimizers)
        evaluation.after_step(position)
        snapshots.after_step(position)
        if worker.should_leave:  # all ranks do, after the same step
            break
    snapshots.finish(position)
    leave(worker, position, schedule, evaluation)


if __name__ == "__main__":
    run(main)
