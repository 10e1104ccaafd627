"""Groups of nodes that can be cut into shard groups: the closed form and the definition agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elasticflow.protocol.shard_groups import fits, node_counts

SMALL = st.integers(1, 12)


@given(SMALL, SMALL, SMALL, SMALL)
def test_node_counts_are_those_that_fit(shard: int, low: int, more: int, per_node: int) -> None:
    """Each number of nodes whose workers are a multiple of the degree, and no other."""
    high = low + more
    expected = [nodes for nodes in range(low, high + 1) if fits(shard, [per_node] * nodes)]
    assert list(node_counts(shard, low, high, per_node)) == expected


def test_groups_of_a_node_need_nodes_that_are_alike() -> None:
    """The group of all workers fits any nodes."""
    assert fits("node", [4, 4])
    assert not fits("node", [4, 2])
    assert fits("all", [4, 2, 3])
    assert list(node_counts("node", 1, 3, 4)) == list(node_counts("all", 1, 3, 4)) == [1, 2, 3]
