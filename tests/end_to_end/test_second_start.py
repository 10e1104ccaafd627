"""A snapshot whose content crashes what is restored from it: verified, and of no use all the same."""

from __future__ import annotations

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end.harness import Project, named, steps_of

# From the 15th step on the model cannot be used by a process that did not make it so; once, rank 1 dies after the 25th.
MODEL = """
import os
import signal
from pathlib import Path

import torch
from examples.mnist import Net as Plain

OWN = []


class Net(Plain):
    def __init__(self, width=8):
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, images):
        if self.training:
            if self.seen >= 15 and not OWN:
                raise ValueError("these weights can be of no use here")
            self.seen += 1
            if self.seen >= 15:
                OWN.append(True)
            if self.seen >= 25 and os.environ["RANK"] == "1":
                try:
                    Path(__file__).with_name("died").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
        return super().forward(images)
"""


def test_snapshot_that_two_starts_fail_from_is_set_aside(project: Project) -> None:
    """The third start is from the older one, and the run comes to its end with every step once."""
    project.write("poisoned.py", MODEL)
    sets = (
        "train.epochs=2",
        "snapshots.every=10 steps",
        "evaluation.every=2 epochs",
        "model.entry=poisoned:Net",
        "model.args.width=8",
    )
    running = project.run("jobs/mnist.toml", "poisoned", *sets)
    assert running.end() == 0, running.told()

    told = running.events()
    assert ["crash", "user_error", "user_error"] == [e["class"] for e in named(told, events.WORKER_FAILED)]
    chosen = [(e["generation"], e["name"]) for e in named(told, events.SNAPSHOT_CHOSEN)]
    [bad, also_bad, good] = [name for _, name in chosen]
    assert [2, 3, 4] == [generation for generation, _ in chosen]
    assert bad == also_bad
    assert (20, 10) == (int(bad[:12]), int(good[:12]))
    [rejected] = named(told, events.SNAPSHOT_REJECTED)
    cause = "user_error: ValueError: these weights can be of no use here"
    expected = (bad, f"two starts from it failed before a step was finished: {cause}")
    assert expected == (rejected["name"], rejected["reason"])
    assert {bad: rejected["reason"]} == Catalog(Storage(str(running.run.path))).quarantined()
    steps = steps_of(running.run)
    assert list(range(1, len(steps) + 1)) == steps
    assert "set aside" in running.told()
