"""Generators that a script has seeded alike, or differently, on each rank."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from elasticflow.runtime.loop.own_data import seeds

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json
from tests.runtime.loop.test_own_data import seeded
print(json.dumps(seeded(1)))
"""


def seeded(seed: int) -> list[str]:
    """Return the texts of generators of which NumPy's is seeded alike on each rank."""
    random.seed(seed)
    np.random.seed(7)  # noqa: NPY002  # the generator that scripts draw from
    torch.manual_seed(seed)
    return seeds()


@pytest.fixture
def _same_generators_afterwards() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


@pytest.mark.usefixtures("real_processes", "_same_generators_afterwards")
def test_seeds_are_the_same_text_in_other_processes() -> None:
    """Of an interpreter of its own, with another seed of hashes, as plain torchrun starts it, not of a fork."""
    hashes = "1" if os.environ.get("PYTHONHASHSEED") == "2" else "2"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hashes},
        timeout=100,
        check=True,
    )
    one = seeded(1)
    assert one == json.loads(done.stdout)
    assert [False, True, False] == [a == b for a, b in zip(one, seeded(2), strict=True)]
