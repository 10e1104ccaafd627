"""Many tensors as stretches of a few flat ones, so that they are added and sent together."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_ALIGNED = 64  # bytes: as torch aligns a tensor of its own
BUCKET_BYTES = 8 * 2**20


class FlatBucket(NamedTuple):
    """A flat tensor, and the tensors that lie in it as views."""

    whole: Tensor
    views: list[Tensor]


class BucketLayout:
    """Where each of several tensors lies in flat ones, the buckets: each of one dtype and of a few megabytes.

    A tensor larger than that has a bucket of its own. Buckets are filled from the last tensor to the first, which is
    the order in which a backward makes gradients ready; the first tensor lies in the last bucket.

    Args:
        tensors: What is to lie in them: shapes, strides, dtypes and the device; their values do not matter.
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
        """Return a new flat tensor of noughts for *bucket*."""
        likes = [self._likes[number] for number in self.buckets[bucket]]
        step = _ALIGNED // likes[0].element_size()
        offsets, end = [], 0
        for like in likes:
            offsets.append(end)
            end += -(-like.numel() // step) * step
        size = max(1, -(-end // self._parts)) * self._parts
        whole = torch.zeros(size, dtype=likes[0].dtype, device=self._device)
        places = zip(likes, offsets, strict=True)
        return FlatBucket(whole, [whole.as_strided(like.shape, like.stride(), at) for like, at in places])
