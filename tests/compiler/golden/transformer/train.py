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

import elasticflow
from elasticflow.runtime.data.index_loader import open_dataset
from elasticflow.runtime.own_loop.join import join_job
from elasticflow.runtime.snapshot.snapshots import Keep, Policy
from elasticflow.runtime.training.param_groups import Group, log_groups, parameter_groups
from elasticflow.runtime.training.unwrap import unwrap_model
from elasticflow.runtime.worker import program
from torch import nn

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../..").resolve()  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # the job's own code comes first

SEED = 0
STEPS = 1000  # optimizer steps
GLOBAL_BATCH_SIZE = 64  # samples per step, the same at any world size
TAIL = "spill"  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # loader processes of each worker
PRECISION = "fp32"
CLIP_GRAD_NORM = 1.0
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")
SNAPSHOTS = Policy(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    run = join_job(
        name="transformer",
        digest="985ff768f7f446f7",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
    )
    worker = run.worker

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
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, steps=STEPS, tail=TAIL, num_workers=NUM_WORKERS)
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = GPT(config=GPTConfig(n_layer=4, n_embd=dataset.values["width"]))
    model.to(run.device)
    worker.seed_for("optimizer")
    groups = [
        Group(module=Embedding, args={"lr": 6e-05, "weight_decay": 0.0}),
        Group(match=["*.bias", "*norm*"], ndim=[0, 1], args={"weight_decay": 0.0}, name="no decay"),
    ]
    optimizer = AdamW(parameter_groups(model, groups), lr=0.0006, weight_decay=0.1)
    log_groups(worker, optimizer, groups)
    worker.seed_for("scheduler")
    scheduler = warmup_cosine(optimizer, warmup=100, total=1000, final=0.1)
    run.keep(model=model, optimizer=optimizer, scheduler=scheduler)  # restored here

    for batch in batches:  # from where the run stands to its end, or till all ranks leave
        optimizer.zero_grad()
        loss = run.gradients(lambda part: training_step(model, part.data), batch)
        worker.log_grad_norm(nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM))
        optimizer.step()
        worker.step_scheduler(scheduler, optimizer)
        run.step(loss=loss)  # its line in the log; evaluation and snapshot where they are due
    run.finish()


if __name__ == "__main__":
    program(main)
