"""Generators that a script has seeded alike, or differently, on each rank."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from elasticflow.runtime.loop.own_data import OwnData, seeds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

ROOT = Path(__file__).resolve().parents[3]
NUMBERS: Any = range(9)
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


class Rows(IterableDataset[int]):
    """A dataset that reads another one, and items of a long list."""

    def __init__(self, source: Iterable[int]) -> None:
        self._sources, self._rows = [source], [*range(1_000)]

    def __iter__(self) -> Iterator[int]:
        """Yield the items."""
        return itertools.chain(*self._sources)


@pytest.mark.parametrize(
    ("made", "is_told"),
    [
        (lambda kept: DataLoader(Rows(kept), num_workers=1), True),
        (lambda kept: DataLoader(NUMBERS, batch_sampler=BatchSampler(kept, 3, False), num_workers=1), True),
        (lambda kept: DataLoader(Rows(kept)), False),
        (lambda _: DataLoader(Rows(NUMBERS), num_workers=1), False),
    ],
)
def test_a_kept_object_inside_of_what_loader_processes_read_is_told(
    made: Callable[[Any], object], is_told: bool
) -> None:
    """The sampler of a sampler of batches, or a dataset in another one: a restart left out samples, or repeated them, without a word."""
    told: list[str] = []
    kept = SequentialSampler(NUMBERS)
    loader = made(kept)
    OwnData(MagicMock(), told.append).warn_of_read_ahead({"kept": kept})
    assert is_told == any("kept is kept, and a DataLoader with num_workers=1" in text for text in told)
    del loader
