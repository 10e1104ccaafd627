"""Gradients of batch mode beside those of one plain backward over the whole batch, in many forms; rank 0 writes both."""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.runtime import worker
from elasticflow.runtime.data import index_loader, index_schedule
from elasticflow.runtime.training import evaluation
from elasticflow.runtime.training.ddp import DDPStep
from tests.runtime.positions import end_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.process.position import Position

HERE = Path(__file__).resolve().parent
SAMPLES, BATCH = 26, 10  # the last step has six, so that of more than three ranks some have none
CLASSES, LENGTH = 5, 6
SCHEDULE = index_schedule.IndexSchedule(SAMPLES, BATCH, epochs=1, seed=2)


class Sentences:
    """Tokens, and how many of them count: none in the first half of the first batch, so that rank 0 has none at all."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, CLASSES, (samples, LENGTH), generator=generator)
        self.silent = set(SCHEDULE.indices(np.arange(BATCH // 2)).tolist())

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], torch.tensor(0 if index in self.silent else 1 + index % LENGTH)


class Net(nn.Module):
    """Predicts the next token.

    Args:
        how: "reentrant" and "not reentrant" recompute the middle, "unused" leaves a layer out, "plain" does neither.
        dropout: In the middle.
    """

    def __init__(self, how: str = "plain", dropout: float = 0.0) -> None:
        super().__init__()
        self.how = how
        self.embed = nn.Embedding(CLASSES, 16)
        self.middle = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 16))
        self.extra = nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the outputs, (samples, tokens, classes)."""
        x = self.embed(tokens)
        if self.how.endswith("reentrant"):
            x = checkpoint(self.middle, x, use_reentrant=self.how == "reentrant")
        else:
            x = self.middle(x)
        if self.how != "unused":
            x = x + self.extra(x)
        outputs: Tensor = self.head(x)
        return outputs


def mean_step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean over samples."""
    tokens, _ = batch
    return cross_entropy(model(tokens).transpose(1, 2), tokens.roll(1, 1))


def token_step(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Return the sum over the tokens that count, and how many do."""
    tokens, counts = batch
    losses = cross_entropy(model(tokens).transpose(1, 2), tokens.roll(1, 1), reduction="none")
    counted = torch.arange(LENGTH) < counts[:, None]
    return (losses * counted).sum(), counted.sum()


def run(
    me: Any,
    step: Callable[[nn.Module, Any], Any],
    *,
    how: str,
    micro: int | None,
    precision: str,
    ddp: dict[str, Any],
) -> float:
    """Return the greatest difference, relative to the greatest gradient, over the steps of an epoch; every rank."""
    torch.manual_seed(5)
    model = Net(how)
    plain = copy.deepcopy(model)
    plain.how = "plain" if how.endswith("reentrant") else how
    dataset = index_loader.open_dataset(me, lambda: Sentences(SAMPLES), "train")
    group = DDPStep(me, model, step, precision=precision, on_nonfinite="stop", ddp=ddp)
    loader = index_loader.IndexLoader(me, dataset, SCHEDULE, micro)
    me.start_training(SCHEDULE.start, SCHEDULE, model, log_every=1)
    position, worst = SCHEDULE.start, 0.0
    for batch in loader.batches(position):
        for each in (model, plain):
            each.zero_grad()
        loss = group.forward_backward(batch)
        whole = _whole(position, dataset)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = step(plain, whole)
        total = found[0] / found[1] if isinstance(found, tuple) else found
        total.backward()
        worst = max(worst, abs(loss - total.item()) / total.item(), _difference(model, plain))
        position = batch.end
    return worst


def _whole(position: Position, dataset: Any) -> Any:
    offset, count, _ = SCHEDULE.batch(position)
    indices = SCHEDULE.indices(np.arange(offset, offset + count))
    return torch.utils.data.default_collate([dataset[i] for i in indices.tolist()])


def _difference(model: nn.Module, plain: nn.Module) -> float:
    pairs = [
        (torch.zeros_like(p) if p.grad is None else p.grad, torch.zeros_like(q) if q.grad is None else q.grad)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    ]
    largest = max(expected.abs().max() for _, expected in pairs)
    return float(max((found - expected).abs().max() for found, expected in pairs) / largest)


def dropout_on_recompute(me: Any) -> list[float]:
    """Return the gradients' greatest difference between recomputed and plain blocks with dropout; every rank."""
    worst = []
    for how in ("reentrant", "not reentrant"):
        grads = []
        for each in ("plain", how):
            torch.manual_seed(5)
            model = Net(each, dropout=0.5)
            group = DDPStep(me, model, mean_step, precision="bf16", on_nonfinite="stop", ddp={})
            batch = next(
                index_loader.IndexLoader(me, Sentences(SAMPLES), SCHEDULE, 2).batches(SCHEDULE.start)
            )
            group.forward_backward(batch)
            grads.append([p.grad for p in model.parameters() if p.grad is not None])
        worst.append(max(float((a - b).abs().max()) for a, b in zip(*grads, strict=True)))
    return worst


def evaluated(me: Any) -> dict[str, Any]:
    """Return what each rank knows after two evaluations over a set that no number of ranks divides."""
    torch.manual_seed(5)
    model = Net()
    measure = evaluation.Evaluation(
        me, model, token_step, Sentences(SAMPLES - 3), SCHEDULE, batch_size=2,
        metrics={"size": lambda _, batch: batch[1].float().mean()}, best="min loss", uses_loss=False,
    ).alone()  # fmt: skip
    first = measure.run(SCHEDULE.start)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    return {
        "first": first,
        "second": measure.run(end_of(SCHEDULE)),
        "best": measure.ranking.best,
        "at": measure.ranking.metric_at(end_of(SCHEDULE)),
    }


OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1},
    {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1},
]


def main() -> None:
    """Try everything; every rank."""
    me = worker.join(
        "batch", "digest", HERE, SnapshotSettings(uri=None, every=("1000 steps",)), seed=7, threads=1
    )
    found: dict[str, Any] = {}
    for options in OPTIONS:
        for name, step in (("mean", mean_step), ("tokens", token_step)):
            for micro in (None, 2):
                key = f"{name}, micro {micro}, {options}"
                found[key] = run(me, step, how="plain", micro=micro, precision="fp32", ddp=options)
    for how in ("reentrant", "not reentrant"):
        found[how] = run(me, token_step, how=how, micro=2, precision="fp32", ddp={})
        found[f"{how}, bf16"] = run(me, mean_step, how=how, micro=2, precision="bf16", ddp={})
    found["unused"] = run(
        me, mean_step, how="unused", micro=2, precision="fp32", ddp={"find_unused_parameters": True}
    )
    found["dropout"] = dropout_on_recompute(me)
    found["evaluation"] = evaluated(me)
    texts = me.gather_text(json.dumps(found))
    if me.rank == 0:
        (me.run_folder.path / "found.json").write_text(json.dumps([json.loads(text) for text in texts]))
    me.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    worker.program(main)
