"""Who takes part in the next generation, as agents read it: decided by the supervisor, in `launcher/supervisor/generations.py`.

The keys are told in `launcher/rendezvous/store_keys.py`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.launcher.rendezvous.store_keys import FEEDS, ROUNDS, feed_key, round_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.protocol.control_store import ControlStore

_POLL_S = 0.002
_LOOK_S = 0.05


@dataclass(frozen=True)
class Assignment:
    """A node's part in a generation.

    Attributes:
        generation: Its number.
        failed_at: Unix time of the failure that it answers, if any.
        group_rank: Number of the node among those of the generation, from 0.
        group_world_size: How many nodes those are.
        first_rank: Rank of the node's first worker.
        nproc: Workers of the node.
        world_size: Workers of all nodes.
    """

    generation: int
    failed_at: float | None
    group_rank: int
    group_world_size: int
    first_rank: int
    nproc: int
    world_size: int


@dataclass(frozen=True)
class Round:
    """Who takes part next (torch's word), the same for every node.

    Attributes:
        stop: The launch is over; agents leave.
        generation: Number of the generation to form.
        nodes: Ids of its nodes in rank order, each with its number of workers.
        failed_at: Unix time of the failure it answers, if any.
    """

    stop: bool = False
    generation: int = 0
    nodes: tuple[tuple[str, int], ...] = ()
    failed_at: float | None = None

    def assignment(self, node: str) -> Assignment | None:
        """Return the part that *node* takes, or None if it takes none."""
        first, world_size = 0, sum(count for _, count in self.nodes)
        for number, (name, nproc) in enumerate(self.nodes):
            if name == node:
                return Assignment(
                    self.generation, self.failed_at, number, len(self.nodes), first, nproc, world_size
                )
            first += nproc
        return None


class Outbox:
    """Messages of one agent to the supervisor, in order.

    Attributes:
        number: Its number among all agents of the launch.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self.number = store.add(FEEDS, 1)
        self._posted = 0

    def post(self, message: dict[str, Any]) -> None:
        """Append one message; it arrives even if this process is killed right after.

        One `set` a message: counted by `add` first, as numbers shared by all agents would be, an agent killed
        between the two would leave a gap at which the supervisor waits for ever.
        """
        self._posted += 1
        self._store.set(feed_key(self.number, self._posted), json.dumps(message))


class Rounds:
    """The supervisor's rounds, as the agent of one node reads them: no last call, no election.

    Args:
        store: The launch's, from `join_store`.
        node: Id of this node.
    """

    def __init__(self, store: ControlStore, node: str) -> None:
        self._store = store
        self._node = node
        self._seen = 0

    def skip_old(self) -> None:
        """Forget rounds that were published before this agent was started."""
        if self._store.check([ROUNDS]):
            self._seen = int(self._store.get(ROUNDS))

    def wait_for_next(self, may_wait: Callable[[], None] = lambda: None) -> Assignment | None:
        """Return this node's part in the next round that names it, or None once the launch is over.

        There is no time limit: the supervisor's life is one.

        Args:
            may_wait: Called several times a second meanwhile; an exception ends the wait.
        """
        while True:
            self._wait_for(round_key(self._seen + 1), may_wait)
            self._seen += 1
            fields = json.loads(self._store.get(round_key(self._seen)))
            nodes = tuple((node, nproc) for node, nproc in fields.pop("nodes"))
            round_ = Round(nodes=nodes, **fields)
            if round_.stop:
                return None
            if (assignment := round_.assignment(self._node)) is not None:
                return assignment

    def _wait_for(self, key: str, may_wait: Callable[[], None]) -> None:
        looked = 0.0
        while not self._store.check([key]):
            if (now := time.monotonic()) >= looked + _LOOK_S:
                looked = now
                may_wait()
            time.sleep(_POLL_S)
