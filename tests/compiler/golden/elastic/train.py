"""Train the job `elastic`.

Made by elasticflow from tests/compiler/golden/elastic/job.toml (job digest de335548e8908b99).
Make it again:          elasticflow compile tests/compiler/golden/elastic/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime.data.index_loader import IndexLoader, open_dataset, prepare_data
from elasticflow.runtime.data.index_schedule import IndexSchedule
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots, load_weights
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.evaluation import Evaluation
from elasticflow.runtime.worker import join, leave, run
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

JOB = "elastic"
JOB_DIGEST = "de335548e8908b99"
SEED = 0
EPOCHS = 3  # passes over the dataset
GLOBAL_BATCH_SIZE = 250  # samples per step, the same at any world size
MICRO_BATCH_SIZE = None  # most samples of one forward; None: all of the worker's
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
THREADS = None  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"
ON_NONFINITE = "skip"  # what a loss that is not finite does
EMA = 0.999  # what the averaged weights keep of themselves at each step
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
SNAPSHOTS = Policy(uri=str(ROOT / "shared/snapshots"), every=("10 min", "1 epoch"), keep=Keep(last=3))


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    worker = join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS)

    from tests.compiler.golden.pieces import download

    prepare_data(worker, download)  # by one worker of each node

    from examples.mnist import Net, digits
    from tests.compiler.golden.pieces import collate, optimizer_of, top_1
    from tests.compiler.golden.pieces import training_step as job_training_step

    def training_step(model: nn.Module, batch: Any) -> Any:
        """Return the loss of one micro-batch, as the job's own step states it."""
        return job_training_step(model, batch)

    dataset = open_dataset(worker, lambda: digits(split="train"), "train")
    schedule = IndexSchedule(len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net()
    model.to(worker.device)
    load_weights(model, str(ROOT / "weights/base.safetensors"))
    worker.seed_for("optimizer")
    optimizer = optimizer_of(model, lr=0.05, no_decay=["features.1.weight", "features.1.bias", "head.2.bias"])
    decay = get_ema_multi_avg_fn(EMA)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    step = DDPStep(worker, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE)
    test_set = open_dataset(worker, lambda: digits(split="test"), "evaluation", apart_from=dataset)
    evaluation = Evaluation(
        worker,
        model,
        training_step,
        test_set,
        schedule,
        precision=PRECISION,
        every=("1 epoch", "500 steps"),
        metrics={"top_1": top_1},
        best="min loss",
        best_of="tests.compiler.golden.pieces:training_step",
        collate=collate,
        uses_loss=False,
        average=average,
    )
    state = State(model=model, optimizer=optimizer, ema=average, evaluation=evaluation)
    snapshots = Snapshots(worker, state, step, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest state that every rank can read, or the beginning
    worker.start_training(position, schedule, model, restored=snapshots.restored, log_every=LOG_EVERY)
    evaluation.run_if_owed(position)  # one that was cut short, when the workers were asked to leave
    loader = IndexLoader(
        worker, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS, collate=collate
    )

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)
        if worker.stopped:  # StopTraining on some rank, or all leave: this step changes nothing
            break
        optimizer.step()
        average.update_parameters(model)
        position = batch.end  # finished step, samples consumed
        worker.log_step(position, loss, optimizer)
        evaluation.after_step(position)
        snapshots.after_step(position)
        if worker.should_leave:  # all ranks do, after the same step
            break
    snapshots.finish(position)
    leave(worker, position, schedule, evaluation)


if __name__ == "__main__":
    run(main)
