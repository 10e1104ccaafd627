"""One rank of a group that compares states: `compare_states.py RANK WORLD_SIZE FILE`; prints what it was told."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from elasticflow.errors import StateError
from elasticflow.runtime.process import process_group
from elasticflow.runtime.process.votes import Vote
from elasticflow.runtime.snapshot.replicas import CaptureCheck
from elasticflow.runtime.state.state import State

RANK, WORLD_SIZE = int(sys.argv[1]), int(sys.argv[2])


class Queue:
    """An object of the job's own."""

    def __init__(self) -> None:
        self.level, self.items = 1, torch.ones(3)
        self.more: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return its state."""
        return {"level": self.level, "items": self.items, **self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def outcome(change: str) -> str:
    """Return what comparing says when rank 1 alone makes *change*."""
    torch.manual_seed(0)
    model, queue, critic = nn.Linear(2, 2), Queue(), nn.BatchNorm1d(2)
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 3)
    state = State(
        model=model, optimizer=optimizer, scheduler=schedule, include={"queue": queue, "critic": critic}
    )
    worker: Any = SimpleNamespace(
        world_size=WORLD_SIZE,
        gather_text=lambda text: process_group.gather_text(text, WORLD_SIZE),
        vote=Vote(),
    )
    check = CaptureCheck(worker)
    if RANK == 1:
        exec(change, {"model": model, "queue": queue, "critic": critic, "schedule": schedule})
    check.start(state.capture())
    try:
        check.finish(state.capture)
    except StateError as error:
        return error.message
    assert not check.is_pending
    return "alike"


CHANGES = [
    "",
    "model.weight.data += 1",
    "schedule.gamma = 0.5",
    "queue.level = 2",
    "queue.items[1] = 0",
    "queue.items = queue.items.double()",
    "queue.more = {'late': float('inf')}",
    "model.weight.data = model.weight.data.t()",
    "model.bias = model.weight",
    "critic.running_mean += 1",
    "critic.weight.data += 1",
]

dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=RANK, world_size=WORLD_SIZE)
print(json.dumps([outcome(change) for change in CHANGES]))
