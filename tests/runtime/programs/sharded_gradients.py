"""A loop whose model is shared among ranks, with gradients in a fixed order; variations come from the command line."""

from __future__ import annotations

import argparse
import os
import signal
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import elasticflow as ef
from elasticflow.runtime.process import devices, process_group
from elasticflow.runtime.state import codec
from elasticflow.runtime.training.gradient_checkpointing import checkpoint_activations
from tests.pretended_device import DEVICE, pretended
from tests.runtime.programs import dying
from tests.runtime.programs.sharded_parts import WORDS, Net, Sentences

parser = argparse.ArgumentParser()
parser.add_argument("--shard", type=int, default=0, help="ranks that share a model; 0: no shard=")
parser.add_argument("--virtual-shards", type=int, default=6, help="0: none, in batch mode")
parser.add_argument("--samples", type=int, default=50)
parser.add_argument("--size", type=int, default=12)
parser.add_argument("--micro-batch-size", type=int)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--every", default="4 steps")
parser.add_argument("--clip", action="store_true")
parser.add_argument("--precision", default="fp32")
parser.add_argument("--norms", action="store_true", help="BatchNorm in the last layer")
parser.add_argument("--checkpointed", action="store_true", help="activations of blocks are computed again")
parser.add_argument("--compiled", action="store_true", help="blocks are compiled")
parser.add_argument("--stays-gathered", action="store_true", help="parameters, until the backward")
parser.add_argument(
    "--offload",
    action="store_true",
    help="keeps parts in the CPU's memory; ELASTICFLOW_DEVICE=lazy is the pretended device",
)
parser.add_argument(
    "--thaw-at",
    type=int,
    help="step from which the blocks are trained, and the embedding is frozen; before, the other way round",
)
parser.add_argument(
    "--count",
    action="store_true",
    help="sums and counts of even words, not means; parts without any count nothing",
)
parser.add_argument(
    "--kill-at", type=int, help="rank 0 gets SIGKILL during this step, once a snapshot is committed"
)
parser.add_argument("--term-at", type=int, help="rank 0 gets SIGTERM during this step")
parser.add_argument(
    "--stop",
    default="",
    help="before, within or after: where the last rank raises StopTraining; data: as every rank reads samples",
)
parser.add_argument("--stop-at", type=int, default=3, help="step of --stop before, within and after")
parser.add_argument(
    "--odd",
    default="",
    help="unused, skipped, skipped at once, skipped inside, decay, optimizer, fused, tied, scalar, list, meta, collective, momentum, "
    "momentum beside: what is refused",
)
args = parser.parse_args()

WIDTH = 6
at = {"step": 0}


def maybe_stop(where: str) -> None:
    """Raise StopTraining on the last rank, if asked."""
    if (where, at["step"]) == (args.stop, args.stop_at) and run.rank == run.world_size - 1:
        raise ef.StopTraining("good enough")


def skipped_inside(block: nn.Module) -> Any:
    """Return the forward of a block that leaves its own layers out on one rank."""
    whole = block.forward
    return lambda x: x if at["step"] == 2 and run.rank == 1 else whole(x)


def follow(net: nn.Module) -> None:
    """Have a frozen layer follow another one, as in MoCo and BYOL."""
    with torch.no_grad():
        weight = net.get_parameter("frozen.weight")
        weight.mul_(0.9).add_(weight, alpha=0.2)


class OddNet(Net):
    """The net with dropout, with BatchNorm in front of its head if asked, and with what is refused."""

    def __init__(self) -> None:
        super().__init__(WIDTH, dropout=0.2)
        self.last = nn.BatchNorm1d(WIDTH) if args.norms else nn.Identity()
        if args.odd == "unused":
            self.extra = nn.Linear(2, 2)
        if args.odd == "skipped inside":
            self.blocks[1].forward = skipped_inside(self.blocks[1])
        if args.odd == "scalar":
            self.scale = nn.Parameter(torch.zeros(()))
        if args.odd == "tied":
            first, second = (block.get_submodule("up") for block in list(self.blocks)[:2])
            second.weight = first.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores of words."""
        if args.odd == "collective":
            dist.all_reduce(torch.ones(()))
        if args.odd == "momentum":
            follow(self)
        x = self.embed(tokens).mean(1)
        for number, block in enumerate(self.blocks):
            if number == 1:
                maybe_stop("within")
            skips = (args.odd, at["step"]) in (("skipped", 2), ("skipped at once", 1))
            if not (skips and number == 1 and run.rank == 1):
                x = block(x)
        scores: Tensor = self.head(self.last(self.frozen(x)))
        return scores


class NoisySentences(Sentences):
    """Noise of the moment decides on one of the four words."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if args.stop == "data" and at["step"]:
            raise ef.StopTraining("good enough")
        words, _ = super().__getitem__(index)
        words[0] = torch.randint(0, WORDS, ())
        return words, int(words.sum()) % WORDS


device = ExitStack()  # to the end of the process
if os.environ.get("ELASTICFLOW_DEVICE") == DEVICE.type:
    device.enter_context(pretended())
    devices.choose_device = lambda *_: DEVICE
    process_group._backend = lambda *_: "gloo"
    vars(codec)["refusal"] = lambda *_, **__: None  # of a class that torch does not know
run = ef.join(
    seed=7,
    every=args.every,
    threads=1,
    gradients=ef.Gradients(precision=args.precision, virtual_shards=args.virtual_shards or None),
    shard=ef.Sharding(
        args.shard,
        reshard_after_forward=not args.stays_gathered,
        offload="cpu" if args.offload else None,
    )
    if args.shard
    else None,
)
torch.manual_seed(5)
with torch.device("meta" if args.odd == "meta" else "cpu"):
    model: nn.Module = OddNet()
if args.checkpointed:
    checkpoint_activations(model, ["blocks.*"])
if args.compiled:
    for each in model.get_submodule("blocks").children():
        each.compile()
if args.thaw_at:
    model.get_submodule("blocks").requires_grad_(requires_grad=False)
if run.device == DEVICE:
    model.to(run.device)
    model.get_submodule("head").weight = model.get_submodule("embed").weight  # tied again
if args.shard:
    model = run.wrap(model, **({"blocks": []} if args.odd == "list" else {}))
trained = [p for p in model.parameters() if p.requires_grad or args.thaw_at]
optimizer: Any = torch.optim.AdamW(trained, lr=0.02, fused=True if args.odd == "fused" else None)
if args.odd == "optimizer":
    optimizer = torch.optim.LBFGS(trained)
scaler = {"scaler": torch.amp.GradScaler("cpu")} if args.precision == "fp16" else {}
run.keep(model=model, optimizer=optimizer, **scaler)


def loss_of(part: Any) -> Any:
    """Return the loss of a part."""
    maybe_stop("before")
    if args.odd == "momentum beside":
        follow(model)
    scores = model(part.inputs)
    maybe_stop("after")
    if args.odd == "decay":
        return cross_entropy(scores, part.targets) + model.get_parameter("head.weight").square().sum()
    if args.count:
        counted = part.targets % 2 == 0
        if not counted.any():
            return {"loss": cross_entropy(scores[counted], part.targets[counted]), "count": 0}
        return cross_entropy(scores[counted], part.targets[counted], reduction="sum"), int(counted.sum())
    return cross_entropy(scores, part.targets)


for batch in run.batches(
    NoisySentences(args.samples),
    size=args.size,
    epochs=args.epochs,
    tail="short",
    micro_batch_size=args.micro_batch_size,
):
    at["step"] = batch.end.step
    if run.rank == 0 and at["step"] == args.kill_at:
        dying.die_once_committed()
    if run.rank == 0 and at["step"] == args.term_at:
        os.kill(os.getpid(), signal.SIGTERM)
    if at["step"] == args.thaw_at:
        model.get_submodule("blocks").requires_grad_(requires_grad=True)
        model.get_submodule("embed").requires_grad_(requires_grad=False)
    optimizer.zero_grad()
    loss = run.gradients(loss_of, batch)
    if args.clip:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        run.worker.log_grad_norm(norm)
    optimizer.step()
    run.step(loss=loss)
run.finish()
