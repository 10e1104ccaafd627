"""The own code of a tiny job that does harm to itself on cue; projects get a copy of this file.

A file in `cues/` named `ACT@RANK` has that rank do ACT in its next step, once: it is taken away by renaming it. What is
done at a step takes its time until the file `hurry` is there, which changes no bit.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.end_to_end.trajectory_models import Images

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).parent
HURRY, CUES, SAMPLES, DAWDLE = (HERE / name for name in ("hurry", "cues", "samples.txt", "dawdle"))
PAUSE_S = 2 * float(os.environ.get("TINY_PAUSE_S", "0.004"))  # of each forward; the variable says half of it
_kept: list[Any] = []


class Samples(Images):
    """Noise with labels, which a file has to be opened for each time; its order is the file's."""

    def __init__(self) -> None:
        super().__init__()
        text = SAMPLES.read_text()
        self.order = [int(word) for word in text.split()]
        self.fingerprint = sha256(text.encode()).hexdigest()[:12]

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with SAMPLES.open():
            if DAWDLE.exists() and os.getpid() % 2:
                time.sleep(0.01)  # every other loader process
            return super().__getitem__(self.order[index])


def step(model: nn.Module, batch: Any) -> Tensor:
    """Return the mean loss of one piece."""
    for cue in CUES.iterdir() if CUES.exists() else ():
        act, _, rank = cue.name.partition("@")
        if rank == os.environ["RANK"]:
            cue.rename(HERE / f"taken-{cue.name}")
            ACTS[act](model)
    if not HURRY.exists():
        time.sleep(PAUSE_S)
    inputs, targets = batch
    return cross_entropy(model(inputs), targets)


def _raise(model: nn.Module) -> None:
    raise ValueError("label 7 is none of the 4 classes")


def _flip(model: nn.Module) -> None:
    bits = next(model.parameters()).data.view(torch.int32)
    bits.view(-1)[3] ^= 1 << 22


def _collective(model: nn.Module) -> None:
    dist.all_reduce(torch.ones(3))


def _memory(model: nn.Module) -> None:
    while True:
        _kept.append(b"x" * (16 << 20))


def _files(model: nn.Module) -> None:
    while True:
        _kept.append(Path("/dev/null").open())  # noqa: SIM115


def _daemonize(model: nn.Module) -> None:
    # As daemons do it: a child of the worker itself would end with it.
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


ACTS: dict[str, Callable[[nn.Module], object]] = {
    "raise": _raise,
    "flip": _flip,
    "collective": _collective,
    "memory": _memory,
    "files": _files,
    "allocate": lambda _: torch.empty(1 << 55),
    "sleep": lambda _: time.sleep(1 << 20),
    "exit": lambda _: os._exit(7),
    "leave": lambda _: os._exit(0),
    "daemonize": _daemonize,
    "segfault": lambda _: ctypes.string_at(0),
}
