"""Random streams keyed by where they are used, so that no generator state exists to save (floor R)."""

from __future__ import annotations

import random
import sys
from ctypes import c_uint64
from hashlib import blake2b
from struct import Struct

import numpy as np
import torch

_DATA, _MODEL = 1, 2
_pack = Struct("<5Q").pack

_seed_python = random.seed
_seed_numpy = np.random.seed  # datasets draw from the global generator
_seed_torch = torch.default_generator.manual_seed  # 1 us; torch.manual_seed takes 87


def data_key(seed: int, step: int, rank: int, piece: int) -> int:
    """Return the seed under which a rank reads micro-batch *piece* of *step*."""
    return _key(_DATA, seed, step, rank, piece)


def model_key(seed: int, step: int, rank: int, piece: int) -> int:
    """Return the seed under which a rank runs the model on micro-batch *piece* of *step*."""
    return _key(_MODEL, seed, step, rank, piece)


def _key(*parts: int) -> int:
    return int.from_bytes(blake2b(_pack(*parts), digest_size=8).digest(), "little") >> 1


def seed_data(key: int) -> None:
    """Seed what a dataset may draw from: random, numpy's global generator, torch's on the CPU."""
    _seed_python(key)
    _seed_numpy(key & 0xFFFFFFFF)
    _seed_torch(key)


class Generators:
    """The global generators of one rank, seeded by key for every micro-batch and every forward.

    Torch's always. Seeding python's and numpy's takes 45 us in the middle of a step, and most jobs draw from neither.
    So they rest in one known state until somebody draws from them, which two reads of memory show, and are seeded from
    then on. The first forward that draws does so from the resting state, in every run alike, as long as `are_used`
    outlives a restart; samples read with the first draw are read again.

    Args:
        seed: Of the resting state.
        device: Where the model draws.

    Attributes:
        are_used: The job draws from python's or numpy's, or nobody can tell.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._seed_device = _seed_torch
        if device.type == "cuda":
            self._seed_device = torch.cuda.default_generators[device.index or 0].manual_seed
        words = _words_that_move()
        self.are_used = words is None
        self._python, self._numpy = words or (c_uint64(), c_uint64())
        self._python_rests = self._numpy_rests = 0

    def rest(self) -> None:
        """Put python's and numpy's into the state that a step begins with; what was drawn until now is forgotten."""
        if not self.are_used:
            _seed_python(self._seed)
            _seed_numpy(self._seed & 0xFFFFFFFF)
            self._python_rests, self._numpy_rests = self._python.value, self._numpy.value

    def look(self) -> bool:
        """Return `are_used`, which becomes true if python's or numpy's were drawn from since `rest`."""
        if not self.are_used and (
            self._python.value != self._python_rests or self._numpy.value != self._numpy_rests
        ):
            self.are_used = True
        return self.are_used

    def seed_data(self, key: int) -> None:
        """Seed what a dataset draws from."""
        if self.are_used:
            seed_data(key)
        else:
            _seed_torch(key)

    def seed_model(self, key: int) -> None:
        """Seed what a forward draws from."""
        self.seed_data(key)
        if self._seed_device is not _seed_torch:
            self._seed_device(key)


def _words_that_move() -> tuple[c_uint64, c_uint64] | None:
    """Return memory of the two global generators that changes with each draw; None if it lies elsewhere here.

    Both are Mersenne twisters: 624 words, made anew when an index has passed them. Source: CPython 3.11 to 3.14,
    Modules/_randommodule.c (index, then words, after the object's header), and numpy 2, mt19937.h (words, then
    index). Neither is promised, so it is tried on generators of our own first.
    """
    if sys.implementation.name != "cpython":
        return None
    trial, twister = random.Random(1), np.random.MT19937(1)
    found = _word_of_python(trial), _word_of_numpy(twister)
    for _ in range(2):
        *_, index = words = trial.getstate()[1]
        state = twister.state["state"]
        if found[0].value != index | words[0] << 32:
            return None
        if found[1].value != int(state["key"][-1]) | int(state["pos"]) << 32:
            return None
        trial.random()
        np.random.Generator(twister).random()
    ours = np.random.get_bit_generator()  # type: ignore[attr-defined]  # public since 1.24, not in the stubs
    if not isinstance(ours, np.random.MT19937):
        return None
    return _word_of_python(random._inst), _word_of_numpy(ours)  # noqa: SLF001


def _word_of_python(generator: random.Random) -> c_uint64:
    return c_uint64.from_address(id(generator) + object.__basicsize__)


def _word_of_numpy(generator: np.random.MT19937) -> c_uint64:
    return c_uint64.from_address(generator.ctypes.state_address + 4 * 623)


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch on all devices: the state in which every rank builds the model."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  # see seed_data
    torch.manual_seed(seed)
