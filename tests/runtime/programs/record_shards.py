"""One rank that records a model, whole and sharded: `record_shards.py RANK WORLD_SIZE DEGREE FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from elasticflow.protocol import trajectory_record
from elasticflow.runtime.process.position import Position
from elasticflow.runtime.snapshot.trajectory import TrajectoryRecorder

RANK, WORLD_SIZE, DEGREE = map(int, sys.argv[1:4])
STORE, FOLDER = map(Path, sys.argv[4:6])


def at(step: int) -> Position:
    """Return the position after a step."""
    return Position(step, 8 * step, 0, 8 * step, is_epoch_end=False)


def record(name: str, model: nn.Module) -> None:
    """Record *model* before and after a step, in the folder *name*."""
    optimizer = torch.optim.AdamW(model.parameters())
    progress = SimpleNamespace(after_step=None)
    worker: Any = SimpleNamespace(rank=RANK, generation=1, world_size=WORLD_SIZE, progress=progress)
    state: Any = SimpleNamespace(
        model=model, optimizers={"optimizer": optimizer}, ema=None, reshard=lambda: None
    )
    TrajectoryRecorder(FOLDER / name, worker, state, at(0), is_exact=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    if progress.after_step is not None:
        progress.after_step(at(1), 0.5)


def main() -> None:
    """Record both."""
    dist.init_process_group("gloo", f"file://{STORE}", rank=RANK, world_size=WORLD_SIZE)
    for name in ("whole", "shards"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 1))
        if name == "shards":
            groups = torch.arange(WORLD_SIZE).reshape(-1, DEGREE).tolist()
            meshes = [DeviceMesh("cpu", group) for group in groups]  # every rank makes each
            fully_shard(model, mesh=meshes[RANK // DEGREE])
        record(name, model)
    dist.barrier()
    if RANK == 0:
        found = {name: trajectory_record.read_records(FOLDER / name) for name in ("whole", "shards")}
        sys.stdout.write(f"{len(found['whole'])} {found['whole'] == found['shards']}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
