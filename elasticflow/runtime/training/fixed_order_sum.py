"""The sum over all shards of all ranks in the order of one tree: the library moves bytes, additions are ours.

What the shards give is cut into buckets (`BucketLayout`), each on its way by itself: this rank's subtrees are added up,
their slices go to the slices' owners, who add the rest, and the totals come back to all. Sent from one to one, for
gloo's all_gather takes three times as long as its sends (torch 2.13). What runs over one link is matched by its order,
so every rank sends the same buckets in the same order, whenever each is ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.training.tree_sum import TreeSum, places

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.runtime.training.buckets import BucketLayout, FlatBucket

    Subtree = Sequence[Tensor | None]  # None: noughts


class FixedOrderAllReduce:
    """Adds up what all shards of all ranks give, step by step.

    Args:
        layout: What one shard gives.
        shards: Of all ranks.
        world_size: Ranks.
        rank: This one.
    """

    def __init__(self, layout: BucketLayout, shards: int, world_size: int, rank: int) -> None:
        self._buckets = layout.buckets
        self._lanes = [
            _Lane(layout, number, shards, world_size, rank) for number in range(len(self._buckets))
        ]
        self._sent = 0

    def begin(self) -> None:
        """Begin a step."""
        self._sent = 0
        for lane in self._lanes:
            lane.begin()

    def push(self, shard: int, leaf: Subtree) -> None:
        """Take what *shard* gives, but for buckets that were sent early.

        Args:
            shard: Comes after those pushed before.
            leaf: In the layout's order; they are added to in place.
        """
        for number in range(self._sent, len(self._lanes)):
            self._lanes[number].push(shard, [leaf[place] for place in self._buckets[number]])

    def send_early(self, shard: int, leaf: Subtree) -> None:
        """Take the next bucket of this rank's last shard, and send it while the shard is still at work on others.

        Args:
            shard: The last of this rank.
            leaf: The bucket's tensors.
        """
        self._lanes[self._sent].push(shard, leaf)
        self._send()

    def total(self) -> list[Tensor]:
        """Return the sum over all shards, in the layout's order; the next step overwrites it. Collective: every rank."""
        while self._sent < len(self._lanes):
            self._send()
        self._lanes[-1].add_slices()
        total = [torch.Tensor()] * sum(map(len, self._buckets))
        for bucket, lane in zip(self._buckets, self._lanes, strict=True):
            lane.wait()
            for place, tensor in zip(bucket, lane.home.views, strict=True):
                total[place] = tensor
        return total

    def _send(self) -> None:
        self._lanes[self._sent].send_slices()
        if self._sent:  # by now the slices of the one before are likely to be here
            self._lanes[self._sent - 1].add_slices()
        self._sent += 1


class _Lane:
    """One bucket on its way; `home` is where its total comes to lie."""

    def __init__(self, layout: BucketLayout, number: int, shards: int, world_size: int, rank: int) -> None:
        self._layout, self._number, self._shards, self._rank = layout, number, shards, rank
        self.home = layout.new(number)
        self._slices = list(self.home.whole.chunk(world_size))
        self._spare: list[FlatBucket] = []
        self._places = [places(shards, *even_split(shards, world_size, other)) for other in range(world_size)]
        # What each other rank sends: its subtrees of this rank's slice, one after the other.
        self._received = [
            self.home.whole.new_empty(0 if other == rank else len(held), len(self._slices[0]))
            for other, held in enumerate(self._places)
        ]
        self._own: list[Tensor] = []
        self._works: list[dist.Work] = []
        self.begin()

    def begin(self) -> None:
        self._tree: TreeSum[Subtree] = TreeSum(self._shards, self._add)
        self._is_home_free = True

    def push(self, shard: int, leaf: Subtree) -> None:
        self._tree.push(0, shard, leaf)

    def send_slices(self) -> None:
        """Send this rank's subtrees, each slice to its owner; does not wait."""
        rows = [flat.whole.chunk(len(self._slices)) for flat in self._flattened()]
        self._own = [row[self._rank] for row in rows]
        self._swap(
            [torch.stack(to) if len(to) > 1 else to[0] for to in zip(*rows, strict=True)], self._received
        )

    def add_slices(self) -> None:
        """Wait for everybody's subtrees of this rank's slice, and send all their sum; does not wait for the others'."""
        self.wait()
        mine = self._slices[self._rank]
        lies_at_home = mine.data_ptr()

        def add(left: Tensor, right: Tensor) -> Tensor:
            return torch.add(left, right, out=right if right.data_ptr() == lies_at_home else left)

        tree: TreeSum[Tensor] = TreeSum(self._shards, add)
        for rank, held in enumerate(self._places):
            rows = self._own if rank == self._rank else self._received[rank]
            for (level, place), row in zip(held, rows, strict=True):
                tree.push(level, place, row)
        self._swap([mine] * len(self._slices), self._slices)

    def wait(self) -> None:
        """Wait for what was sent and is to come."""
        for work in self._works:
            work.wait()
        self._works = []

    def _flattened(self) -> list[FlatBucket]:
        """Return the subtrees as flat tensors, one of which is home."""
        held = [node.value for node in self._tree.nodes]
        self._tree.nodes = []
        spare = iter(self._spare)
        flats = []
        for tensors in held:
            flat = self.home
            if tensors is not flat.views:
                if not self._is_home_free:
                    flat = next(spare, None) or self._another()
                self._is_home_free = False
                for view, tensor in zip(flat.views, tensors, strict=True):
                    view.zero_() if tensor is None else view.copy_(tensor)
            flats.append(flat)
        return flats

    def _another(self) -> FlatBucket:
        self._spare.append(self._layout.new(self._number))
        return self._spare[-1]

    def _add(self, left: Subtree, right: Subtree) -> Subtree:
        is_at_home = left is self.home.views or self._is_home_free
        self._is_home_free = False
        target = self.home.views if is_at_home else left
        found = [_sum(*terms) for terms in zip(left, right, target, strict=True)]
        return target if is_at_home else found

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Begin to give every other rank its tensor of *outgoing* and to get one from it into *incoming*."""
        others = [rank for rank in range(len(self._slices)) if rank != self._rank]
        ops = [dist.P2POp(dist.isend, outgoing[other], other) for other in others]
        ops += [dist.P2POp(dist.irecv, incoming[other], other) for other in others]
        self._works = dist.batch_isend_irecv(ops) if ops else []


def _sum(left: Tensor | None, right: Tensor | None, target: Tensor | None) -> Tensor | None:
    """Return left + right, in *target* if there is one."""
    if left is not None and right is not None:
        return torch.add(left, right, out=target)
    one = right if left is None else left
    if one is None:
        return None if target is None else target.zero_()
    return torch.add(one, 0.0, out=target)  # -0 becomes 0, as where another rank sends noughts
