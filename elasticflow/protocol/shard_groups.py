"""The numbers of nodes whose workers can be cut into shard groups; pure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Shard = int | Literal["node", "all"]
"""Workers that hold one copy of the model together: a number, those of each node, or all of them."""


def fits(shard: Shard, workers: Sequence[int]) -> bool:
    """Return whether nodes with so many *workers* each can be cut into whole shard groups."""
    if shard == "node":
        return len(set(workers)) <= 1
    return shard == "all" or sum(workers) % shard == 0


def nodes_of_group(shard: Shard, per_node: int) -> int:
    """Return the number of nodes of which a multiple can always be cut into shard groups, if each has *per_node* workers."""
    return shard // math.gcd(shard, per_node) if isinstance(shard, int) else 1


def node_counts(shard: Shard, low: int, high: int, per_node: int) -> range:
    """Return the numbers of nodes from *low* to *high* that can be cut into shard groups, if each has *per_node* workers."""
    step = nodes_of_group(shard, per_node)
    return range(-(-low // step) * step, high + 1, step)


def next_degree(shard: Shard, workers: Sequence[int]) -> int | None:
    """Return the next larger degree for nodes with so many *workers* each; None if all workers hold one copy already."""
    world = sum(workers)
    own = shard if isinstance(shard, int) else world if shard == "all" else max(workers, default=1)
    return next((degree for degree in range(own + 1, world + 1) if world % degree == 0), None)
