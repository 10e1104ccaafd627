"""Where tensors lie in flat ones."""

from __future__ import annotations

import torch

from elasticflow.runtime.training import buckets


def test_buckets_are_filled_from_the_last_to_the_first() -> None:
    """A large tensor closes one; each holds one dtype; the first tensor lies in the last."""
    large = torch.empty(buckets.BUCKET_BYTES // 4)
    half = torch.empty(3, dtype=torch.bfloat16)
    assert buckets.BucketLayout([torch.empty(2), half, large, torch.empty(5)], 2).buckets == [
        [2, 3],
        [1],
        [0],
    ]
    assert buckets.BucketLayout([torch.empty(2), half], 2).buckets == [[1], [0]]


def test_views_lie_as_what_they_are_for() -> None:
    """Strides are kept, a view begins where a tensor of its own could, and all ranks own as much."""
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    likes = [torch.empty(()), image, torch.empty(7, 2).t(), torch.empty(0, 4)]
    whole, views = buckets.BucketLayout(likes, 3).new(0)
    assert [v.shape for v in views] == [like.shape for like in likes]
    assert [v.stride() for v in views] == [like.stride() for like in likes]
    assert all(view.storage_offset() % 16 == 0 for view in views)
    assert len(whole) % 3 == 0
    for number, view in enumerate(views):
        view.fill_(number)
    assert whole.sum() == sum(number * view.numel() for number, view in enumerate(views))
