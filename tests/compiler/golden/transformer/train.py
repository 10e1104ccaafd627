"""Train the job `transformer`.

Made by elasticflow from tests/compiler/golden/transformer/job.toml (job digest 985ff768f7f446f7).
Make it again:          elasticflow compile tests/compiler/golden/transformer/job.toml -o DIR
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
from elasticflow.runtime.training.param_groups import Group, log_groups, parameter_groups
from elasticflow.runtime.training.unwrap import unwrap_model
from elasticflow.runtime.worker import join, leave, run
from torch import nn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

JOB = "transformer"
JOB_DIGEST = "985ff768f7f446f7"
SEED = 0
STEPS = 1000  # optimizer steps
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
MICRO_BATCH_SIZE = None  # most samples of one forward; None: all of the worker's
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
THREADS = None  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"
ON_NONFINITE = "stop"  # what a loss that is not finite does
CLIP_GRAD_NORM = 1.0
COMPARE_REPLICAS = "1000 steps"  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # steps
SNAPSHOTS = Policy(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    worker = join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS)

    from elasticflow.schedules import warmup_cosine
    from tests.compiler.golden.pieces import GPT, GPTConfig, sentences
    from torch.nn import Embedding
    from torch.optim import AdamW

    def training_step(model: nn.Module, batch: Any) -> Any:
        """Return the loss of one micro-batch, as the job's own step states it."""
        return unwrap_model(model, GPT).training_step(batch)

    dataset = open_dataset(
        worker, lambda: sentences(block_size=32), "train", values={"width": "model.args.config.args.n_embd"}
    )
    schedule = IndexSchedule(len(dataset), GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, seed=SEED)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = GPT(config=GPTConfig(n_layer=4, n_embd=dataset.values["width"]))
    model.to(worker.device)
    worker.seed_for("optimizer")
    groups = [
        Group(module=Embedding, args={"lr": 6e-05, "weight_decay": 0.0}),
        Group(match=["*.bias", "*norm*"], ndim=[0, 1], args={"weight_decay": 0.0}, name="no decay"),
    ]
    optimizer = AdamW(parameter_groups(model, groups), lr=0.0006, weight_decay=0.1)
    log_groups(worker, optimizer, groups)
    worker.seed_for("scheduler")
    scheduler = warmup_cosine(optimizer, warmup=100, total=1000, final=0.1)
    step = DDPStep(worker, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler)
    snapshots = Snapshots(worker, state, step, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest state that every rank can read, or the beginning
    worker.start_training(position, schedule, model, restored=snapshots.restored, log_every=LOG_EVERY)
    loader = IndexLoader(worker, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS)

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = step.forward_backward(batch)
        if worker.stopped:  # StopTraining on some rank, or all leave: this step changes nothing
            break
        worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        position = batch.end  # finished step, samples consumed
        worker.step_scheduler(scheduler, optimizer)
        worker.log_step(position, loss, optimizer)
        snapshots.after_step(position)
        if worker.should_leave:  # all ranks do, after the same step
            break
    snapshots.finish(position)
    leave(worker, position, schedule)


if __name__ == "__main__":
    run(main)
