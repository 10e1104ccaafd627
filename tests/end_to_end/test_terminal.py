"""A run as a person sees it who looks at a terminal, makes it smaller, and closes it."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from fcntl import ioctl
from termios import TIOCSWINSZ
from typing import TYPE_CHECKING

import pytest

from elasticflow.run_folder import RunFolder
from tests.end_to_end.harness import LIMIT_S, ROOT, Running, named, read_lines

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project

# Each wait lasts until the test has seen on the terminal what happens meanwhile.
NET = """
import time
from pathlib import Path

def wait_for(name):
    while not (Path(__file__).parent / name).exists():
        time.sleep(0.02)

wait_for("seen_import")
from examples.mnist import Net as _Net, accuracy as _accuracy, digits

def Net():
    print("built: größer", flush=True)
    return _Net(width=4)

def accuracy(scores, labels):
    wait_for("seen_evaluation")
    return _accuracy(scores, labels)
"""
JOB = """
[job]
name = "waits"
seed = 1
[model]
entry = "waits:Net"
loss = "torch.nn.functional:cross_entropy"
[optimizer]
entry = "torch.optim:AdamW"
[dataset]
entry = "waits:digits"
args = { split = "train" }
global_batch_size = 256
[evaluation]
entry = "waits:digits"
args = { split = "test" }
every = "1 epoch"
metrics = { accuracy = "waits:accuracy" }
[train]
epochs = 1
threads = 1
[nodes]
nproc_per_node = 1
"""


def _resize(terminal: int, columns: int, lines: int) -> None:
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))


class _Reader:
    """What was written to a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self.text = ""

    def wait_for(self, words: str) -> None:
        """Return once *words* were written since the last wait."""
        deadline = time.monotonic() + LIMIT_S
        told = ""
        while words not in told:
            left = deadline - time.monotonic()
            if left < 0 or not select.select([self._terminal], [], [], left)[0]:
                pytest.fail(f"never said {words!r}:\n{self.text}")
            told += os.read(self._terminal, 1 << 16).decode("utf-8", "replace")
            self.text += told


def test_terminal_tells_what_is_going_on_and_may_be_closed(project: Project) -> None:
    """The first seconds, what rank 0 prints, an evaluation that lasts; then the terminal goes, and the run ends well."""
    project.write("waits.py", NET)
    job = project.write("jobs/waits.toml", JOB)
    ours, theirs = os.openpty()
    _resize(ours, 80, 24)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "elasticflow", "run", str(job), "--run-id", "t"],
        cwd=project.root,
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=environment,
        text=True,
    )
    os.close(theirs)
    running = Running(process, RunFolder.of(project.root, "waits", "t"), project.write("output.txt", ""))
    project.started.append(running)
    reader = _Reader(ours)
    reader.wait_for("importing waits, ")
    project.write("seen_import", "")
    reader.wait_for("built: größer")
    _resize(ours, 60, 8)
    reader.wait_for("evaluating ")
    os.close(ours)
    project.write("seen_evaluation", "")
    assert running.end() == 0
    assert len(named(read_lines(running.run.events), "run.finished")) == 1
    assert "built: größer\n" in running.run.rank_log(1, 0, "stdout").read_text()
