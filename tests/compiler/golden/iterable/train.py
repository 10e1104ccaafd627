"""Train the job `iterable`.

Made by elasticflow from tests/compiler/golden/iterable/job.toml (job digest 901845d532f0cff3).
Make it again:          elasticflow compile tests/compiler/golden/iterable/job.toml -o DIR
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime.data.shard_loader import ShardLoader, open_shards
from elasticflow.runtime.data.shard_schedule import ShardSchedule
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.worker import join, leave, run
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

JOB = "iterable"
JOB_DIGEST = "901845d532f0cff3"
SEED = 0
EPOCHS = 5  # passes over the dataset
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = None  # most samples of one forward; None: all of the worker's
SHARDS = 16  # of the data; each is read in order, by one worker at a time
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 2  # loader processes of each worker
THREADS = 1  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"
ON_NONFINITE = "stop"  # what a loss that is not finite does
VIRTUAL_SHARDS = 8  # of each batch, added up in a fixed order
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
SNAPSHOTS = Policy(uri="s3://bucket/iterable", every=("10 min", "1 epoch"), keep=Keep(last=3))


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    worker = join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS)

    from functools import partial

    from examples.mnist import Net
    from tests.compiler.golden.pieces import rows
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW

    def training_step(model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of one micro-batch of (inputs, targets)."""
        inputs, targets = batch
        return cross_entropy(model(inputs), targets)

    dataset = open_shards(worker, partial(rows, folder="data"), "train", SHARDS)
    schedule = ShardSchedule(
        SHARDS, GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, virtual_shards=VIRTUAL_SHARDS
    )
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net()
    model.to(worker.device)
    worker.seed_for("optimizer")
    optimizer = AdamW(model.parameters(), lr=0.001)
    step = ExactStep(
        worker,
        model,
        training_step,
        precision=PRECISION,
        on_nonfinite=ON_NONFINITE,
        virtual_shards=VIRTUAL_SHARDS,
    )
    state = State(model=model, optimizer=optimizer)
    snapshots = Snapshots(worker, state, step, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest state that every rank can read, or the beginning
    worker.start_training(position, schedule, model, restored=snapshots.restored, log_every=LOG_EVERY)
    loader = ShardLoader(
        worker, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS, virtual_shards=VIRTUAL_SHARDS
    )

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)
        if worker.stopped:  # StopTraining on some rank, or all leave: this step changes nothing
            break
        optimizer.step()
        position = batch.end  # finished step, samples consumed
        worker.log_step(position, loss, optimizer)
        snapshots.after_step(position)
        if worker.should_leave:  # all ranks do, after the same step
            break
    snapshots.finish(position)
    leave(worker, position, schedule)


if __name__ == "__main__":
    run(main)
