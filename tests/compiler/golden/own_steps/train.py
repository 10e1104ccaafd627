"""Train the job `own_steps`.

Made by elasticflow from tests/compiler/golden/own_steps/job.toml (job digest a96a0be2ca85247d).
Make it again:          elasticflow plan tests/compiler/golden/own_steps/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import elasticflow
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.runtime.data.index_loader import open_dataset
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.join import join_job
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.training.several_optimizers import Schedules
from elasticflow.runtime.worker import program
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 0  # determines the order of samples and all random numbers
EPOCHS = 2  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
CLIP_GRAD_NORM = 1.0
EMA = 0.99  # decay of the averaged weights at each step
GRADIENTS = elasticflow.Gradients(moves_optimizers=True, clip_grad_norm=CLIP_GRAD_NORM)
SNAPSHOTS = SnapshotSettings(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="train")


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")
    return Net()


def training_step(model: nn.Module, batch: Any, optimizers: Any) -> Any:
    """Train on this worker's samples, step the optimizers, and return the loss."""
    from tests.compiler.golden.pieces import own_step

    return own_step(model, batch, optimizers)


def build_optimizer(model: nn.Module) -> Any:
    """Return the optimizers."""
    from tests.compiler.golden.pieces import two_optimizers

    random_streams.begin(SEED, "optimizer")
    return two_optimizers(model, lr=0.01)


def build_scheduler(optimizers: Any) -> Any:
    """Return the learning-rate schedule."""
    from tests.compiler.golden.pieces import rates

    random_streams.begin(SEED, "scheduler")
    return Schedules(rates(optimizers, gamma=0.9))


def build_average(model: nn.Module) -> AveragedModel:
    """Return the averaged model."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))  # type: ignore[no-untyped-call]


def build_evaluation_dataset() -> Any:
    """Return the evaluation data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="test")


def build_metrics() -> dict[str, Any]:
    """Return the metrics by name."""
    from tests.compiler.golden.pieces import top_1

    return {"top_1": top_1}


def train(
    run: Run,
    batches: Iterable[Batch],
    model: nn.Module,
    optimizers: Any,
    scheduler: Any,
    average: AveragedModel,
) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        loss = run.gradients(lambda part: training_step(model, part.data, optimizers), batch)
        average.update_parameters(model)
        if batch.end.is_epoch_end:
            run.worker.step_scheduler(scheduler, optimizers)
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="own_steps",
        digest="a96a0be2ca85247d",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
    )
    worker = run.worker
    dataset = open_dataset(worker, build_dataset, "train")
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, num_workers=NUM_WORKERS)
    model = build_model()
    model.to(run.device)
    optimizers = build_optimizer(model)
    scheduler = build_scheduler(optimizers)
    average = build_average(model)
    test_set = open_dataset(worker, build_evaluation_dataset, "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        None,
        test_set,
        run.schedule,
        every=("1 epoch",),
        metrics=build_metrics(),
        best="max top_1",
        best_of="tests.compiler.golden.pieces:top_1",
        uses_loss=False,
        average=average,
    )
    run.keep(
        model=model, optimizers=optimizers, scheduler=scheduler, ema=average, evaluation=evaluation
    )  # restored here
    train(run, batches, model, optimizers, scheduler, average)
    run.finish()


if __name__ == "__main__":
    program(main)
