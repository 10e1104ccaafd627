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

import elasticflow
from elasticflow.runtime.data import samplers  # = import.samplers
from elasticflow.runtime.data.index_loader import open_dataset, prepare_data  # = import.index
from elasticflow.runtime.data.mixture import MixedDataset  # = import.mixture
from elasticflow.runtime.data.shard_loader import open_shards  # = import.shards
from elasticflow.runtime.evaluation.metric import Metric  # = import.metric
from elasticflow.runtime.evaluation.several import Evaluations  # = import.several
from elasticflow.runtime.evaluation.stop_when import StopWhen  # = import.stop_when
from elasticflow.runtime.hooks.hooks import Hook, Hooks  # = import.hooks
from elasticflow.runtime.measuring.speed import Measures  # = import.measures
from elasticflow.runtime.own_loop.join import join_job
from elasticflow.runtime.snapshot.snapshots import Keep, Policy, load_weights  # = import.snapshots
from elasticflow.runtime.training.evaluation import Evaluation  # = import.evaluation
from elasticflow.runtime.model.gradient_checkpointing import checkpoint_activations  # = import.ac
from elasticflow.runtime.training.loss import with_count  # = import.count
from elasticflow.runtime.training.param_groups import Group, log_groups, parameter_groups  # = import.groups
from elasticflow.runtime.training.several_optimizers import CountedSchedule, Schedules  # = import.schedules
from elasticflow.runtime.training.unwrap import unwrap_model  # = import.unwrap
from elasticflow.runtime.worker import program
from torch import Tensor, nn  # = import.torch
from torch.amp import GradScaler  # = import.scaler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn  # = import.ema

HERE = Path(__file__).resolve().parent
ROOT = (HERE / "../../../../..").resolve()  # = root  # the project
sys.path[:0] = [str(ROOT / part) for part in ["."]]  # = path  # the job's own code comes first

SEED = 1234  # = seed
EPOCHS = 5  # = epochs  # passes over the dataset
STEPS = 2000  # = steps  # optimizer steps
GLOBAL_BATCH_SIZE = 256  # = global_batch_size  # samples per step, the same at any world size
MICRO_BATCH_SIZE = 64  # = micro_batch_size  # most samples of one forward
SHARDS = 16  # = shards  # of the data; each is read in order, by one worker at a time
TAIL = "spill"  # = tail  # samples at an epoch's end that fill no batch
NUM_WORKERS = 0  # = num_workers  # loader processes of each worker
PRECISION = "fp32"  # = precision
CLIP_GRAD_NORM = 1.0  # = clip
EMA = 0.999  # = ema  # what the averaged weights keep of themselves at each step
GRADIENTS = elasticflow.Gradients(precision=PRECISION, on_nonfinite="stop")  # = gradients
SNAPSHOTS = Policy(uri=None, every=("10 min", "1 epoch"), keep=Keep(last=3))  # = snapshots


def main() -> None:
    """Train to the end, or to the step at which all ranks agree to leave; every rank."""
    run = join_job(  # = join
        name="mnist",
        digest="0000000000000000",
        folder=HERE,
        seed=SEED,
        snapshots=SNAPSHOTS,
        gradients=GRADIENTS,
        compare_replicas="1000 steps",
        measures=Measures(count_name="tokens"),
    )
    worker = run.worker
    # if: prepare

    from tests.compiler.golden.pieces import download  # = prepare.import

    prepare_data(worker, download)  # = prepare  # by one worker of each node
    # end

    # if: sample
    from tests.compiler.golden.pieces import Padded, curriculum, rates, sample, two_optimizers
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW
    from torch.optim.lr_scheduler import CosineAnnealingLR

    # end
    from examples.mnist import Net, accuracy, digits  # = imports

    def training_step(model: nn.Module, batch: Any) -> Tensor:  # = step.def
        """Return the mean loss of one micro-batch of (inputs, targets)."""  # = step.doc
        inputs, targets = batch  # = step.unpack
        return cross_entropy(model(inputs), targets)  # = step.call

    dataset = open_dataset(worker, lambda: MixedDataset(digits(split="train")), "train")  # = dataset
    order = samplers.draw_by_weight(worker, dataset, "weights")  # = order
    # if: collator
    worker.seed_for("collate")
    collator = Padded(padding=0)  # = collator
    # end
    batches = run.batches(  # = batches
        dataset, size=GLOBAL_BATCH_SIZE, epochs=EPOCHS, tail=TAIL, order=order, collate=collator
    )
    worker.seed_for("model")  # what is drawn at random follows from the seed and this name alone
    model = Net(width=16)  # = model
    model.to(run.device)
    # if: weights
    load_weights(model, "base.safetensors")  # = weights
    # end
    # if: checkpointing
    checkpoint_activations(model, ["blocks.*"])  # = checkpointing  # computed again in the backward pass
    # end
    # if: compile
    model.compile()
    # end
    worker.seed_for("optimizer")
    # if: groups
    groups = [Group(ndim=1, args={"weight_decay": 0.0})]  # = groups
    # end
    # if: optimizer
    optimizer = AdamW(model.parameters(), lr=1e-3)  # = optimizer
    # end
    # if: manual
    optimizers = two_optimizers(model, lr=1e-3)  # = optimizer
    # end
    # if: groups
    log_groups(worker, optimizer, groups)  # = log_groups
    # end
    # if: scheduler
    worker.seed_for("scheduler")
    # end
    # if: scheduler_of_one
    scheduler = CosineAnnealingLR(optimizer, T_max=1000)  # = scheduler
    # end
    # if: scheduler_of_several
    scheduler = Schedules(rates(optimizers, 0.9))  # type: ignore[assignment]  # = scheduler
    # end
    # if: fp16
    scaler = GradScaler(worker.device.type)
    # end
    # if: ema
    decay = get_ema_multi_avg_fn(EMA)  # type: ignore[no-untyped-call]
    average = AveragedModel(model, multi_avg_fn=decay)
    # end
    # if: evaluation_of_one
    test_set = open_dataset(worker, lambda: digits(split="test"), "evaluation")  # = test_set
    evaluation = Evaluation(  # = evaluation
        worker,
        model,
        training_step,
        test_set,
        run.schedule,
        every=("1 epoch",),
        metrics={},
        best="max accuracy",
    )
    # end
    # if: evaluation_of_several
    evaluation = Evaluations(worker, run.schedule, {}, stop_when=StopWhen("loss", "min"))  # type: ignore[assignment]  # = evaluations
    # end
    # if: hooks
    hooks = Hooks(worker, model, on_step=Hook(sample, "mine:sample", every=100))  # = hooks
    run.call(hooks)
    # end
    run.keep(model=model, optimizer=optimizer, evaluation=evaluation)  # = keep  # restored here

    for batch in batches:  # from where the run stands to its end, or till all ranks leave
        # if: optimizer
        optimizer.zero_grad()
        # end
        loss = run.gradients(lambda part: training_step(model, part.data), batch)  # = loss
        # if: fp16
        scaler.unscale_(optimizer)
        # end
        # if: clip_here
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)  # = clip_gradient
        # end
        # if: norm_here
        worker.log_grad_norm_of(model)
        # end
        # if: step_here
        optimizer.step()
        # end
        # if: fp16
        scaler.step(optimizer)
        scaler.update()
        # end
        # if: ema
        average.update_parameters(model)
        # end
        # if: scheduler_step
        worker.step_scheduler(scheduler, optimizer)  # = step_scheduler
        # end
        # if: scheduler_epoch
        if batch.end.is_epoch_end:
            worker.step_scheduler(scheduler, optimizer)  # = step_scheduler
        # end
        run.step(loss=loss)  # = step  # its line in the log; evaluation and snapshot where they are due
    run.finish()


if __name__ == "__main__":
    program(main)
