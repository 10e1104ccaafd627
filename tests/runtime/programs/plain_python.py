"""A script under plain python whose code forks, and asks for a process group; its variations come from the command line."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elasticflow as ef

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--snapshots")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.0)
parser.add_argument("--forks", help="file for what the children of this process are")
args = parser.parse_args()


class Numbers:
    """Read by a pool that ends before the first sample."""

    def __init__(self) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            self.values = pool.map(float, range(64))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([self.values[index]])


def child_for_ever(place: Path) -> None:
    """Fork a child that writes what it has open, and sleeps."""
    if os.fork():
        return
    opened = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # that of the folder itself
            opened.append(str(descriptor.readlink()))
    ignored = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    record = {"pid": os.getpid(), "opened": opened, "ignores": ignored}
    place.with_suffix(".partial").write_text(json.dumps(record))
    place.with_suffix(".partial").rename(place)
    time.sleep(600)
    os._exit(0)


def main() -> None:
    """Train."""
    run = ef.join(folder=args.folder, snapshots=args.snapshots, every="1 steps")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    assert (total.item(), dist.get_world_size()) == (run.world_size, run.world_size)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    data = Numbers()
    sleeper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    sleeper.start()
    sleeper.terminate()
    sleeper.join()
    assert sleeper.exitcode == -signal.SIGTERM
    run.keep(model=model, optimizer=optimizer)
    for batch in run.batches(data, size=8, steps=args.steps):
        loss = model(batch.data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step(loss=loss)
        if args.forks and run.position.step == 1:
            child_for_ever(Path(args.forks) / "main")
            thread = threading.Thread(target=child_for_ever, args=(Path(args.forks) / "thread",))
            thread.start()
            thread.join()
        time.sleep(args.pause)
    run.finish()


if __name__ == "__main__":
    main()
