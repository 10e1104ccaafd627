"""Trains several models with a fixed order of sums, or plainly; rank 0 prints a digest of each model's trajectory."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.runtime import worker
from elasticflow.runtime.data import index_loader, index_schedule
from elasticflow.runtime.training import fixed_order_sum
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from tests.end_to_end.trajectory_models import Transformer, cnn, mlp

HERE = Path(__file__).resolve().parent
STEPS = 7  # across the end of an epoch

parser = argparse.ArgumentParser()
parser.add_argument("--shards", type=int, default=8)
parser.add_argument("--plain", action="store_true", help="DistributedDataParallel instead")
parser.add_argument("--processes", type=int, default=0)
parser.add_argument(
    "--put", action="store_true", help="the step uses an operation without a deterministic form"
)
args = parser.parse_args()


class Images:
    """Noise with labels, and noise of the moment."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(150, 1, 8, 8, generator=generator)
        self.targets = torch.randint(0, 4, (150,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.1 * torch.randn(1, 8, 8) + 0.1 * random.random(), self.targets[index]


class Marked(Images):
    """The same, with one sample of which no loss is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs[77, 0, 0, 0] = math.inf


class Mixed(nn.Module):
    """A part that only some samples use, in a checkpoint; one that none uses; a buffer that a forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 32)
        self.seldom = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.last = nn.Linear(32, 4)
        self.code = nn.Buffer(torch.zeros(32))

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        hidden = torch.relu(self.norm(self.first(inputs.flatten(1))))
        self.code.lerp_(hidden.detach().mean(0), 0.1)
        if inputs.sum() > 0:
            hidden = hidden + checkpoint(self.seldom, hidden, use_reentrant=True)
        result: Tensor = self.last(hidden + self.code)
        return result


def training_step(model: nn.Module, batch: Any) -> Any:
    """Return the loss of one piece."""
    inputs, targets = batch
    if args.put:
        torch.zeros(4, requires_grad=True).clone().put_(torch.tensor([0, 0]), torch.ones(2))
    return cross_entropy(model(inputs), targets)


def sums_step(model: nn.Module, batch: Any) -> Any:
    """Return sum of the losses and their number."""
    inputs, targets = batch
    return cross_entropy(model(inputs), targets, reduction="sum"), len(targets)


def train(me: Any, name: str) -> str:
    """Return the digest of all weights and buffers after each step; every rank."""
    build, step, precision, images = {
        "mlp": (mlp, training_step, "fp32", Images),
        "cnn": (cnn, sums_step, "fp32", Images),
        "transformer": (Transformer, training_step, "bf16", Images),
        "mixed": (Mixed, training_step, "fp32", Marked),
        "scaled": (Mixed, training_step, "fp32", Marked),
    }[name]
    me.reseed()
    dataset = index_loader.open_dataset(me, images, name)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 4))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    scaler = GradScaler("cpu", enabled=name == "scaled")
    options: dict[str, Any] = {"precision": precision, "on_nonfinite": "skip"}
    if scaler.is_enabled():
        options["scaler"] = scaler
    fixed_order_sum.BUCKET_BYTES = (
        512  # these models would fit into one bucket, and nothing would be sent early
    )
    group = (
        DDPStep(me, model, step, ddp={}, **options)
        if args.plain
        else ExactStep(me, model, step, virtual_shards=args.shards, **options)
    )
    schedule = index_schedule.IndexSchedule(len(dataset), 32, steps=STEPS, tail="short", seed=3)
    loader = index_loader.IndexLoader(
        me,
        dataset,
        schedule,
        None,
        num_workers=args.processes,
        virtual_shards=None if args.plain else args.shards,
    )
    me.start_training(schedule.start, schedule, model, log_every=1)
    digest, skipped = hashlib.sha256(), 0
    for batch in loader.batches(schedule.start):
        optimizer.zero_grad()
        loss = group.forward_backward(batch)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        skipped += group.was_skipped
        digest.update(repr((loss, scaler.state_dict())).encode())
        states = [*model.state_dict().items(), *average.state_dict().items()]
        # What only the first shard decides is rank 0's until the next step sends it, whose weights then depend on it.
        whole = [tensor for key, tensor in states if not key.endswith("code")]
        for tensor in (
            model.parameters() if args.plain else whole
        ):  # plain replicas' BatchNorm statistics differ
            digest.update(tensor.detach().numpy().tobytes())
    assert (skipped > 0) == (images is Marked)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    return digest.hexdigest()


def main() -> None:
    """Train; every rank."""
    policy = SnapshotSettings(uri=None, every=("1000 steps",))
    me = worker.join("exact", "digest", HERE, policy, seed=7, threads=1)
    names = ("mlp", "cnn", "transformer", *(() if args.plain else ("mixed", "scaled")))
    found = {name: train(me, name) for name in names}
    digests = me.gather_text(json.dumps(found))
    if me.rank == 0:
        (me.run_folder.path / "digests.json").write_text(json.dumps([json.loads(text) for text in digests]))
    me.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    worker.program(main)
