"""An agent's side of the launch's control store: its messages to the supervisor, and the orders that it reads there.

The supervisor's side is `launcher/supervisor/agent_channel.py`; the keys are described in `store_keys.py`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from elasticflow.launcher.rendezvous.store_keys import (
    ORDER_COUNT,
    OUTBOX_COUNT,
    block_of,
    message_key,
    order_key,
    parts_key,
)
from elasticflow.protocol.json_codec import from_json
from elasticflow.protocol.messages import MESSAGES, ORDERS, EndLaunch, GenerationFormed, NodeParts

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.protocol.control_store import ControlStore
    from elasticflow.protocol.messages import Message, NodePart


_POLL_S = 0.002
_LOOK_S = 0.05


@dataclass(frozen=True)
class Assignment:
    """A node's part in a generation.

    Attributes:
        failed_at: Monotonic time of the failure that it answers, if any.
        group_rank: Number of the node among those of the generation, from 0.
        world_size: Workers of all nodes.
    """

    generation: int
    failed_at: float | None
    group_rank: int
    group_world_size: int
    first_rank: int
    nproc: int
    world_size: int


def assignment_of(order: GenerationFormed, part: NodePart) -> Assignment:
    """Return the assignment of a node with *part* in the generation of *order*."""
    return Assignment(
        generation=order.generation,
        failed_at=None if order.failed_s is None else time.monotonic() - order.failed_s,
        group_world_size=order.nodes,
        world_size=order.world_size,
        **part._asdict(),
    )


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

        A message that does not get through leaves no gap: the next one has its number.

        One `set` for each message: if all agents shared one sequence of numbers, counted by `add`, an agent killed
        between `add` and `set` would leave a gap at which the supervisor waits for ever.
        """
        self._store.set(message_key(self.number, self._posted + 1), MESSAGES.encode(message))
        self._posted += 1


class Orders:
    """The supervisor's orders in *store*, as the agent of *node* reads them."""

    def __init__(self, store: ControlStore, node: str) -> None:
        self._store = store
        self._node = node
        self._seen = 0

    def skip_old(self) -> None:
        """Skip the orders that were published before this agent was started, but not the last one of the launch."""
        if self._store.check([ORDER_COUNT]):
            count = int(self._store.get(ORDER_COUNT))
            is_over = isinstance(ORDERS.decode(self._store.get(order_key(count))), EndLaunch)
            self._seen = count - is_over

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
                case GenerationFormed():
                    if (part := self._part_in(order)) is not None:
                        return assignment_of(order, part)
                case _:
                    assert_never(order)

    def _part_in(self, order: GenerationFormed) -> NodePart | None:
        """Return this node's part; None if it has none, or a later order has taken the place of this one."""
        key = parts_key(self._seen, block_of(self._node, order.blocks))
        if not self._store.check([key]):
            return None
        return from_json(NodeParts, json.loads(self._store.get(key))).nodes.get(self._node)

    def _wait_for(self, key: str, may_wait: Callable[[], None]) -> None:
        looked = 0.0
        while not self._store.check([key]):
            if (now := time.monotonic()) >= looked + _LOOK_S:
                looked = now
                may_wait()
            time.sleep(_POLL_S)


# Seconds. A smaller difference cannot be told from the time that a message travels or waits to be read.
_LEAST_SKEW_S = 30.0


def on_own_clock(noted: float, sent: float | None, now: float) -> float:
    """Return the Unix time *noted* on another clock as this machine's clock has it.

    Clocks that differ by less than half a minute count as equal.

    Args:
        noted: Time that the other machine noted.
        sent: Unix time at which that machine told it, on its clock; None: it did not say.
        now: Unix time at which it was heard, on this machine's clock.
    """
    if sent is None or abs(now - sent) < _LEAST_SKEW_S:
        return noted
    return noted + now - sent
