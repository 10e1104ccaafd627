"""Train the job `mnist`.

Made by elasticflow from jobs/mnist.toml (job digest 0000000000000000).  # = header
Make it again:          elasticflow plan jobs/mnist.toml -o DIR  # = again
Run it without the CLI: bash torchrun.sh, or as one process: python train.py
It may be edited: `elasticflow run` and `resume` notice, say so, and never overwrite it unasked.
"""

from __future__ import annotations

import os  # = import.os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import elasticflow
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.runtime.data import samplers  # = import.samplers
from elasticflow.runtime.data.dataset import OpenedDataset  # = import.opened
from elasticflow.runtime.data.index_loader import open_dataset, prepare_data  # = import.index
from elasticflow.runtime.data.mixture import MixedDataset  # = import.mixture
from elasticflow.runtime.data.order.order import Order  # = import.order
from elasticflow.runtime.data.shard_loader import open_shards  # = import.shards
from elasticflow.runtime.evaluation.metric import Metric  # = import.metric
from elasticflow.runtime.evaluation.stop_when import StopWhen  # = import.stop_when
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.hooks import Hook, Hooks  # = import.hooks
from elasticflow.runtime.loop.join import join_job
from elasticflow.runtime.loop.run import Run
from elasticflow.runtime.measuring.speed import Measures  # = import.measures
from elasticflow.runtime.process import float32, random_streams  # = import.process
from elasticflow.runtime.process.context import Worker  # = import.worker
from elasticflow.runtime.training.deferred_build import DeferredBuild  # = import.build
from elasticflow.runtime.training.shard_model import shard_model  # = import.sharding
from elasticflow.runtime.state.loading import load_weights  # = import.weights
from elasticflow.runtime.training.channels_last import to_channels_last  # = import.channels
from elasticflow.runtime.training.evaluation import Evaluation, Evaluations  # = import.evaluation
from elasticflow.runtime.training.gradient_checkpointing import checkpoint_activations  # = import.ac
from elasticflow.runtime.training.loss import with_count  # = import.count
from elasticflow.runtime.training.metric_schedule import MetricSchedule  # = import.metric_schedule
from elasticflow.runtime.training.param_groups import Group, log_groups, parameter_groups  # = import.groups
from elasticflow.runtime.training.several_optimizers import CountedSchedule, Schedules  # = import.schedules
from elasticflow.runtime.training.unwrap import unwrap_model  # = import.unwrap
from elasticflow.runtime.worker import program
from torch import Tensor, nn  # = import.torch
from torch.amp import GradScaler  # = import.scaler
from torch.optim import Optimizer  # = import.optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # = import.ema

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../../..").resolve()  # = root  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # = path  # the job's own code comes first

SEED = 1234  # = seed  # determines the order of samples and all random numbers
EPOCHS = 5  # = epochs  # passes over the dataset
STEPS = 2000  # = steps  # optimizer steps
GLOBAL_BATCH_SIZE = 256  # = global_batch_size  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 64  # = micro_batch_size  # most samples of one forward
SAMPLES = 1438  # = samples  # of the dataset, as the job file states
SHARDS = 16  # = shards  # of the data; each is read in order, by one worker at a time
VALUES = {"vocab_size": "model.args.vocab_size"}  # = values  # attributes of the dataset that arguments need
TAIL = "spill"  # = tail  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # = num_workers  # loader processes of each worker
WEIGHTS = "base.safetensors"  # = weights  # initial weights of the model
PRECISION = "fp32"  # = precision
CLIP_GRAD_NORM = 1.0  # = clip
EMA = 0.999  # = ema  # decay of the averaged weights at each step
SHARDING = elasticflow.Sharding(shard=2)  # = sharding
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")  # = gradients
SNAPSHOTS = SnapshotSettings(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))  # = snapshots


"""The functions that make the objects of the training."""  # = functions


def train(run: Run, batches: Iterable[Batch], model: nn.Module, optimizer: Any) -> None:  # = train.def
    """Train from the run's current step to its end, or until all ranks agree to exit."""
    for batch in batches:
        optimizer.zero_grad()  # = zero_grad
        loss = run.gradients(lambda part: model(part.data), batch)  # = gradients_of_step
        scaler.unscale_(optimizer)  # = unscale
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)  # = gradient_norm
        optimizer.step()  # = move
        scaler.update()  # = update_scale
        average.update_parameters(model)  # = average_step
        run.worker.step_scheduler(scheduler, optimizer)  # = step_scheduler
        run.step(loss=loss)  # writes a line of the log; evaluates and takes a snapshot when due


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to exit; every rank calls this."""
    run = join_job(folder=HERE, seed=SEED, snapshots=SNAPSHOTS, gradients=GRADIENTS)  # = join
    worker = run.worker
    float32.set_tf32(enabled=True)  # = tf32
    prepare_data(worker, prepare)  # = prepare  # by one worker of each node
    dataset = open_dataset(worker, build_dataset, "train")  # = dataset
    order = build_order(worker, dataset)  # = order
    collate = build_collate()  # = collate
    batches = run.batches(dataset, size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL)  # = batches
    build = DeferredBuild(resumes=run.finds_snapshot())  # = build  # filled in block by block
    model = build_model()  # = model
    model.to(run.device)  # = to_device
    to_channels_last(model)  # = channels_last
    load_weights(model, WEIGHTS)  # = load_weights
    model.compile()  # = compile
    average = build_average(model)  # = whole_average  # a sharded model cannot be copied
    shard_model(worker, model, SHARDING)  # = shard_model
    shard_model(worker, average.module, SHARDING)  # = shard_average
    optimizer = build_optimizer(model)  # = optimizer
    optimizers = build_optimizer(model)  # = optimizers
    log_groups(worker, optimizer, build_parameter_groups())  # = log_groups
    scheduler = build_scheduler(optimizer)  # = scheduler
    scheduler.follow(worker)  # = follow  # after each evaluation
    scaler = GradScaler(worker.device.type)  # = scaler
    average = build_average(model)  # = average
    test_set = open_dataset(worker, build_evaluation_dataset, "evaluation")  # = test_set
    evaluation = Evaluation(worker, model, training_step, test_set, run.schedule)  # = evaluation
    run.call(Hooks(worker, model, **build_hooks()))  # = hooks
    run.keep(model=model, optimizer=optimizer)  # = keep  # restored here
    train(run, batches, model, optimizer)  # = train
    run.finish()


if __name__ == "__main__":
    program(main)
