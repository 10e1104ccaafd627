"""The run's nodes on Ray: an actor for each, begun again where Ray has room when one is lost."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elasticflow.errors import INTERRUPTED
from elasticflow.launcher.on_ray.actor import NodeActor
from elasticflow.launcher.on_ray.cluster import draining_nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.hosts.order import Order
    from elasticflow.launcher.on_ray.cluster import Demand

_LOOK_S = 0.5
_ANSWER_S = 10.0
_PAUSE_S = 1.0
_ENDING_S = 30.0


@dataclass
class _Node:
    """One node of the run.

    Attributes:
        number: From 0; a node that takes another's place has its number.
        actor: Of Ray.
        begun: Ray's promise that the actor has begun.
        host: Where it runs; empty while Ray has no room for it.
        ray_node: Ray's id of that node.
        exit_code: How it ended; None while it runs.
        is_leaving: It was asked to.
    """

    number: int
    actor: Any
    begun: Any
    host: str = ""
    ray_node: str = ""
    exit_code: int | None = None
    is_leaving: bool = False
    began: float = field(default_factory=time.monotonic)


class RayNodes(threading.Thread):
    """Keeps a number of nodes on Ray while the run goes on.

    A node that Ray has no room for waits, which asks an autoscaler for room. One whose node of Ray is lost, or is about to be
    taken away, gets another place.

    Args:
        ray: Connected.
        number: How many.
        demand: What each asks for.
        order: What each is told; the same for all.
        show: Called with the name of a node and each line that it prints.
        say: Called with what a person should know.
    """

    def __init__(
        self,
        ray: Any,
        number: int,
        demand: Demand,
        order: Order,
        show: Callable[[str, str], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(name="ray", daemon=True)
        self._ray, self._number, self._demand, self._order = ray, number, demand, order
        self._show, self._say = show, say
        self._nodes: list[_Node] = []
        self._is_over = threading.Event()
        self._out_of_reach = False

    def run(self) -> None:
        """Begin the nodes, and see to them until `close`."""
        again = dict.fromkeys(range(self._number), 0.0)
        while not self._is_over.is_set():
            try:
                for number, at in list(again.items()):
                    if time.monotonic() >= at:
                        self._nodes.append(self._begin(number))
                        del again[number]
                self._ask_draining_to_leave()
                for node in list(self._nodes):
                    if self._has_ended(node):
                        self._nodes.remove(node)
                        if node.exit_code is None or node.exit_code == INTERRUPTED or node.exit_code >= 128:
                            again[node.number] = time.monotonic() + _PAUSE_S
                self._out_of_reach = False
            except Exception as error:  # noqa: BLE001  # ray's own: the cluster is away, or was restarted
                if not self._out_of_reach:
                    self._say(
                        f"Ray cannot be reached: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
                    )
                self._out_of_reach = True
            self._is_over.wait(_LOOK_S)

    def close(self) -> None:
        """Have the nodes end: those that do not by themselves are asked to, then killed with their actors."""
        self._is_over.set()
        self.join()
        deadline = time.monotonic() + _ENDING_S + self._order.grace_s
        for node in [node for node in self._nodes if not node.host]:
            self._kill(node)
        running = [node for node in self._nodes if node.host]
        asked_at = time.monotonic() + _ENDING_S / 2
        try:
            while running and time.monotonic() < deadline:
                running = [node for node in running if not self._has_ended(node)]
                if time.monotonic() > asked_at:
                    asked_at = deadline
                    for node in running:
                        node.actor.leave.remote()
                time.sleep(_LOOK_S / 5)
        except Exception as error:  # noqa: BLE001  # ray's own
            self._say(f"Ray cannot be reached while the nodes end: {error}")
        for node in self._nodes:
            self._kill(node)

    def _begin(self, number: int) -> _Node:
        remote = self._ray.remote(NodeActor).options(
            num_cpus=self._demand.cpus,
            num_gpus=self._demand.gpus,
            max_restarts=0,
            max_concurrency=1,
            scheduling_strategy="SPREAD",
        )
        actor = remote.remote()
        # Several nodes of Ray may be on one machine; of each there is one node of the run at a time.
        order = replace(self._order, run=f"{self._order.run}/{number}")
        return _Node(number, actor, actor.begin.remote(order.to_line()))

    def _has_ended(self, node: _Node) -> bool:
        """Take in what a node has to say; return whether it is gone, with its exit code if it ended by itself."""
        errors = self._ray.exceptions
        try:
            if not node.host:
                if not self._ray.wait([node.begun], timeout=0)[0]:
                    return False
                node.host, node.ray_node = self._ray.get(node.begun)
                self._say(f"node on {node.host}, by Ray")
            heard = self._ray.get(node.actor.hear.remote(), timeout=_ANSWER_S)
        except errors.GetTimeoutError:
            return False
        except errors.RayActorError:
            self._say(f"{node.host or 'a node'}: Ray has lost it; it is begun again where there is room")
            return True
        for line in heard.lines:
            self._show(node.host, line)
        node.exit_code = heard.exit_code
        if node.exit_code is not None:
            self._kill(node)
        return node.exit_code is not None

    def _ask_draining_to_leave(self) -> None:
        draining = draining_nodes() if self._nodes else set()
        for node in self._nodes:
            if node.ray_node in draining and not node.is_leaving:
                node.is_leaving = True
                self._say(f"{node.host}: Ray takes this node away; it is asked to leave")
                node.actor.leave.remote()

    def _kill(self, node: _Node) -> None:
        try:
            self._ray.kill(node.actor)
        except Exception as error:  # noqa: BLE001  # ray's own: it is gone already, or nobody can reach it
            self._say(f"{node.host or 'a node'}: {error}")
