"""The sum over all virtual shards of all ranks in the order of one fixed tree: the library moves bytes, additions are ours.

Floating-point addition is not associative, so a sum is the same bit for bit only if its grouping is. Here the grouping
is that of the binary tree over leaves 0 .. n-1: ((0 + 1) + (2 + 3)) + ... A rank that holds neighbouring leaves adds
the whole subtrees among them; whoever gets those of all ranks adds the rest (`TreeSum`).

What the shards give is cut into buckets (`BucketLayout`), each on its way by itself: this rank's subtrees are added up,
their slices go to the slices' owners, who add the rest, and the totals come back to all (`FixedOrderAllReduce`). Both
exchanges are point to point (`batch_isend_irecv`): gloo's all_gather takes three times as long as its sends (torch 2.13).
NCCL's are point to point, too, in one group of calls for each bucket: to wait for them, in `add_slices`, is then a wait of
the stream of the training, and not of the host. What runs over one link is matched by its order, so every rank sends the
same buckets in the same order, whenever each is ready.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow.runtime.process.position import even_split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Subtree = Sequence[Tensor | None]  # None: zeros

_ALIGNED = 64  # bytes: as torch aligns a tensor of its own
BUCKET_BYTES = 8 * 2**20

T = TypeVar("T")


class FlatBucket(NamedTuple):
    """A flat tensor, and the tensors that lie in it as views."""

    whole: Tensor
    views: list[Tensor]


class BucketLayout:
    """Layout of several tensors in flat ones, the buckets: each of one dtype and a few megabytes.

    A tensor larger than that has a bucket of its own. Buckets are filled from the last tensor to the first, which is
    the order in which a backward makes gradients ready; the first tensor lies in the last bucket.

    Args:
        tensors: Tensors to lay out: shapes, strides, dtypes and the device count, values do not.
        parts: Every bucket can be cut into so many equal slices.

    Attributes:
        buckets: For each bucket, which of the tensors lie in it, in order.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: int) -> None:
        self._device, self._parts = tensors[0].device, parts
        # A gradient lies in memory as its parameter does, else sums over its elements would have another order.
        self._likes = [torch.empty_like(tensor, device="meta") for tensor in tensors]
        self.buckets: list[list[int]] = []
        open_buckets: dict[torch.dtype, list[int]] = {}
        for number in reversed(range(len(tensors))):
            dtype = tensors[number].dtype
            bucket = open_buckets.setdefault(dtype, [])
            bucket.insert(0, number)
            if sum(self._likes[n].nbytes for n in bucket) >= BUCKET_BYTES:
                self.buckets.append(open_buckets.pop(dtype))
        self.buckets += sorted(open_buckets.values(), reverse=True)

    def new(self, bucket: int) -> FlatBucket:
        """Return a new flat tensor for *bucket*: zeros between its tensors, which have no values yet."""
        likes = [self._likes[number] for number in self.buckets[bucket]]
        step = _ALIGNED // likes[0].element_size()
        offsets, end = [], 0
        for like in likes:
            offsets.append(end)
            end += -(-like.numel() // step) * step
        size = max(1, -(-end // self._parts)) * self._parts
        whole = torch.empty(size, dtype=likes[0].dtype, device=self._device)
        ends = [at + like.numel() for like, at in zip(likes, offsets, strict=True)]
        for begin, next_at in zip(ends, [*offsets[1:], size], strict=True):
            whole[begin:next_at].zero_()
        views = [
            whole.as_strided(like.shape, like.stride(), at) for like, at in zip(likes, offsets, strict=True)
        ]
        return FlatBucket(whole, views)


class Node(NamedTuple, Generic[T]):
    """A subtree: the sum of leaves `[place << level, (place + 1) << level)`, as far as there are such."""

    level: int
    place: int
    value: T


class TreeSum(Generic[T]):
    """Adds up neighbouring leaves or subtrees in ascending order; `nodes` holds the remaining subtrees, as few as possible.

    Args:
        add: Returns left + right; it may overwrite both.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves, self._add = leaves, add
        self._height = (leaves - 1).bit_length()
        self.nodes: list[Node[T]] = []

    def push(self, level: int, place: int, value: T) -> None:
        """Take the subtree that follows those before it; a leaf is a subtree of level 0."""
        while level < self._height:
            if place % 2 == 0:
                if (place + 1) << level < self._leaves:
                    break  # its sibling is still to come
            elif self.nodes and self.nodes[-1][:2] == (level, place - 1):
                value = self._add(self.nodes.pop().value, value)
            else:
                break  # its sibling is another rank's
            # A left child whose sibling is empty is its parent already.
            level, place = level + 1, place // 2
        self.nodes.append(Node(level, place, value))


def places(leaves: int, low: int, high: int) -> list[tuple[int, int]]:
    """Return level and place of the subtrees that remain after the leaves `[low, high)` are added up."""
    tree: TreeSum[None] = TreeSum(leaves, lambda *_: None)
    for leaf in range(low, high):
        tree.push(0, leaf, None)
    return [(node.level, node.place) for node in tree.nodes]


class FixedOrderAllReduce:
    """Adds up what all shards of all ranks give, step by step.

    Args:
        ranks: The ranks that share the shards out among them, each its even part, in this order.
    """

    def __init__(self, layout: BucketLayout, shards: int, ranks: Sequence[int], rank: int) -> None:
        self._buckets = layout.buckets
        self._lanes = [_Lane(layout, number, shards, ranks, rank) for number in range(len(self._buckets))]
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

    def leave(self, memory: Tensor) -> None:
        """Have nothing pushed so far lie in *memory*: a row that waits for its sibling would keep the memory of all."""
        for lane in self._lanes:
            lane.leave(memory)

    def send_rest(self) -> None:
        """Send what was pushed and not sent yet; does not wait."""
        while self._sent < len(self._lanes):
            self._send()

    def send_early(self, shard: int, leaf: Subtree) -> None:
        """Take the next bucket of this rank's last shard, and send it while the shard is still at work on others."""
        self._lanes[self._sent].push(shard, leaf)
        self._send()

    def total(self) -> list[Tensor]:
        """Return the sum over all shards, in the layout's order; the next step overwrites it, unless `release` was called.

        Collective: every rank.
        """
        self.send_rest()
        self._lanes[-1].add_slices()
        for lane in self._lanes:
            lane.wait()
        return self.memory()

    def memory(self) -> list[Tensor]:
        """Return the tensors in which the total comes to lie, in the layout's order; sums of some shards before."""
        tensors = [torch.Tensor()] * sum(map(len, self._buckets))
        for bucket, lane in zip(self._buckets, self._lanes, strict=True):
            for place, tensor in zip(bucket, lane.home.views, strict=True):
                tensors[place] = tensor
        return tensors

    def release(self) -> None:
        """Hold no memory until the next step. The total stays as long as the caller holds it."""
        for lane in self._lanes:
            lane.release()

    def _send(self) -> None:
        self._lanes[self._sent].send_slices()
        if self._sent:  # by now the slices of the one before are likely to be here
            self._lanes[self._sent - 1].add_slices()
        self._sent += 1


class _Lane:
    """One bucket on its way; its memory is made at its first use, and again after `release`."""

    def __init__(
        self, layout: BucketLayout, number: int, shards: int, ranks: Sequence[int], rank: int
    ) -> None:
        self._layout, self._number, self._shards = layout, number, shards
        # Numbers among *ranks*, from here on.
        self._ranks, self._rank = ranks, ranks.index(rank)
        self._places = [places(shards, *even_split(shards, len(ranks), other)) for other in range(len(ranks))]
        self._works: list[dist.Work] = []
        self.release()
        self.begin()

    def release(self) -> None:
        self._home: FlatBucket | None = None
        self._spare: list[FlatBucket] = []
        self._received: list[Tensor] = []
        self._own: list[Tensor] = []

    @property
    def home(self) -> FlatBucket:
        """The bucket in which the total comes to lie."""
        if self._home is None:
            self._home = self._layout.new(self._number)
        return self._home

    def _slices(self) -> list[Tensor]:
        return list(self.home.whole.chunk(len(self._ranks)))

    def _receivers(self) -> list[Tensor]:
        """Return the memory in which each other rank's subtrees of this rank's slice arrive, in order."""
        if not self._received:
            size = len(self._slices()[0])
            self._received = [
                self.home.whole.new_empty(0 if other == self._rank else len(held), size)
                for other, held in enumerate(self._places)
            ]
        return self._received

    def begin(self) -> None:
        self._tree: TreeSum[Subtree] = TreeSum(self._shards, self._add)
        self._is_home_free = True

    def push(self, shard: int, leaf: Subtree) -> None:
        self._tree.push(0, shard, leaf)

    def leave(self, memory: Tensor) -> None:
        left = memory.untyped_storage().data_ptr()
        for place, node in enumerate(self._tree.nodes):
            if any(t is not None and t.untyped_storage().data_ptr() == left for t in node.value):
                copies = [None if tensor is None else tensor.clone() for tensor in node.value]
                self._tree.nodes[place] = node._replace(value=copies)

    def send_slices(self) -> None:
        """Send this rank's subtrees, each slice to its owner; does not wait."""
        rows = [flat.whole.chunk(len(self._ranks)) for flat in self._flattened()]
        self._own = [row[self._rank] for row in rows]
        self._swap(
            [torch.stack(to) if len(to) > 1 else to[0] for to in zip(*rows, strict=True)], self._receivers()
        )

    def add_slices(self) -> None:
        """Wait for everybody's subtrees of this rank's slice, and send all their sum; does not wait for the others'."""
        self.wait()
        slices = self._slices()
        mine = slices[self._rank]
        lies_at_home = mine.data_ptr()

        def add(left: Tensor, right: Tensor) -> Tensor:
            return torch.add(left, right, out=right if right.data_ptr() == lies_at_home else left)

        tree: TreeSum[Tensor] = TreeSum(self._shards, add)
        for rank, held in enumerate(self._places):
            rows = self._own if rank == self._rank else self._received[rank]
            for (level, place), row in zip(held, rows, strict=True):
                tree.push(level, place, row)
        self._swap([mine] * len(slices), slices)

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
        sums = [_sum(*terms) for terms in zip(left, right, target, strict=True)]
        return target if is_at_home else sums

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> None:
        """Begin to give every other rank its tensor of *outgoing* and to get one from it into *incoming*."""
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        ops = [dist.P2POp(dist.isend, outgoing[other], self._ranks[other]) for other in others]
        ops += [dist.P2POp(dist.irecv, incoming[other], self._ranks[other]) for other in others]
        self._works = dist.batch_isend_irecv(ops) if ops else []


def _sum(left: Tensor | None, right: Tensor | None, target: Tensor | None) -> Tensor | None:
    """Return left + right, in *target* if there is one."""
    if left is not None and right is not None:
        return torch.add(left, right, out=target)
    one = right if left is None else left
    if one is None:
        return None if target is None else target.zero_()
    return torch.add(one, 0.0, out=target)  # -0 becomes 0, as where another rank sends zeros
