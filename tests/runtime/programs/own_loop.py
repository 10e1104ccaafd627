"""A training loop of a script's own, on the five names; its variations come from the command line."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import elasticflow as ef

parser = argparse.ArgumentParser()
parser.add_argument("--samples", type=int, default=100)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--size", type=int, default=16)
parser.add_argument("--tail", default="spill")
parser.add_argument("--every", default="5 steps")
parser.add_argument("--shards", type=int, help="virtual shards: run.gradients")
parser.add_argument("--ddp", action="store_true", help="run.gradients without virtual shards")
parser.add_argument("--parts", type=int, help="samples of a part: gradient accumulation")
parser.add_argument("--processes", type=int, default=0)
parser.add_argument("--counting", action="store_true", help="a model whose parameter counts its samples")
parser.add_argument(
    "--own-generator", action="store_true", help="noise of a generator that the dataset keeps"
)
parser.add_argument("--own-data", action="store_true", help="the script reads its data itself")
parser.add_argument("--term-at", type=int, help="rank 0 gets SIGTERM during this step")
parser.add_argument(
    "--kill-at", type=int, help="rank 0 gets SIGKILL during this step, once a snapshot is committed"
)
parser.add_argument("--stop-at", type=int, help="rank 1 calls run.stop in this step")
parser.add_argument("--raise-at", type=int, help="rank 1 raises in this step")
parser.add_argument("--exit-at", type=int, help="rank 1 calls sys.exit(3) in this step")
parser.add_argument("--forget", default="", help="step, step twice or finish: not called as it should be")
parser.add_argument(
    "--overtaken", action="store_true", help="each copy that need not wait is overtaken, as on a device"
)
args = parser.parse_args()
if args.overtaken:
    from elasticflow.runtime.snapshot.staging_copy import Copier

    copy_now, overtaken = Copier.start, [""]

    def _start(self: Copier, shard: Any, target: memoryview, stepped: Any, *, waits: bool = False) -> None:
        copy_now(self, shard, target, stepped, waits=waits)
        overtaken[0] = "" if waits else "model/0.weight"

    Copier.start = _start  # type: ignore[method-assign]
    Copier.then = lambda _, action: action(overtaken[0] or None)  # type: ignore[method-assign, assignment]
if args.kill_at:
    # Which reads where the run is, and what is committed now.
    from tests.runtime.programs import dying


class Images:
    """Noise with labels, and noise of the moment."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(samples, 16, generator=generator)
        self.targets = torch.randint(0, 4, (samples,), generator=generator)
        self.own = generator if args.own_generator else None

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(16, generator=self.own)
        return self.inputs[index] + 0.1 * noise, self.targets[index]


class Numbers:
    """The sample's number, twice."""

    def __len__(self) -> int:
        return int(args.samples)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, index


class Counter(nn.Module):
    """Its weight grows by 1 / global batch size (at a learning rate of 1) for each time a sample is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(args.samples))

    def forward(self, indices: Tensor) -> Tensor:
        """Return what to descend on."""
        return -self.seen[indices]


makes_gradients = bool(args.shards or args.ddp)
how = ef.Gradients() if args.ddp else None
run = ef.join(seed=7, every=args.every, virtual_shards=args.shards, gradients=how, threads=1)
model: nn.Module
if args.counting:
    model = Counter()
else:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))
optimizer = torch.optim.SGD(
    model.parameters(), lr=1.0 if args.counting else 0.1, momentum=0 if args.counting else 0.9
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
forgotten = torch.optim.swa_utils.AveragedModel(model)
run.keep(model=model, optimizer=optimizer, scheduler=scheduler)
replicas = DistributedDataParallel(model) if run.world_size > 1 and not makes_gradients else model


def loss_of(part: Any) -> Tensor:
    """Return the mean loss over what *part* has."""
    if args.counting:
        return replicas(part.inputs).mean()  # type: ignore[no-any-return]
    return cross_entropy(replicas(part.inputs), part.targets)


def disturb(step: int) -> None:
    """Do what the command line asks for in this step."""
    if run.rank == 0 and step == args.term_at:
        os.kill(os.getpid(), signal.SIGTERM)
    if run.rank == 0 and step == args.kill_at:
        dying.die_once_committed()
    if run.rank == 1 and step == args.stop_at:
        run.stop("good enough")
    if run.rank == 1 and step == args.raise_at:
        raise ValueError("label 9 is out of range")
    if run.rank == 1 and step == args.exit_at:
        sys.exit(3)


def train() -> None:
    """Train on batches of the run."""
    data = Numbers() if args.counting else Images(args.samples)
    for batch in run.batches(
        data, size=args.size, epochs=args.epochs, tail=args.tail, num_workers=args.processes,
        micro_batch_size=args.parts if args.ddp else None,
    ):  # fmt: skip
        disturb(batch.end.step)
        optimizer.zero_grad()
        loss: Any
        if makes_gradients:
            loss = run.gradients(loss_of, batch)
        elif args.parts:
            loss = torch.zeros(())
            for part in batch.parts(args.parts):
                piece = loss_of(part) * part.share
                torch.autograd.backward(piece)
                loss += piece.detach() / run.world_size
        else:
            loss = loss_of(batch)
            (loss * batch.share).backward()
        optimizer.step()
        scheduler.step()
        if not makes_gradients:
            run.log(double=2 * float(loss))
        if args.forget != "step":
            run.step(loss=loss)
        if args.forget == "step twice":
            run.step(loss=loss)


def train_on_own_data() -> None:
    """Train on what the script reads itself."""
    data = Images(args.samples)
    while run.position.samples < args.samples and not run.should_leave:
        low = run.position.samples + 2 * run.rank
        disturb(run.position.step + 1)
        optimizer.zero_grad()
        loss = replicas(data.inputs[low : low + 2]).square().mean()
        loss.backward()
        optimizer.step()
        run.step(loss=loss, samples=2)


train_on_own_data() if args.own_data else train()
if run.is_finished and not args.counting:
    print("measured", run.evaluate(Images(30), loss=cross_entropy, name="val"))
if args.forget != "finish":
    run.finish()
