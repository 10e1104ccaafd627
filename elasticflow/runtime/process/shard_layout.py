"""The ranks that share a model, and the virtual shards that each rank computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from elasticflow.errors import StateError
from elasticflow.runtime.process.position import even_split


@dataclass(frozen=True)
class Sharding:
    """Options of a model that workers share: each group of *shard* workers holds one copy.

    Attributes:
        shard: Workers that hold a copy: a number, those of each node, or all of them.
        wrap: Classes of modules to gather one at a time, as "module:Class". Empty: the elements of the longest ModuleList.
        reshard_after_forward: Free gathered parameters after the forward, and gather them again for the backward.
        offload: "cpu" keeps parameters, gradients and the optimizer's state in the CPU's memory where training is on another device.
    """

    shard: int | Literal["node", "all"]
    wrap: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    offload: Literal["cpu"] | None = None

    def __post_init__(self) -> None:
        """Refuse an *offload* that is not known."""
        if self.offload not in (None, "cpu"):
            raise StateError(f"offload={self.offload!r} is no memory to keep parameters in", '"cpu", or None')


class ShardLayout(NamedTuple):
    """Place of a rank among replicas of a model, each of which *degree* consecutive ranks share.

    Attributes:
        is_offloaded: Parameters lie in the CPU's memory, and are moved to the device block by block.
    """

    world_size: int
    rank: int
    degree: int = 1
    is_offloaded: bool = False

    @property
    def is_cut(self) -> bool:
        """True if the model is sharded by `fully_shard`: several ranks share it, or one gathers it from the CPU's memory."""
        return self.degree > 1 or self.is_offloaded

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


def offloads(sharding: Sharding, device_type: str) -> bool:
    """Return True if *sharding* keeps parts of the model in the CPU's memory where training is on a device of this type."""
    return sharding.offload is not None and device_type != "cpu"


def layout_of(
    sharding: Sharding, world_size: int, rank: int, local_world_size: int, device_type: str
) -> ShardLayout:
    """Return the place of a rank that trains on a device of this type.

    Raises:
        StateError: the ranks cannot be shared out among such replicas.
    """
    shard: object = sharding.shard
    degree = {"node": local_world_size, "all": world_size}.get(shard) if isinstance(shard, str) else shard
    if type(degree) is not int or degree < 1:
        raise StateError(
            f"shard={shard!r} is no number of workers that share a model",
            'a whole number from 1, "node" or "all"',
        )
    if world_size % degree:
        fits = [number for number in range(1, world_size + 1) if world_size % number == 0]
        raise StateError(
            f"{world_size} workers cannot be shared out among replicas of {degree} workers each",
            f"start a multiple of {degree} workers, or share a model among {' or '.join(map(str, fits))}",
        )
    return ShardLayout(world_size, rank, degree, offloads(sharding, device_type))
