"""Which nodes there are, and which of them form the next generation; knows no clock and no process."""

from __future__ import annotations

from dataclasses import dataclass

# Nodes that come within this time of each other are taken in together: one drain for all of them.
SETTLE_S = 0.5
_TOO_OFTEN = 2


@dataclass
class Node:
    """A node whose agent is ready.

    Attributes:
        name: Its id inside the launch.
        host: Name of its machine.
        nproc: Workers that it starts.
        rank: Its place among the nodes, where the rendezvous is static; else its arrival decides.
        is_leaving: It asked to leave and takes part in nothing new.
        is_excluded: It failed too often; it takes part in nothing new.
        failures: Generations in a row that failed first on it.
    """

    name: str
    host: str
    nproc: int
    rank: int | None = None
    is_leaving: bool = False
    is_excluded: bool = False
    failures: int = 0


class Nodes:
    """The nodes of a launch, in the order of their arrival, which is the order of their ranks.

    Args:
        least: Fewest nodes that train.
        most: Most nodes that train; further ones are spares and step in.
        settle_s: Seconds without an arrival after which nobody is waited for any more.
    """

    def __init__(self, least: int, most: int, settle_s: float = SETTLE_S) -> None:
        self._least, self._most, self._settle_s = least, most, settle_s
        self._by_name: dict[str, Node] = {}
        self._expected: set[str] = set()
        self._losses: dict[str, int] = {}
        self._settled_at = 0.0

    def __contains__(self, node: str) -> bool:
        """Return whether *node* is there."""
        return node in self._by_name

    def __len__(self) -> int:
        """Return how many nodes could take part."""
        return len(self._usable())

    @property
    def least(self) -> int:
        """Fewest nodes that train."""
        return self._least

    @property
    def are_enough(self) -> bool:
        """Whether as many could take part as have to."""
        return len(self) >= self._least

    def expect(self, node: str) -> None:
        """Have the first generation wait for *node*, which is on its way."""
        self._expected.add(node)

    def join(self, node: Node, now: float) -> None:
        """Take in a node; one of the same id, which it replaces, is forgotten."""
        self._by_name[node.name] = node
        self._expected.discard(node.name)
        self._settled_at = now + self._settle_s

    def leave(self, node: str) -> None:
        """Have *node* take part in nothing new."""
        self._by_name[node].is_leaving = True

    def lose(self, node: str) -> bool:
        """Forget *node*; return whether it was there."""
        self._expected.discard(node)
        return self._by_name.pop(node, None) is not None

    def leaving(self) -> list[str]:
        """Return the nodes that asked to leave and are still there."""
        return [node.name for node in self._by_name.values() if node.is_leaving]

    def note_loss(self, name: str) -> None:
        """Take in that node *name* was lost while nobody needed it."""
        self._losses[name] = self._losses.get(name, 0) + 1

    def may_come_back(self, name: str) -> bool:
        """Return whether to start node *name* again, which was lost while nobody needed it."""
        return self._losses.get(name, 0) <= _TOO_OFTEN

    def note_failure(self, name: str) -> None:
        """Take in that a generation failed first on node *name*."""
        for node in self._by_name.values():
            node.failures = node.failures + 1 if node.name == name else 0

    def fails_too_often(self, name: str) -> bool:
        """Return whether node *name* has failed twice in a row while others did not, and the others are enough."""
        node = self._by_name.get(name)
        return node is not None and node.failures >= _TOO_OFTEN and len(self._usable()) > self._least

    def exclude(self, name: str) -> None:
        """Have node *name* take part in nothing new."""
        self._by_name[name].is_excluded = True

    def forget_failures(self) -> None:
        """Take in that a step was finished: whose fault anything was does not matter any more."""
        for node in self._by_name.values():
            node.failures = 0

    def chosen(self, now: float, *, is_first: bool = False) -> tuple[Node, ...]:
        """Return who forms the next generation, in rank order; nobody while others are worth waiting for.

        The full set ends the wait, or a short time without an arrival. A first generation (*is_first*) also waits
        for those that are known to be coming.
        """
        chosen = self._usable()[: self._most]
        if len(chosen) < self._most and (now < self._settled_at or (is_first and self._expected)):
            return ()
        if len(chosen) < self._least:
            return ()
        return tuple(sorted(chosen, key=lambda node: node.rank or 0))

    def has_room_for_more(self, nodes: tuple[str, ...], now: float) -> bool:
        """Return whether a generation of *nodes* should make way for one with nodes that have come since."""
        return now >= self._settled_at and min(len(self._usable()), self._most) > len(nodes)

    def _usable(self) -> list[Node]:
        return [node for node in self._by_name.values() if not node.is_leaving and not node.is_excluded]
