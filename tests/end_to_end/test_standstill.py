"""Workers that stand still in a run: found, named, shown, and resumed from."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, Any

from elasticflow import events
from tests.end_to_end.harness import named, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.harness import Project, Running

MOODY = '''
"""A loss and a dataset that do as files say: sleep, or wait for others that do not come."""

import os
import time
from pathlib import Path

import torch.distributed as dist
from torch.nn.functional import cross_entropy

from examples import mnist

HERE = Path(__file__).parent
_alone = []


def asked(what):
    """Return whether this rank is to do that, once."""
    cue = HERE / f"{what}-{os.environ.get('RANK')}"
    try:
        cue.unlink()
    except FileNotFoundError:
        return False
    return True


def ponder():
    """Sleep for ever."""
    time.sleep(600)


def loss(outputs, targets):
    """Return the loss, if at all."""
    if not _alone:
        _alone.append(dist.new_group())
    if outputs.requires_grad and asked("sleep"):  # in training; evaluation measures it as well
        ponder()
    if outputs.requires_grad and asked("barrier"):
        dist.barrier(_alone[0])
    return cross_entropy(outputs, targets)


class Digits:
    """The digits."""

    def __init__(self, split):
        self.digits = mnist.digits(split)

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        if asked("read"):
            ponder()
        return self.digits[index]
'''
LIMIT_S = 3


def hang(project: Project, running: Running, cause: Callable[[], None], number: int) -> dict[str, Any]:
    """Have something stand still for the *number*-th time; return what was told of it, once training continues."""
    generation = running.wait_for_group(2, number - 1)
    cause()
    happened = running.wait_for(
        "the hang", lambda: named(running.events(), events.HANG_DETECTED)[number - 1 :]
    )
    running.wait_for_group(2, generation)
    return dict(happened[0])


def test_whatever_stands_still_is_found_and_named(project: Project) -> None:
    """A stopped worker, the job's own code, a collective that others skip, a loader process: one restart each."""
    project.write("moody.py", MOODY)
    sets = (
        "model.loss=moody:loss",
        "dataset.entry=moody:Digits",
        "dataset.num_workers=1",
        "restarts.budget=9",
    )
    running = project.run(
        "jobs/mnist.toml", "moody", *sets, "train.epochs=1000000", f"restarts.hang_timeout={LIMIT_S} s"
    )

    stopped = hang(project, running, lambda: os.kill(running.pid_of(1), signal.SIGSTOP), 1)
    assert (1, "its process was stopped (SIGSTOP)") == (stopped["rank"], stopped["reason"])

    asleep = hang(project, running, (project.root / "sleep-1").touch, 2)
    assert (1, "step") == (asleep["rank"], asleep["phase"])
    assert "in ponder, and the other rank waits for it" in asleep["reason"]
    assert asleep["frames"][0].startswith(f"{project.root}/moody.py:")

    deadlocked = hang(project, running, (project.root / "barrier-0").touch, 3)
    assert 0 == deadlocked["rank"]
    assert "moody.py" in deadlocked["reason"]
    assert "and rank 1 at" in deadlocked["reason"]

    stuck = hang(project, running, (project.root / "read-1").touch, 4)
    assert (1, "data") == (stuck["rank"], stuck["phase"])
    assert "in ponder" in stuck["frames"][0]
    for rank in (0, 1):
        for generation in range(1, 5):
            stacks = running.run.rank_log(generation, rank, "stderr").read_text()
            assert "train.py" in stacks

    os.kill(running.process.pid, signal.SIGTERM)
    assert 75 == running.end(), running.told()
    assert ["hang"] * 4 == [e["class"] for e in named(running.events(), events.BUDGET_CHARGED)]
    steps = steps_of(running.run)
    assert list(range(1, len(steps) + 1)) == steps
    failed = named(running.events(), events.WORKER_FAILED)
    assert "ponder" in failed[1]["traceback"]
    assert "_worker_loop" not in failed[3]["traceback"]
    assert "in ponder" in running.output.read_text()
