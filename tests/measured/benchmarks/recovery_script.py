"""The job of the recovery benchmark as a script for torchrun, as an engineer writes it by hand.

DistributedDataParallel over the digits; rank 0 saves everything every 20 steps, and all resume from the newest save.
Each rank says when it starts and rank 0 when each step is finished, in a file of JSON lines that the benchmark reads.
It has no last step: the benchmark ends it.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

if TYPE_CHECKING:
    from collections.abc import Callable

SAVE_EVERY_STEPS = 20
GLOBAL_BATCH_SIZE = 64
LEARNING_RATE = 3e-3
SEED = 1234


def main() -> None:
    """Train as one worker of torchrun's group until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the module that has Net")
    parser.add_argument("folder", type=Path, help="for the save and the lines")
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())  # noqa: PTH109  # the project, as `python -m` would have it
    saved = options.folder / "snapshot.pt"

    def save(state: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            torch.save(state, saved.with_suffix(".tmp"))
            saved.with_suffix(".tmp").replace(saved)

    train(
        options.model,
        options.folder,
        start=lambda: dist.init_process_group("gloo"),
        newest=lambda: torch.load(saved, weights_only=True) if saved.exists() else None,
        save=save,
    )


def train(
    model_module: str,
    folder: Path,
    start: Callable[[], object],
    newest: Callable[[], dict[str, Any] | None],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Train until killed; every rank.

    Args:
        model_module: The module that has Net.
        folder: Gets the lines.
        start: Makes the process group, once all is imported.
        newest: Returns what was saved last.
        save: Called by every rank, every 20 steps.
    """
    lines = os.open(folder / "lines.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(step: int | None) -> None:
        facts = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "pid": os.getpid()}
        os.write(lines, (json.dumps({"time": time.time(), "step": step, **facts}) + "\n").encode())

    digits = importlib.import_module("examples.mnist").digits("train")
    module = importlib.import_module(model_module)
    torch.set_num_threads(1)
    start()
    say(None)
    torch.manual_seed(SEED)
    model = module.Net(width=32)
    if getattr(module, "COMPILED", False):
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step = 0
    if (state := newest()) is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    replicas = DistributedDataParallel(model)
    sampler: DistributedSampler[object] = DistributedSampler(digits, seed=SEED)
    loader = DataLoader(digits, batch_size=GLOBAL_BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    for epoch in itertools.count(step // len(loader)):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(replicas(inputs), targets).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                say(step)
            if step % SAVE_EVERY_STEPS == 0:
                save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()})


if __name__ == "__main__":
    main()
