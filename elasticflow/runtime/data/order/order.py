"""An order of samples: its promises, its name in snapshots, and the default order."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from elasticflow.errors import StateError
from elasticflow.runtime.data.order.permutation import permuted

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Version of the shuffle: a position in a snapshot means the same samples for ever, or is refused.
VERSION = 1

OrderRecord = int | Mapping[str, Any]
"""How state.json names an order: the version of the shuffle, or what tells a declared order from every other one."""

OTHER_VERSION = "continue with the version of elasticflow that took it, or start a new run"


class Order(Protocol):
    """The sample at each place: a function of the place alone, so that any rank can compute it.

    Attributes:
        record: Identity of the order in snapshots: two orders with equal records give the same samples.
        has_repeats: A sample may come more than once in an epoch.
    """

    record: OrderRecord
    has_repeats: bool

    def __len__(self) -> int:
        """Return the places of an epoch."""

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending places of the endless stream."""


class ShuffledOrder:
    """Each sample once per epoch, each epoch shuffled anew."""

    record: OrderRecord = VERSION
    has_repeats = False

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed

    def __len__(self) -> int:
        return self._samples

    def indices(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending places of the endless stream."""
        return permuted(self._samples, self._seed, places)


def seed_of(seed: int, name: str, number: int = 0) -> int:
    """Return the seed of one part of an order: others of the same job, and other jobs, draw apart from it."""
    text = f"{seed} {name} {number}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def digest_of(values: NDArray[Any]) -> str:
    """Return the identity of an array: its type and its bytes."""
    digest = blake2b(str(values.dtype).encode(), digest_size=8)
    digest.update(np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()


_PARTS = {
    "kind": "how they are drawn",
    "places": "as many samples make an epoch",
    "numbers": "the numbers of the samples",
    "batch": "dataset.global_batch_size",
    "tail": "dataset.tail",
    "sets": "how many samples the sets of the mixture have",
    "shares": "the shares of the sets",
}


def require_same_order(now: OrderRecord, then: OrderRecord) -> None:
    """Refuse to continue in another order of samples: a position in one means nothing in another.

    Raises:
        StateError: they differ, or this version does not know the snapshot's.
    """
    before, after = _facts(then), _facts(now)
    parts = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if not parts:
        return
    if "kind" in parts:
        parts = ["kind"]
    if "version" in parts:
        raise StateError(
            f"the snapshot's position counts in {before['kind']} order {before.get('version')} of the samples, and this version of "
            f"elasticflow knows {after['kind']} order {after.get('version')} only",
            OTHER_VERSION,
        )
    differences = "; ".join(
        f"{_PARTS.get(key, key)}: {after.get(key)}, not {before.get(key)}" for key in parts
    )
    raise StateError(
        f"the job's samples come in another order than the snapshot's ({differences}): its position means other samples there",
        "give dataset.sampler, dataset.mix and the batch back what they were, or start a new run",
    )


def _facts(record: OrderRecord) -> Mapping[str, Any]:
    return {"kind": "shuffled", "version": record} if isinstance(record, int) else record
