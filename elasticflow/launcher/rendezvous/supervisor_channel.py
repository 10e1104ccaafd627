"""An agent's side of the launch's control store: its messages to the supervisor, and the orders that it reads there.

The supervisor's side is `launcher/supervisor/agent_channel.py`; the keys are described in `store_keys.py`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from elasticflow.launcher.rendezvous.store_keys import ORDER_COUNT, OUTBOX_COUNT, message_key, order_key
from elasticflow.protocol.messages import MESSAGES, ORDERS, EndLaunch, FormGeneration
from elasticflow.system.clocks import on_own_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.messages import Message

_POLL_S = 0.002
_LOOK_S = 0.05


@dataclass(frozen=True)
class Assignment:
    """A node's part in a generation.

    Attributes:
        generation: Its number.
        failed_at: Unix time of the failure that it answers, if any, on this machine's clock.
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


def assignment_of(order: FormGeneration, node: str) -> Assignment | None:
    """Return the part that *node* takes in the generation of *order*, or None if it takes none."""
    first_rank, world_size = 0, sum(nproc for _, nproc in order.nodes)
    for group_rank, (name, nproc) in enumerate(order.nodes):
        if name == node:
            return Assignment(
                generation=order.generation,
                failed_at=None
                if order.failed_at is None
                else on_own_clock(order.failed_at, order.sent_at, time.time()),
                group_rank=group_rank,
                group_world_size=len(order.nodes),
                first_rank=first_rank,
                nproc=nproc,
                world_size=world_size,
            )
        first_rank += nproc
    return None


class Outbox:
    """Messages of one agent to the supervisor, in order.

    Attributes:
        number: The outbox's number among all of the launch, from 1.
    """

    def __init__(self, store: ControlStore) -> None:
        self._store = store
        self.number = store.add(OUTBOX_COUNT, 1)
        self._posted = 0

    def post(self, message: Message) -> None:
        """Append *message*; it arrives even if this process is killed right after.

        One `set` for each message: if all agents shared one sequence of numbers, counted by `add`, an agent killed
        between `add` and `set` would leave a gap at which the supervisor waits for ever.
        """
        self._posted += 1
        self._store.set(message_key(self.number, self._posted), MESSAGES.encode(message))


class Orders:
    """The supervisor's orders in *store*, as the agent of *node* reads them."""

    def __init__(self, store: ControlStore, node: str) -> None:
        self._store = store
        self._node = node
        self._seen = 0

    def skip_old(self) -> None:
        """Skip the orders that were published before this agent was started."""
        if self._store.check([ORDER_COUNT]):
            self._seen = int(self._store.get(ORDER_COUNT))

    def wait_for_next(self, may_wait: Callable[[], None] = lambda: None) -> Assignment | None:
        """Return this node's part in the next generation that it takes part in, or None once the launch is over.

        There is no time limit: the agent ends with its supervisor.

        Args:
            may_wait: Called several times a second meanwhile; an exception ends the wait.
        """
        while True:
            self._wait_for(order_key(self._seen + 1), may_wait)
            self._seen += 1
            order = ORDERS.decode(self._store.get(order_key(self._seen)))
            match order:
                case EndLaunch():
                    return None
                case FormGeneration():
                    if (assignment := assignment_of(order, self._node)) is not None:
                        return assignment
                case _:
                    assert_never(order)

    def _wait_for(self, key: str, may_wait: Callable[[], None]) -> None:
        looked = 0.0
        while not self._store.check([key]):
            if (now := time.monotonic()) >= looked + _LOOK_S:
                looked = now
                may_wait()
            time.sleep(_POLL_S)
