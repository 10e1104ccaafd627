"""The nodes of a launch, and the choice of those that form the next generation; knows no clock and no process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.restarts.restart_policy import unready_end
from elasticflow.launcher.supervisor.commands import RecordEvent, ReleaseNode
from elasticflow.protocol.shard_groups import fits

if TYPE_CHECKING:
    from collections.abc import Collection

    from elasticflow.launcher.agent.agent_process import AgentEnd
    from elasticflow.launcher.supervisor.commands import Command
    from elasticflow.protocol.messages import NodeReady
    from elasticflow.protocol.shard_groups import Shard

# Nodes that come within this time of each other are taken in together: one drain for all of them.
SETTLE_S = 0.5
_TOO_OFTEN = 2


@dataclass
class Node:
    """A node whose agent is ready.

    Attributes:
        name: The node's id inside the launch.
        rank: The node's place among all nodes, where the rendezvous is static; else its arrival decides.
        is_leaving: It asked to leave and takes part in nothing new.
        is_excluded: It failed too often, or its devices are faulty; it takes part in nothing new.
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
        most: Most nodes that train; further ones are spares and step in.
        settle_s: Seconds without an arrival after which no one is waited for any more.

    Attributes:
        shard: As given.
    """

    def __init__(self, least: int, most: int, shard: Shard = 1, settle_s: float = SETTLE_S) -> None:
        self._least, self._most, self._settle_s = least, most, settle_s
        self.shard = shard
        self._by_name: dict[str, Node] = {}
        self._expected: set[str] = set()
        self._unready_ends: dict[str, tuple[str, ...]] = {}
        # Names, and machines with their reasons: a machine that joins again has another name.
        self._excluded: set[str] = set()
        self._faulty_hosts: dict[str, str] = {}
        self._known: set[str] = set()
        self._settled_at = 0.0

    def __contains__(self, node: str) -> bool:
        """Return whether *node* is there."""
        return node in self._by_name

    def __len__(self) -> int:
        """Return the number of nodes that could take part."""
        return len(self._usable())

    @property
    def least(self) -> int:
        """Fewest nodes that train, if those that are still to come have as many workers as the last that came."""
        workers = [node.nproc for node in self._usable()]
        for number in range(self._least, self._most + 1):
            if fits(self.shard, [*workers[:number], *workers[-1:] * (number - len(workers))]):
                return number
        return max(self._least, len(workers) + 1)

    @property
    def are_enough(self) -> bool:
        """True if enough nodes could take part."""
        return bool(self._formed(self._usable()))

    def workers_of(self, name: str) -> int:
        """Return the number of workers of node *name*, which is there."""
        return self._by_name[name].nproc

    def expect(self, node: str) -> None:
        """Have the first generation wait for *node*, which is on its way."""
        self._expected.add(node)

    def join(self, ready: NodeReady, now: float) -> list[Command]:
        """Take in the node whose agent is *ready*; it replaces one of the same id.

        A new node on a machine with a faulty device is excluded at once.
        """
        is_new = ready.node not in self._known
        self._known.add(ready.node)
        self._by_name[ready.node] = Node(
            ready.node,
            ready.host,
            ready.nproc,
            ready.node_rank,
            is_excluded=ready.node in self._excluded,
        )
        self._expected.discard(ready.node)
        self._unready_ends.pop(ready.node, None)
        self._settled_at = now + self._settle_s
        fields = {"node": ready.node, "host": ready.host, "nproc": ready.nproc}
        return [
            RecordEvent(events.NODE_JOINED, fields),
            *(RecordEvent(events.PRELOAD_REFUSED, module._asdict()) for module in ready.refused),
            *(
                self.exclude(ready.node, self._faulty_hosts[ready.host])
                if is_new and ready.host in self._faulty_hosts
                else ()
            ),
        ]

    def leave(self, name: str) -> None:
        """Have node *name* take part in nothing new."""
        self._by_name[name].is_leaving = True

    def lose(self, name: str, reason: str) -> list[Command]:
        """Forget node *name*, if it is there."""
        self._expected.discard(name)
        if self._by_name.pop(name, None) is None:
            return []
        # Should it live after all, it must not continue.
        return [RecordEvent(events.NODE_LOST, {"node": name, "reason": reason}), ReleaseNode(name)]

    def let_go(self, busy: Collection[str]) -> list[Command]:
        """Forget the nodes that asked to leave, but for those that are *busy*."""
        commands: list[Command] = []
        for node in list(self._by_name.values()):
            if node.is_leaving and node.name not in busy:
                del self._by_name[node.name]
                commands += [RecordEvent(events.NODE_LEFT, {"node": node.name}), ReleaseNode(node.name)]
        return commands

    def note_agent_end(self, name: str, end: AgentEnd) -> None:
        """Take in the end of node *name*'s agent; only ends of agents that are not ready yet count."""
        if name not in self._by_name:
            described = unready_end(end.cause, is_its_own_doing=end.is_its_own_doing)
            self._unready_ends[name] = (*self.unready_ends(name), described)

    def unready_ends(self, name: str) -> tuple[str, ...]:
        """Return how the agents of node *name* ended, one after the other, since one was ready."""
        return self._unready_ends.get(name, ())

    def note_failure(self, name: str, error: str) -> list[Command]:
        """Take in that a generation failed first on node *name*.

        The second time in a row the node is excluded, if the others are enough.
        """
        for node in self._by_name.values():
            node.failures = node.failures + 1 if node.name == name else 0
        failed = self._by_name.get(name)
        if failed is None or failed.failures < _TOO_OFTEN or not self.can_spare(name):
            return []
        reason = f"it failed twice in a row while others did not: {error}"
        return self.exclude(name, reason, until_it_joins=True)

    def can_spare(self, name: str) -> bool:
        """Return whether node *name* is there and enough others are."""
        others = [node for node in self._usable() if node.name != name]
        return bool(self._formed(others)) and name in self._by_name

    def exclude(self, name: str, reason: str, *, until_it_joins: bool = False) -> list[Command]:
        """Have node *name*, which is there, take no part any more.

        Neither does its machine under a new name, nor the node once its agent is started again, unless *until_it_joins*: a
        new agent may mean that someone has mended it.
        """
        node = self._by_name[name]
        if not until_it_joins:
            self._excluded.add(name)
            self._faulty_hosts.setdefault(node.host, reason)
        if node.is_excluded:
            return []
        node.is_excluded = True
        return [RecordEvent(events.NODE_EXCLUDED, {"node": name, "reason": reason})]

    def forget_failures(self) -> None:
        """Take in that a step was finished: earlier failures do not count against nodes any more."""
        for node in self._by_name.values():
            node.failures = 0

    def chosen(self, now: float, *, is_first: bool = False) -> tuple[Node, ...]:
        """Return the nodes of the next generation, in rank order; none while other nodes are worth waiting for.

        The full set ends the wait, or a short time without an arrival. A first generation (*is_first*) also waits
        for those that are known to be coming.
        """
        usable = self._usable()
        if len(usable) < self._most and (now < self._settled_at or (is_first and self._expected)):
            return ()
        # If not even the full set fits, its workers say so: no node that comes later would help.
        chosen = self._formed(usable) or (usable[: self._most] if len(usable) >= self._most else [])
        return tuple(sorted(chosen, key=lambda node: node.rank or 0))

    def has_room_for_more(self, nodes: tuple[str, ...], now: float) -> bool:
        """Return whether a generation of *nodes* should make way for one with nodes that have come since."""
        return now >= self._settled_at and len(self._formed(self._usable())) > len(nodes)

    def _formed(self, nodes: list[Node]) -> list[Node]:
        """Return the most of *nodes*, in the order of their arrival, that can train; none if they are too few."""
        for number in range(min(len(nodes), self._most), self._least - 1, -1):
            if fits(self.shard, [node.nproc for node in nodes[:number]]):
                return nodes[:number]
        return []

    def _usable(self) -> list[Node]:
        return [node for node in self._by_name.values() if not node.is_leaving and not node.is_excluded]
