"""A small training job in the form of the generated entry point; its variations come from the command line."""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from elasticflow import StopTraining
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.runtime import worker
from elasticflow.runtime.data import index_loader, index_schedule
from elasticflow.runtime.snapshot import snapshots as snapshot
from elasticflow.runtime.snapshot.staging_copy import Copier
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import ddp as replicas
from elasticflow.runtime.training import evaluation as evaluate
from elasticflow.runtime.training import exact
from tests.runtime.programs import dying

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=100)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--global-batch-size", type=int, default=16)
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument("--tail", default="spill")
parser.add_argument("--every", default="1000 steps")
parser.add_argument("--memory", help="held in memory at each of these")
parser.add_argument("--counting", action="store_true", help="a model whose parameter counts its samples")
parser.add_argument("--processes", type=int, default=0)
parser.add_argument("--sums", action="store_true", help="the step returns (sum of losses, count)")
parser.add_argument("--term-at", type=int, help="rank 0 gets SIGTERM during this step")
parser.add_argument(
    "--term-in", help="SIGTERM while this is done: build; metric, on rank 1 after --at; read, of sample --at"
)
parser.add_argument("--at", type=int)
parser.add_argument(
    "--kill-at", type=int, help="rank 0 gets SIGKILL during this step, once a snapshot was committed"
)
parser.add_argument("--nan-at", type=int, help="the loss is not a number in this step")
parser.add_argument("--raise-at", type=int, help="rank 1 raises in this step")
parser.add_argument("--flip-at", type=int, help="a bit of a parameter of rank 1 is flipped after this step")
parser.add_argument(
    "--overtaken-at", type=int, help="a copy of this step on rank 1 was written to, as on a device"
)
parser.add_argument("--compare", help="when replicas are compared")
parser.add_argument("--on-nonfinite", default="stop")
parser.add_argument("--precision", default="fp32")
parser.add_argument(
    "--odd", action="store_true", help="a model with an unused layer and a buffer that training reads"
)
parser.add_argument(
    "--draws-from", type=int, default=1000, help="the step draws from python's and numpy's generators"
)
parser.add_argument("--shards", type=int, help="a fixed order of sums over so many virtual shards")
parser.add_argument("--data-seed", type=int, default=0)
parser.add_argument(
    "--stop-at", type=int, help="rank 1 raises StopTraining in this step, or whoever reads this sample"
)
parser.add_argument(
    "--stop-in", default="step", help="step, data, sample, backward, schedule, metric or loop"
)
args = parser.parse_args()


class Images:
    """Noise with labels; each sample is the same whenever it is read, plus noise of the moment."""

    def __init__(self, samples: int, *, is_noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(args.data_seed)
        self.inputs = torch.randn(samples, 1, 8, 8, generator=generator)
        self.targets = torch.randint(0, 4, (samples,), generator=generator)
        self.is_noisy = is_noisy

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.is_noisy:
            maybe_stop("data")
            if (index, args.stop_in) == (args.stop_at, "sample"):  # also in a loader process
                raise StopTraining("good enough")
        noise = 0.1 * torch.randn(1, 8, 8) if self.is_noisy else 0.0
        return self.inputs[index] + noise, self.targets[index]


class Numbers:
    """The sample's number."""

    def __len__(self) -> int:
        return int(args.samples)

    def __getitem__(self, index: int) -> int:
        if (index, args.term_in) == (args.at, "read"):
            os.kill(os.getppid(), signal.SIGTERM)  # of the rank that waits for this loader process
            time.sleep(600)
        return index


class Counter(nn.Module):
    """Its weight grows by 1 / global batch size (at a learning rate of 1) for each time a sample is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(args.samples))

    def forward(self, indices: Tensor) -> Tensor:
        """Return what to descend on."""
        return -self.seen[indices]


class Odd(nn.Module):
    """Leaves a layer out of every second step; its spectral norm reads and writes a buffer in training."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.spectral_norm(nn.Linear(64, 16))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 4)
        self.extra = nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the outputs."""
        x = self.norm(self.first(inputs.flatten(1)))
        outputs: Tensor = self.last(x) + (self.extra(x) if step_now % 2 else 0)
        return outputs


def build_model() -> nn.Module:
    """Return the model; every rank."""
    if args.term_in == "build":
        os.kill(os.getpid(), signal.SIGTERM)
    elif args.term_at:
        signal.signal(
            signal.SIGTERM, lambda *_: None
        )  # as some libraries do: taken back before the first step
    if args.odd:
        return Odd()
    if args.counting:
        return Counter()
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 4)
    )


def build_optimizer(model: nn.Module) -> Optimizer:
    """Return the optimizer; every rank."""
    return SGD(model.parameters(), lr=1.0) if args.counting else AdamW(model.parameters(), lr=1e-2)


step_now = 0


def maybe_stop(place: str) -> None:
    """Raise StopTraining on rank 1, if it is to come from here."""
    if (step_now, place) == (args.stop_at, args.stop_in) and os.environ.get("RANK", "0") == "1":
        raise StopTraining("good enough")


def last_rate(step: int) -> float:
    """Return a learning rate that is halved at each step."""
    if step:  # building the schedule asks for the first one
        maybe_stop("schedule")
    return 0.5**step


def maybe_flip(model: nn.Module) -> None:
    """Flip a bit of one number, not its last, which a step may round away: once there is a snapshot to go back to."""
    if os.environ.get("RANK") != "1":
        return
    # Out of memory the writer takes the newest step that all ranks hold: before this rank holds the one after the due step.
    if step_now == (args.flip_at or 0) - bool(args.memory):
        dying.await_commit()
    if step_now == args.flip_at:
        parameter = next(model.parameters()).detach()
        parameter.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 10)


def maybe_overtake(snapshots: snapshot.Snapshots, me: Any) -> None:
    """Have *snapshots* copy as from a device."""
    if args.overtaken_at:
        snapshots._copier = Overtaken(me.rank)
        if snapshots._memory_tier is not None:
            snapshots._memory_tier._copier = snapshots._copier
        me.vote.when("snapshot", snapshots._asks_for_snapshot)


class Overtaken(Copier):
    """Copies the CPU's memory, and says of one copy what a device's copier may say."""

    def __init__(self, rank: int) -> None:
        self._rank, self._key = rank, ""

    def start(self, shard: Any, target: memoryview, *_: Any, **__: Any) -> None:
        """See `Copier`."""
        shard.copy_into(target)
        self._key = "model/w" if (step_now, self._rank) == (args.overtaken_at, 1) else ""

    def then(self, action: Callable[[str | None], None]) -> None:
        """See `Copier`."""
        action(self._key or None)


def training_step(model: nn.Module, batch: Any) -> Any:
    """Return the loss of one micro-batch; every rank."""
    rank = int(os.environ.get("RANK", "0"))
    if step_now == args.raise_at and rank == 1:
        raise ValueError("label 9 is out of range")
    if rank == 0 and step_now == args.term_at:
        os.kill(os.getpid(), signal.SIGTERM)
    if rank == 0 and step_now == args.kill_at:
        dying.die_once_committed()
    if args.counting:
        return model(batch).mean()
    inputs, targets = batch
    outputs = model(inputs)
    maybe_stop("step")  # after the forward: buffers have changed, numbers were drawn
    if outputs.requires_grad:
        outputs.register_hook(lambda _: maybe_stop("backward"))
    loss = cross_entropy(outputs, targets, reduction="sum" if args.sums else "mean")
    if step_now >= args.draws_from:
        loss = loss * (0.5 + random.random() + np.random.rand())  # noqa: NPY002  # what datasets draw from
    if step_now == args.nan_at:
        loss = loss * torch.nan
    return (loss, len(targets)) if args.sums else loss


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the share of right answers."""
    maybe_stop("metric")
    if (step_now, args.term_in, os.environ.get("RANK")) == (args.at, "metric", "1"):
        os.kill(os.getpid(), signal.SIGTERM)
    return (outputs.argmax(1) == targets).float().mean()


def main() -> None:
    """Train; every rank."""
    global step_now  # noqa: PLW0603
    policy = SnapshotSettings(uri=None, every=(args.every,), keep=Keep(last=3), memory=args.memory)
    me = worker.join("small", "digest", HERE, policy, seed=7, threads=1)
    # What is imported from here on draws by seed and name.
    assert type(sys.meta_path[0]).__module__ == "elasticflow.runtime.process.seeded_imports"
    dataset = index_loader.open_dataset(
        me, Numbers if args.counting else lambda: Images(args.samples, is_noisy=True), "train"
    )
    schedule = index_schedule.IndexSchedule(
        len(dataset), args.global_batch_size, epochs=args.epochs, tail=args.tail, seed=7
    )
    model = build_model().to(me.device)
    optimizer = build_optimizer(model)
    options: dict[str, Any] = {"precision": args.precision, "on_nonfinite": args.on_nonfinite}
    ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": True} if args.odd else {}
    group = (
        exact.ExactStep(me, model, training_step, virtual_shards=args.shards, **options)
        if args.shards
        else replicas.DDPStep(me, model, training_step, ddp=ddp, **options)
    )
    scheduler: LRScheduler | None
    if args.counting:
        scheduler = evaluation = None
    else:
        scheduler = (
            LambdaLR(optimizer, last_rate)
            if args.stop_at
            else OneCycleLR(optimizer, max_lr=1e-2, total_steps=schedule.remaining(schedule.start) + 1)
        )
        test_set = index_loader.open_dataset(me, lambda: Images(30), "evaluation")
        evaluation = None if args.sums else evaluate.Evaluation(
            me, model, training_step, test_set, schedule, precision=args.precision, every=("1 epoch",),
            metrics={"accuracy": accuracy}, best="max accuracy", batch_size=7,
        ).alone()  # fmt: skip
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, evaluation=evaluation)
    snapshots = snapshot.Snapshots(me, state, group, schedule, dataset, policy, args.compare)
    maybe_overtake(snapshots, me)
    position = snapshots.restore()
    me.start_training(position, schedule, model, log_every=1, restored=snapshots.restored)
    if evaluation is not None:
        evaluation.run_if_owed(position)
    loader = index_loader.IndexLoader(
        me, dataset, schedule, args.micro_batch_size, num_workers=args.processes, virtual_shards=args.shards
    )
    for batch in loader.batches(position):
        step_now = batch.end.step
        optimizer.zero_grad()
        loss = group.forward_backward(batch)
        if me.stopped:
            break
        optimizer.step()
        maybe_flip(model)
        if scheduler is not None:
            me.step_scheduler(scheduler, optimizer)
        position = batch.end
        me.log_step(position, loss, optimizer)
        if (step_now, me.rank, args.stop_in) == (args.stop_at, 1, "loop"):
            me.stop("good enough")
        if evaluation is not None:
            evaluation.after_step(position)
        snapshots.after_step(position)
        if me.should_leave:
            break
    snapshots.finish(position)
    worker.leave(me, position, schedule, evaluation)


if __name__ == "__main__":
    worker.program(main)
