"""Train the job `mnist`.

Made by elasticflow from jobs/mnist.toml (job digest 0000000000000000).  # = header
Make it again:          elasticflow compile jobs/mnist.toml -o DIR  # = again
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import os  # = import.os
import sys
from pathlib import Path
from typing import Any

from elasticflow.runtime import worker
from elasticflow.runtime.data import index_loader, index_schedule  # = import.data
from elasticflow.runtime.process import random_streams
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, Snapshots, load_weights  # = import.snapshots
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import ddp  # = import.training
from elasticflow.runtime.training.evaluation import Evaluation  # = import.evaluation
from elasticflow.runtime.training.loss import with_count  # = import.count
from elasticflow.runtime.training.unwrap import unwrap_model  # = import.unwrap
from torch import Tensor, nn  # = import.torch
from torch.amp import GradScaler  # = import.scaler
from torch.optim import Optimizer  # = import.optimizer
from torch.optim.lr_scheduler import LRScheduler  # = import.scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # = import.ema

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../../..").resolve()  # = root  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # = path  # the job's own code comes first

# --- values -----------------------------------------------------------------------------------------------

JOB = "mnist"  # = job
JOB_DIGEST = "0000000000000000"  # = digest
SEED = 1234  # = seed
# if: epochs
EPOCHS = 5  # = epochs  # passes over the dataset
# end
# if: not epochs
STEPS = 2000  # = steps  # optimizer steps
# end
GLOBAL_BATCH_SIZE = 256  # = global_batch_size  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 64  # = micro_batch_size  # most samples of one forward; None: all of the worker's
# if: shards
SHARDS = 16  # = shards  # of the data; each is read in order, by one worker at a time
# end
TAIL = "spill"  # = tail  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # = num_workers  # loader processes of each worker
THREADS = 1  # = threads  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"  # = precision
ON_NONFINITE = "stop"  # = on_nonfinite  # what a loss that is not finite does
# if: clip
CLIP_GRAD_NORM = 1.0  # = clip
# end
# if: ema
EMA = 0.999  # = ema  # what the averaged weights keep of themselves at each step
# end
# if: exact
VIRTUAL_SHARDS = 8  # = virtual_shards  # of each batch, added up in a fixed order
# end
# if: not exact
DDP: dict[str, Any] = {}  # = ddp  # options of DistributedDataParallel
# end
COMPARE_REPLICAS = "1000 steps"  # = compare  # bit for bit; also before each snapshot; None: never
LOG_EVERY = 1  # = log_every  # steps
LOG_LEVEL = "info"  # = log_level
# if: evaluation
EVALUATE_EVERY = ("1 epoch",)  # = evaluate_every
BEST = "max accuracy"  # = best  # which evaluation is the best one
# end
SNAPSHOTS = Policy(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))  # = snapshots


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from examples.mnist import Net  # = model.import

    random_streams.begin(SEED, "model")  # random state: by seed and name alone, whatever ran before
    return Net(width=16)  # = model.call


# if: loss
def training_step(model: nn.Module, batch: Any) -> Tensor:  # = loss.def
    """Return the mean loss over one micro-batch of (inputs, targets); every rank."""  # = loss.doc
    from torch.nn.functional import cross_entropy  # = loss.import

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)  # = loss.call


# end
# if: not loss
def training_step(model: nn.Module, batch: Any) -> Any:  # type: ignore[no-redef]  # noqa: F811  # = step.def
    """Return the loss of one micro-batch, as the job's own step states it; every rank."""  # = step.doc
    from torch.nn.functional import cross_entropy  # = step.import

    return cross_entropy(model(batch[0]), batch[1])  # = step.call


# end
def build_optimizer(model: nn.Module) -> Optimizer:  # = optimizer.def
    """Return the optimizer over the model's parameters; every rank."""  # = optimizer.doc
    from torch.optim import AdamW  # = optimizer.import

    random_streams.begin(SEED, "optimizer")
    return AdamW(model.parameters(), lr=1e-3)  # = optimizer.call


# if: scheduler
def build_scheduler(optimizer: Optimizer) -> LRScheduler:  # = scheduler.def
    """Return the learning-rate schedule; every rank."""
    from torch.optim.lr_scheduler import CosineAnnealingLR  # = scheduler.import

    random_streams.begin(SEED, "scheduler")
    return CosineAnnealingLR(optimizer, T_max=1000)  # = scheduler.call


# end
# if: prepare
def prepare_data() -> None:
    """Get the data in place; one worker of each node."""
    from examples.mnist import digits  # = prepare.import

    random_streams.begin(SEED, "data")
    digits("train")  # = prepare.call


# end
# if: not shards
def build_dataset() -> Any:
    """Return the training data; every rank."""
    from examples.mnist import digits  # = dataset.import

    random_streams.begin(SEED, "data")  # the same for both splits: one factory permutes alike for either
    return digits(split="train")  # = dataset.call


# end
# if: shards
def build_dataset(shard: int, shards: int) -> Any:  # type: ignore[no-redef]  # noqa: F811  # = dataset.def
    """Return what yields the samples of one data shard in order; the rank that reads it, in each epoch."""
    from examples.mnist import digits  # = dataset.import

    return digits(split="train")  # = dataset.call


# end
# if: collate
def collate(samples: list[Any]) -> Any:
    """Return the batch made of these samples; every rank."""
    from torch.utils.data import default_collate  # = collate.import

    return default_collate(samples)  # = collate.call


# end
# if: evaluation
def build_evaluation_dataset() -> Any:
    """Return the evaluation data; every rank."""
    from examples.mnist import digits  # = evaluation.import

    random_streams.begin(SEED, "data")
    return digits(split="test")  # = evaluation.call


# end
# each: metrics
def measure_accuracy(outputs: Any, targets: Any) -> Any:  # = metric.def
    """Return the metric `accuracy` as a mean over one batch; every rank."""  # = metric.doc
    from examples.mnist import accuracy  # = metric.import

    return accuracy(outputs, targets)  # = metric.call


# end
# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    me = worker.join(JOB, JOB_DIGEST, HERE, SNAPSHOTS, seed=SEED, threads=THREADS, log_level=LOG_LEVEL)
    # if: prepare
    index_loader.prepare_data(me, prepare_data)  # once per node
    # end
    dataset = index_loader.open_dataset(me, build_dataset, "train")  # = dataset.open
    schedule = index_schedule.IndexSchedule(  # = schedule
        len(dataset), GLOBAL_BATCH_SIZE, epochs=5, tail=TAIL, seed=SEED
    )
    model = build_model().to(me.device)
    # if: weights
    load_weights(model, "base.safetensors")  # = weights
    # end
    # if: compile
    model.compile()
    # end
    optimizer = build_optimizer(model)  # = optimizer.make
    # if: scheduler
    scheduler = build_scheduler(optimizer)  # = scheduler.make
    # end
    # if: fp16
    scaler = GradScaler(me.device.type)
    # end
    # if: ema
    decay = get_ema_multi_avg_fn(EMA)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    # end
    step = ddp.DDPStep(  # = group
        me, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE, ddp=DDP
    )
    # if: evaluation
    test_set = index_loader.open_dataset(me, build_evaluation_dataset, "evaluation")  # = evaluation.open
    metrics = {"accuracy": measure_accuracy}  # = metrics
    evaluation = Evaluation(  # = evaluate
        me, model, training_step, test_set, schedule, every=EVALUATE_EVERY, metrics=metrics, best=BEST
    )
    # end
    # each: include
    from tests.compiler.golden.pieces import curriculum as own_curriculum  # = include.import

    # end
    state = State(model=model, optimizer=optimizer, include={"curriculum": own_curriculum})  # = state
    snapshots = Snapshots(me, state, schedule, dataset, SNAPSHOTS, COMPARE_REPLICAS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    # if: evaluation
    if evaluation.is_owed:  # cut short after this step, when the workers were asked to leave
        evaluation.run(position)
    # end
    loader = index_loader.IndexLoader(  # = loader
        me, dataset, schedule, MICRO_BATCH_SIZE, num_workers=NUM_WORKERS
    )

    for batch in loader.batches(position):
        optimizer.zero_grad()  # = zero_grad
        loss = step.forward_backward(batch)  # = gradients  # of the global batch, weighted by true counts
        if me.stopped:  # StopTraining on some rank, or asked to leave without data: this step changes nothing
            break
        # if: fp16
        scaler.unscale_(optimizer)
        # end
        # if: clip_here
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        # end
        # if: step_here
        optimizer.step()
        # end
        # if: fp16
        scaler.step(optimizer)
        scaler.update()
        # end
        # if: scheduler
        me.progress.note_rates(optimizer)  # = rates  # this step's: the schedule sets the next one's
        # end
        # if: scheduler_step
        with me.stoppable:
            scheduler.step()
        # end
        # if: ema
        average.update_parameters(model)
        # end
        position = batch.end  # finished step, samples consumed
        # if: scheduler_epoch
        if position.is_epoch_end:
            with me.stoppable:
                scheduler.step()
        # end
        me.progress.step(position, loss, optimizer)  # = progress
        # if: evaluation
        if evaluation.due(position):
            evaluation.run(position)
        # end
        if snapshots.due(position):
            snapshots.stage(position)
        if me.should_leave:  # agreed by all ranks, at the same step
            break
    snapshots.stage(position, final=True)
    worker.leave(me, position, schedule)


if __name__ == "__main__":
    worker.run(main)
