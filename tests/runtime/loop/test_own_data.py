"""Generators that a script has seeded alike, or differently, on each rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, random, sys
import numpy as np, torch
from elasticflow.runtime.loop.own_data import seeds
said = []
for seed in map(int, sys.argv[1:]):
    random.seed(seed); np.random.seed(7); torch.manual_seed(seed)
    said.append(seeds())
print(json.dumps(said))
"""


@pytest.mark.usefixtures("real_processes")
def test_seeds_are_the_same_text_in_other_processes() -> None:
    """Of interpreters of their own, as plain torchrun starts them, not of forks."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *numbers],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        for numbers in ("1", "12")
    ]
    [one], [alike, other] = (json.loads(process.communicate(timeout=100)[0]) for process in started)
    assert one == alike
    assert [False, True, False] == [a == b for a, b in zip(one, other, strict=True)]
