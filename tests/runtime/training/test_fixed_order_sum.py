"""Sums over one fixed tree, whoever holds the leaves, and where the tensors lie that are added."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticflow.runtime.process.position import even_split
from elasticflow.runtime.training.fixed_order_sum import (
    BUCKET_BYTES,
    BucketLayout,
    FixedOrderAllReduce,
    Node,
    TreeSum,
    places,
)


def grouped(left: str, right: str) -> str:
    """Return the sum as text: its grouping can be compared."""
    return f"({left}+{right})"


def whole(leaves: int) -> str:
    """Return how one rank that holds all leaves adds them."""
    tree = TreeSum(leaves, grouped)
    for leaf in range(leaves):
        tree.push(0, leaf, str(leaf))
    [root] = tree.nodes
    return root.value


def test_the_grouping_is_the_binary_tree() -> None:
    """What is left over joins as late as it can, as a subtree of its own."""
    assert whole(1) == "0"
    assert whole(4) == "((0+1)+(2+3))"
    assert whole(7) == "(((0+1)+(2+3))+((4+5)+6))"


@given(leaves=st.integers(1, 70), data=st.data())
def test_the_grouping_does_not_depend_on_the_ranks(leaves: int, data: st.DataObject) -> None:
    """Each rank adds what it holds, an owner adds the rest: the same sum, term by term."""
    ranks = data.draw(st.integers(1, leaves))
    left: list[Node[str]] = []
    for rank in range(ranks):
        low, high = even_split(leaves, ranks, rank)
        tree = TreeSum(leaves, grouped)
        for leaf in range(low, high):
            tree.push(0, leaf, str(leaf))
        assert [(node.level, node.place) for node in tree.nodes] == places(leaves, low, high)
        assert len(tree.nodes) <= 2 * max(1, leaves.bit_length())
        left += tree.nodes
    owner = TreeSum(leaves, grouped)
    for node in left:
        owner.push(*node)
    assert [node.value for node in owner.nodes] == [whole(leaves)]


def test_buckets_are_filled_from_the_last_to_the_first() -> None:
    """A large tensor closes one; each holds one dtype; the first tensor lies in the last."""
    large = torch.empty(BUCKET_BYTES // 4)
    half = torch.empty(3, dtype=torch.bfloat16)
    assert BucketLayout([torch.empty(2), half, large, torch.empty(5)], 2).buckets == [
        [2, 3],
        [1],
        [0],
    ]
    assert BucketLayout([torch.empty(2), half], 2).buckets == [[1], [0]]


def test_views_lie_as_what_they_are_for() -> None:
    """Strides are kept, a view begins where a tensor of its own could, and all ranks own as much."""
    image = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    likes = [torch.empty(()), image, torch.empty(7, 2).t(), torch.empty(0, 4)]
    whole, views = BucketLayout(likes, 3).new(0)
    assert [v.shape for v in views] == [like.shape for like in likes]
    assert [v.stride() for v in views] == [like.stride() for like in likes]
    assert all(view.storage_offset() % 16 == 0 for view in views)
    assert len(whole) % 3 == 0
    for number, view in enumerate(views):
        view.fill_(number)
    assert whole.sum() == sum(number * view.numel() for number, view in enumerate(views))


def test_a_total_stays_once_the_sum_was_released() -> None:
    """The next step adds up in other memory; without `release` it overwrites the total."""
    added = FixedOrderAllReduce(BucketLayout([torch.empty(5)], 1), 2, [0], 0)
    totals = []
    for step in (1.0, 2.0, 3.0):
        added.begin()
        for leaf in range(2):
            added.push(leaf, [torch.full((5,), step)])
        totals += added.total()
        if step == 1.0:
            added.release()
    assert [2.0, 6.0, 6.0] == [float(total[0]) for total in totals]


def test_a_row_that_waits_for_its_sibling_does_not_hold_the_memory_that_it_came_in() -> None:
    """Three rows come at a time, and the third one's sibling comes in the next round."""
    values = torch.arange(6.0).repeat_interleave(5).view(6, 5).square()
    total = FixedOrderAllReduce(BucketLayout([values[0]], 1), 6, [0], 0)
    total.begin()
    for leaves in (range(3), range(3, 6)):
        came = values[leaves.start : leaves.stop].clone()
        for place, leaf in enumerate(leaves):
            total.push(leaf, [came[place]])
        total.leave(came)
        came.fill_(torch.nan)
    assert torch.equal(values.sum(0), total.total()[0])
