"""Which ranks share a model, and which virtual shards each of them computes."""

from __future__ import annotations

from typing import NamedTuple

from elasticflow.errors import StateError
from elasticflow.runtime.process.position import even_split


class ShardLayout(NamedTuple):
    """Place of a rank among replicas of a model, each of which *degree* consecutive ranks share.

    Attributes:
        world_size: Number of ranks.
        rank: Number of this rank.
        degree: Ranks that share one replica; 1: every rank has a whole one.
    """

    world_size: int
    rank: int
    degree: int = 1

    @property
    def replicas(self) -> int:
        """Number of replicas."""
        return self.world_size // self.degree

    @property
    def replica(self) -> int:
        """Number of this rank's replica."""
        return self.rank // self.degree

    @property
    def shard(self) -> int:
        """Number of this rank within its replica."""
        return self.rank % self.degree

    @property
    def holders(self) -> range:
        """Ranks that hold the same part of the model as this rank, one of each replica."""
        return range(self.shard, self.world_size, self.degree)

    def peers_of(self, replica: int) -> range:
        """Return the ranks that share a replica."""
        return range(replica * self.degree, (replica + 1) * self.degree)

    def leaves(self, count: int) -> range:
        """Return which of *count* virtual shards this rank computes, ascending.

        A replica has neighbouring ones; its ranks take turns, so that each round of the replica is of neighbours, too.
        """
        low, high = even_split(count, self.replicas, self.replica)
        return range(low + self.shard, high, self.degree)

    def rounds(self, count: int) -> list[range]:
        """Return the virtual shards of each round of this rank's replica; the last round may have fewer than *degree*."""
        low, high = even_split(count, self.replicas, self.replica)
        return [range(first, min(high, first + self.degree)) for first in range(low, high, self.degree)]


def layout_of(world_size: int, rank: int, degree: int) -> ShardLayout:
    """Return the place of a rank.

    Raises:
        StateError: the ranks cannot be shared out among replicas of *degree* ranks.
    """
    if type(degree) is not int or degree < 1:
        raise StateError(
            f"shard={degree!r}: the number of workers that share a model is a whole number from 1"
        )
    if world_size % degree:
        fits = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise StateError(
            f"{world_size} workers cannot be shared out among replicas of {degree} workers each",
            f"start a multiple of {degree} workers, or share a model among {' or '.join(map(str, fits))}",
        )
    return ShardLayout(world_size, rank, degree)
