"""Steps that move two optimizers, in a worker group: rank 0 writes the weights after each step.

Argument: `plain`; `idle`: a batch of fewer samples than ranks is among them; `stop`: rank 1 raises StopTraining in step 3;
`astray`: rank 1 moves them in the other order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from elasticflow import StopTraining
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.runtime import worker
from elasticflow.runtime.data import index_loader, index_schedule
from elasticflow.runtime.training.manual_step import ManualStep

HERE = Path(__file__).resolve().parent
HOW = sys.argv[1]
SAMPLES = 22 if HOW == "idle" else 21
SCHEDULE = index_schedule.IndexSchedule(SAMPLES, 7, epochs=1, seed=2, tail="short")


class Pair(nn.Module):
    """Two halves, one of which is trained against the other."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.d, self.spare = nn.Linear(3, 2), nn.Linear(2, 1), nn.Linear(2, 2)


def main() -> None:
    """Train an epoch."""
    policy = SnapshotSettings(uri=None, every=("1000 steps",))
    me = worker.join("own", "0" * 16, HERE, policy, seed=7, threads=1)
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randn(3, generator=generator) for _ in range(SAMPLES)]
    dataset = index_loader.open_dataset(me, lambda: samples, "train")
    torch.manual_seed(5 + me.rank)  # rank 0's weights count
    model = Pair()
    optimizers: dict[str, Optimizer] = {
        "g": Adam([*model.g.parameters(), *model.spare.parameters()], lr=0.1, weight_decay=0.5),
        "d": SGD(model.d.parameters(), lr=0.1, momentum=0.9),
    }
    calls = 0

    def step(model: Any, batch: Tensor, optimizers: dict[str, Optimizer]) -> dict[str, Any]:
        nonlocal calls
        calls += 1
        if HOW == "stop" and me.rank == 1 and calls == 3:
            raise StopTraining("enough")
        names = ["g", "d"] if HOW == "astray" and me.rank == 1 else ["d", "g"]
        total = torch.zeros(())
        for name in names:
            optimizers[name].zero_grad()
            made = model.d(model.g(batch))
            loss = (made**2).mean() if name == "g" else ((made - 1) ** 2).mean()
            loss.backward()
            optimizers[name].step()
            total = total + loss.detach()
        return {"loss": total}

    group = ManualStep(me, model, step, optimizers, clip_grad_norm=0.5)
    loader = index_loader.IndexLoader(me, dataset, SCHEDULE, None)
    me.start_training(SCHEDULE.start, SCHEDULE, model, log_every=1)
    position, told = SCHEDULE.start, []
    for batch in loader.batches(position):
        loss = group.run(batch)
        if me.stopped:
            break
        position = batch.end
        told.append([loss, *(p.tolist() for p in model.parameters())])
    others = me.gather_text(json.dumps(told))
    if me.rank == 0:
        stopped = None if me.stopped is None else list(me.stopped)
        found = {"ranks": [json.loads(text) for text in others], "stopped": stopped}
        (me.run_folder.path / "found.json").write_text(json.dumps(found))
    worker.leave(me, position, SCHEDULE)


if __name__ == "__main__":
    worker.program(main)
