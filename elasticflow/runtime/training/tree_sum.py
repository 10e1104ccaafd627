"""Sums in the order of one fixed binary tree, however its leaves are spread over ranks.

Floating-point addition is not associative, so a sum is the same bit for bit only if its grouping is. Here the grouping
is that of the binary tree over leaves 0 .. n-1: ((0 + 1) + (2 + 3)) + ... A rank that holds neighbouring leaves adds
the whole subtrees among them; whoever gets those of all ranks adds the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Node(NamedTuple, Generic[T]):
    """A subtree: the sum of leaves `[place << level, (place + 1) << level)`, as far as there are such."""

    level: int
    place: int
    value: T


class TreeSum(Generic[T]):
    """Adds up neighbouring leaves or subtrees in ascending order; `nodes` is what is left, as few as can be.

    Args:
        leaves: Of the whole tree.
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
    """Return level and place of the subtrees that are left of the leaves `[low, high)`."""
    tree: TreeSum[None] = TreeSum(leaves, _nothing)
    for leaf in range(low, high):
        tree.push(0, leaf, None)
    return [(node.level, node.place) for node in tree.nodes]


def _nothing(left: None, right: None) -> None:
    """Add what has no value."""
    del left, right
