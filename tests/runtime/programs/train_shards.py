"""Trains on data shards of uneven lengths, in the form of the generated entry point; variations on the command line."""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.runtime import worker
from elasticflow.runtime.data import shard_loader, shard_schedule
from elasticflow.runtime.snapshot import snapshots as snapshot
from elasticflow.runtime.state.state import State
from elasticflow.runtime.training import ddp, exact
from tests.runtime.programs import dying

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent

parser = argparse.ArgumentParser()
parser.add_argument("--lengths", default="13,0,24,9,17,1", help="samples of each data shard")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--global-batch-size", type=int, default=12)
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument("--tail", default="spill")
parser.add_argument("--every", default="3 steps")
parser.add_argument("--processes", type=int, default=0)
parser.add_argument("--counting", action="store_true", help="a model whose parameter counts its samples")
parser.add_argument("--exact", type=int, help="so many virtual shards")
parser.add_argument("--term-at", type=int, help="rank 0 gets SIGTERM during this step")
parser.add_argument(
    "--kill-at", type=int, help="rank 0 gets SIGKILL during this step, once a snapshot was committed"
)
args = parser.parse_args()
LENGTHS = [int(text) for text in args.lengths.split(",")]


def build_dataset(shard: int, shards: int) -> Iterator[Any]:
    """Yield the samples of one shard, shuffled, with noise of the moment."""
    first = sum(LENGTHS[:shard])
    numbers = list(range(first, first + LENGTHS[shard]))
    random.shuffle(numbers)
    for number in numbers:
        if args.counting:
            yield number
        else:
            fixed = torch.Generator().manual_seed(number)
            yield torch.randn(1, 8, 8, generator=fixed) + 0.1 * torch.randn(1, 8, 8), number % 4


class Counter(nn.Module):
    """Its weight grows by 1 (at a learning rate of 1) for each time a sample is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(sum(LENGTHS)))

    def forward(self, indices: Tensor) -> Tensor:
        """Return what to descend on."""
        return -self.seen[indices]


class Net(nn.Module):
    """BatchNorm, dropout, and a buffer that is neither: each forward turns it."""

    turned: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(288, 4)
        )
        self.register_buffer("turned", torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        self.turned.mul_(0.5).add_(inputs.mean())
        outputs: Tensor = self.layers(inputs)
        return outputs + 0.01 * self.turned


def training_step(model: nn.Module, batch: Any) -> Any:
    """Return the loss of one micro-batch; every rank."""
    if args.counting:
        return model(batch).mean()
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def main() -> None:
    """Train; every rank."""
    policy = SnapshotSettings(uri=None, every=(args.every,), keep=Keep(last=3))
    me = worker.join("shards", "digest", HERE, policy, seed=7, threads=1)
    dataset = shard_loader.open_shards(me, build_dataset, "train", len(LENGTHS))
    schedule = shard_schedule.ShardSchedule(
        len(LENGTHS), args.global_batch_size, epochs=args.epochs, tail=args.tail, virtual_shards=args.exact
    )
    model = (Counter() if args.counting else Net()).to(me.device)
    optimizer = SGD(model.parameters(), lr=1.0) if args.counting else AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {"precision": "fp32", "on_nonfinite": "stop"}
    group = (
        exact.ExactStep(me, model, training_step, virtual_shards=args.exact, **options)
        if args.exact
        else ddp.DDPStep(me, model, training_step, ddp={}, **options)
    )
    state = State(model=model, optimizer=optimizer)
    snapshots = snapshot.Snapshots(me, state, group, schedule, dataset, policy)
    position = snapshots.restore()
    me.start_training(position, schedule, model, log_every=1, restored=snapshots.restored)
    loader = shard_loader.ShardLoader(
        me, dataset, schedule, args.micro_batch_size, num_workers=args.processes, virtual_shards=args.exact
    )
    for batch in loader.batches(position):
        optimizer.zero_grad()
        if me.rank == 0 and batch.end.step == args.term_at:
            os.kill(os.getpid(), signal.SIGTERM)
        if me.rank == 0 and batch.end.step == args.kill_at:
            dying.die_once_committed()
        loss = group.forward_backward(batch)
        if isinstance(model, Counter):
            assert model.seen.grad is not None
            model.seen.grad.mul_(batch.samples)  # not every step has as many
        optimizer.step()
        position = batch.end
        me.log_step(position, loss, optimizer)
        snapshots.after_step(position)
        if me.should_leave:
            break
    snapshots.finish(position)
    worker.leave(me, position, schedule)


if __name__ == "__main__":
    worker.program(main)
