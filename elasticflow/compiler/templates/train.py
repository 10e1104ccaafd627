"""Train the job `mnist`.

Made by elasticflow from jobs/mnist.toml (job digest 0000000000000000).  #= header
Make it again:          elasticflow compile jobs/mnist.toml -o DIR  #= again
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
# if: scheduler
from torch.optim.lr_scheduler import LRScheduler
# end
# if: fp16
from torch.amp import GradScaler
# end
# if: ema
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
# end

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str((HERE / part).resolve()) for part in ["../../../../.."]]  #= path  # the job's own code

from elasticflow.runtime import data, evaluate, order, replicas, snapshot, worker  #= imports  # noqa: E402
from elasticflow.runtime.state import State  # noqa: E402

# --- values -----------------------------------------------------------------------------------------------

JOB = "mnist"  #= job
JOB_DIGEST = "0000000000000000"  #= digest
SEED = 1234  #= seed
EPOCHS = 5  #= length  # passes over the dataset
GLOBAL_BATCH_SIZE = 256  #= global_batch_size  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 64  #= micro_batch_size  # most samples one worker takes in one forward
TAIL = "spill"  #= tail  # samples at an epoch's end that fill no batch
LOADER_PROCESSES = 0  #= loader_processes  # of each worker
THREADS = 1  #= threads  # CPU threads of each worker; None: the node's cores shared out
PRECISION = "fp32"  #= precision
ON_NONFINITE = "stop"  #= on_nonfinite
CLIP_GRAD_NORM = 1.0  #= clip
DDP: dict[str, Any] = {}  #= ddp  # options of DistributedDataParallel
LOG_EVERY = 1  #= log_every  # steps
EVALUATE_EVERY = ("1 epoch",)  #= evaluate_every
SNAPSHOTS = snapshot.Policy(uri=None, every=("10 min", "1 epoch"), keep_last=3)  #= snapshots


# --- what the job file names ------------------------------------------------------------------------------


def build_model() -> nn.Module:
    """Return the model with its initial weights; every rank."""
    from examples.mnist import Net  #= model.import

    return Net(width=16)  #= model.call


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer over the model's parameters; every rank."""
    from torch.optim import AdamW  #= optimizer.import

    return AdamW(model.parameters(), lr=1e-3)  #= optimizer.call


# if: scheduler
def build_scheduler(optimizer: Optimizer) -> LRScheduler:
    """Return the learning-rate schedule; every rank."""
    from torch.optim.lr_scheduler import CosineAnnealingLR  #= scheduler.import

    return CosineAnnealingLR(optimizer, T_max=1000)  #= scheduler.call


# end
def build_dataset() -> Any:
    """Return the training data; every rank."""
    from examples.mnist import digits  #= dataset.import

    return digits(split="train")  #= dataset.call


# if: evaluation
def build_evaluation_dataset() -> Any:
    """Return the evaluation data; every rank."""
    from examples.mnist import digits  #= evaluation.import

    return digits(split="test")  #= evaluation.call


# end
# if: loss
def training_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss over one micro-batch of (inputs, targets); every rank."""
    from torch.nn.functional import cross_entropy  #= loss.import

    inputs, targets = batch
    return cross_entropy(model(inputs), targets)  #= loss.call


# end
# --- train ------------------------------------------------------------------------------------------------


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    # if: step
    from examples.mnist import training_step  #= step.import

    # end
    # if: prepare
    from examples.mnist import prepare  #= prepare.import

    # end
    # if: collate
    from examples.mnist import collate  #= collate.import

    # end
    # if: metrics
    from examples.mnist import accuracy  #= metrics.import

    # end
    me = worker.join(JOB, JOB_DIGEST, HERE, seed=SEED, threads=THREADS)  # process group, device, drain flag
    # if: prepare
    data.prepare(me, prepare)  # once per node
    # end
    dataset = data.open_dataset(me, build_dataset, "train")  #= dataset.open
    schedule = order.Schedule(len(dataset), GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, seed=SEED)  #= schedule
    model = build_model().to(me.device)
    # if: weights
    snapshot.load_weights(model, "base.safetensors")  #= weights
    # end
    # if: compile
    model.compile()
    # end
    optimizer = build_optimizer(model)
    # if: scheduler
    scheduler = build_scheduler(optimizer)
    # end
    # if: fp16
    scaler = GradScaler(me.device.type)
    # end
    # if: ema
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))  #= ema
    # end
    group = replicas.DataParallel(me, model, training_step, precision=PRECISION, on_nonfinite=ON_NONFINITE, ddp=DDP)  #= group
    # if: evaluation
    test_set = data.open_dataset(me, build_evaluation_dataset, "evaluation")
    evaluation = evaluate.Evaluation(me, model, training_step, test_set, schedule, every=EVALUATE_EVERY, metrics={"accuracy": accuracy}, best="max accuracy")  #= evaluate
    # end
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation)  #= state
    snapshots = snapshot.Snapshots(me, state, schedule, dataset, SNAPSHOTS)
    position = snapshots.restore()  # the newest good one, or the beginning
    me.start_training(position, schedule, model, log_every=LOG_EVERY)
    loader = data.Loader(me, dataset, schedule, MICRO_BATCH_SIZE, processes=LOADER_PROCESSES)  #= loader

    for batch in loader.batches(position):
        optimizer.zero_grad()
        loss = group.gradients(batch)  # of the global batch, weighted by true counts
        # if: fp16
        scaler.unscale_(optimizer)
        # end
        # if: clip
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        # end
        optimizer.step()  #= step.call
        # if: fp16
        scaler.update()
        # end
        # if: scheduler_step
        scheduler.step()
        # end
        # if: ema
        average.update_parameters(model)
        # end
        position = batch.end  # finished step, samples consumed
        # if: scheduler_epoch
        if position.is_epoch_end:
            scheduler.step()
        # end
        me.progress.step(position, loss, optimizer)
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
