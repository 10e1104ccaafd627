"""The loop in whose head a script reads where its run stands."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from elasticflow.errors import StateError
from elasticflow.runtime.loop.script_loops import OwnLoop, is_in_loop, own_loop_at
from elasticflow.runtime.snapshot.restored_state import RestoredState
from elasticflow.runtime.state.state import State

if TYPE_CHECKING:
    from pathlib import Path

PASS = "run.step(loss=0.0, samples=8)"


class Reader:
    """A run of which only the position is read; it remembers the loops in whose heads that was."""

    def __init__(self) -> None:
        self.steps = 0
        self.loops: list[OwnLoop | None] = []
        self.were_running: list[bool] = []

    @property
    def position(self) -> SimpleNamespace:
        """As `Run.position`."""
        self.loops.append(own_loop_at(sys._getframe(1)))
        return SimpleNamespace(step=self.steps)

    @property
    def is_in_loop(self) -> bool:
        """Whether the script asks in a loop."""
        return is_in_loop(sys._getframe(1))

    def step(self, **_: object) -> None:
        """As `Run.step`."""
        self.steps += 1
        self.were_running += [loop.is_running() for loop in self.loops[-1:] if loop is not None]


def read(folder: Path, script: str) -> Reader:
    """Run *script* with a reader as `run`."""
    path, run = folder / "train.py", Reader()
    path.write_text(script)
    exec(compile(script, path, "exec"), {"run": run})
    return run


@pytest.mark.parametrize(
    "script",
    [
        f"while run.position.step < 2:\n    {PASS}",
        f"while (\n    1 and run.position.step\n) < 2:\n    {PASS}",
        f"for step in range(run.position.step, 2):\n    if True:\n        {PASS}",
        f"while run.position.step < 2:\n    {PASS}\n    pass",
        f"def train():\n    while run.position.step < 2:\n        for _ in range(3): pass\n        {PASS}\ntrain()",
    ],
)
def test_a_head_whose_passes_are_steps(tmp_path: Path, script: str) -> None:
    """Its loop is running in its passes, and not behind it."""
    run = read(tmp_path, script)
    assert all(run.loops)
    assert run.were_running == [True, True]
    assert not any(loop.is_running() for loop in run.loops if loop is not None)


@pytest.mark.parametrize(
    "script",
    [
        f"step = run.position.step\nwhile step < 2:\n    {PASS}\n    step += 1",
        f"for step in range(run.position.step, 2):\n    {PASS}\n    pass",
        f"while run.steps < 2:\n    step = run.position.step\n    {PASS}",
        f"for step in zip(range(run.position.step, 2)):\n    {PASS}",
        f"for phase in range(1):\n    while run.position.step < 2:\n        {PASS}",
        f"while run.position.step < 2:\n    for _ in range(2):\n        {PASS}",
        "for skipped in range(run.position.step, 2):\n    pass",
    ],
)
def test_other_places(tmp_path: Path, script: str) -> None:
    """Nothing tells there whether the next pass is the run's."""
    assert not any(read(tmp_path, script).loops)


@pytest.mark.parametrize("is_running", [True, False])
def test_changes_between_two_loops_are_refused(*, is_running: bool) -> None:
    """A pass that has begun may change weights; code behind a loop without a pass left may not."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    restored = RestoredState(State(model=model, optimizer=optimizer), "newest", [], [])
    model(torch.ones(2)).backward()
    restored.begin_pass(lambda: is_running)
    torch.nn.init.ones_(model.weight)
    if is_running:
        optimizer.step()
    else:
        with pytest.raises(StateError, match="model/weight is not as in snapshot newest"):
            optimizer.step()


def test_code_behind_a_loop_and_in_one_are_told_apart(tmp_path: Path) -> None:
    """Also by a function that the loop calls, whoever runs the script in a loop."""
    script = (
        "def inner():\n    return run.is_in_loop\n"
        "def train():\n    while True:\n        if run.is_in_loop and inner(): break\n    return run.is_in_loop\n"
        "assert not train()\nif not inner() and not run.is_in_loop: run.step()\n"
    )
    for _ in range(1):
        assert read(tmp_path, script).steps == 1


def test_a_script_without_readable_source_may_be_in_a_loop() -> None:
    """As one that `exec` runs."""
    run = Reader()
    exec(compile("if run.is_in_loop: run.step()", "<string>", "exec"), {"run": run})
    assert run.steps == 1
