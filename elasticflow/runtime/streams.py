"""Random streams keyed by where they are used, so that no generator state exists to save (floor R)."""

from __future__ import annotations

import random
from hashlib import blake2b
from struct import pack
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_DATA, _MODEL = 1, 2

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
    return int.from_bytes(blake2b(pack(f"<{len(parts)}Q", *parts), digest_size=8).digest(), "little") >> 1


def seed_data(key: int) -> None:
    """Seed what a dataset may draw from: random, numpy's global generator, torch's on the CPU."""
    _seed_python(key)
    _seed_numpy(key & 0xFFFFFFFF)
    _seed_torch(key)


def seeder_of_model(device: torch.device) -> Callable[[int], object]:
    """Return what seeds the generator a model on *device* draws from."""
    if device.type == "cuda":
        on_device = torch.cuda.default_generators[device.index or 0].manual_seed

        def seed_both(key: int) -> None:
            torch.default_generator.manual_seed(key)
            on_device(key)

        return seed_both
    return torch.default_generator.manual_seed


def seed_everything(seed: int) -> None:
    """Seed random, numpy and torch on all devices: the state in which every rank builds the model."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002  # see seed_data
    torch.manual_seed(seed)
