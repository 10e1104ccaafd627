"""Train the job `elastic`.

Made by elasticflow from tests/compiler/golden/elastic/job.toml (job digest de335548e8908b99).
Make it again:          elasticflow plan tests/compiler/golden/elastic/job.toml -o DIR
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
from elasticflow.runtime.data.index_loader import open_dataset, prepare_data
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.join import join_job
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.state.loading import load_weights
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.worker import program
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 0  # determines the order of samples and all random numbers
EPOCHS = 3  # passes over the dataset
GLOBAL_BATCH_SIZE = 250  # samples per step, the same at any world size
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
WEIGHTS = str(ROOT / "weights/base.safetensors")  # initial weights of the model
PRECISION = "fp32"
EMA = 0.999  # decay of the averaged weights at each step
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="skip")
SNAPSHOTS = SnapshotSettings(
    uri=str(ROOT / "shared/snapshots"), every=("10 min", "1 epoch"), keep=Keep(last=3)
)


def prepare() -> None:
    """Prepare the data."""
    from tests.compiler.golden.pieces import download

    random_streams.begin(SEED, "data")
    download()


def build_dataset() -> Any:
    """Return the training data."""
    from examples.mnist import digits

    random_streams.begin(SEED, "data")
    return digits(split="train")


def build_collate() -> Any:
    """Return the function that makes a batch from a list of samples."""
    from tests.compiler.golden.pieces import collate

    return collate


def build_model() -> nn.Module:
    """Return the model with its initial weights."""
    from examples.mnist import Net

    random_streams.begin(SEED, "model")
    return Net()


def training_step(model: nn.Module, batch: Any) -> Any:
    """Return the loss of one micro-batch, computed by the job's own step."""
    from tests.compiler.golden.pieces import training_step as job_training_step

    return job_training_step(model, batch)


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer."""
    from tests.compiler.golden.pieces import optimizer_of

    random_streams.begin(SEED, "optimizer")
    return optimizer_of(model, lr=0.05, no_decay=["features.1.weight", "features.1.bias", "head.2.bias"])


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
    run: Run, batches: Iterable[Batch], model: nn.Module, optimizer: Optimizer, average: AveragedModel
) -> None:
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        optimizer.step()
        average.update_parameters(model)
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(
        name="elastic",
        digest="de335548e8908b99",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
    )
    worker = run.worker
    prepare_data(worker, prepare)  # by one worker of each node
    dataset = open_dataset(worker, build_dataset, "train")
    collate = build_collate()
    batches = run.batches(
        dataset, size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, num_workers=NUM_WORKERS, collate=collate
    )
    model = build_model()
    model.to(run.device)
    load_weights(model, WEIGHTS)
    optimizer = build_optimizer(model)
    average = build_average(model)
    test_set = open_dataset(worker, build_evaluation_dataset, "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        training_step,
        test_set,
        run.schedule,
        precision=PRECISION,
        every=("1 epoch", "500 steps"),
        metrics=build_metrics(),
        best="min loss",
        best_of="tests.compiler.golden.pieces:training_step",
        collate=collate,
        uses_loss=False,
        average=average,
    )
    run.keep(model=model, optimizer=optimizer, ema=average, evaluation=evaluation)  # restored here
    train(run, batches, model, optimizer, average)
    run.finish()


if __name__ == "__main__":
    program(main)
