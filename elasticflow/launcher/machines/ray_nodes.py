"""The run's nodes on Ray: an actor for each, begun again where Ray has room when one is lost."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.errors import INTERRUPTED
from elasticflow.launcher.machines.cluster import draining_nodes
from elasticflow.launcher.machines.remote import LEAVE, Order
from elasticflow.system.installation import module_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.machines.cluster import Demand


class Heard(NamedTuple):
    """News of a node since it was last asked: lines that it printed; its exit code, None while it runs."""

    lines: list[str]
    exit_code: int | None


class Begun(NamedTuple):
    """Place where a node has begun: the host's name, and Ray's id of its node."""

    host: str
    ray_node: str


class NodeActor:
    """One node of a run; its methods are called through Ray, one at a time.

    The node lives as long as this actor does: it exits when the actor's end of its standard input is closed, which the
    kernel does when the actor is killed.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def begin(self, order_line: str) -> Begun:
        """Start the node that `Order.to_line` describes; return where it is.

        Where the project's folder is not there, the node runs in the working directory that the Ray job has brought along.
        """
        import ray

        order = Order.from_line(order_line)
        if not Path(order.folder).is_dir():
            order = replace(order, folder=str(Path.cwd()))
        self._process = process = subprocess.Popen(
            module_command("elasticflow.launcher.machines.remote"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(order.to_line())
        process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return Begun(socket.gethostname(), ray.get_runtime_context().get_node_id())

    def hear(self) -> Heard:
        """Return the news of the node."""
        assert self._process is not None
        assert self._reader is not None
        code = self._process.poll()
        if code is not None:
            self._reader.join(5.0)
        with self._lock:
            lines, self._lines = self._lines, []
        return Heard(lines, None if code is None else 128 - code if code < 0 else code)

    def leave(self) -> None:
        """Ask the node to exit after its step; a second call: at once."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(f"{LEAVE}\n")
                self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._lock:
                self._lines.append(line.rstrip("\n"))


_LOOK_S = 0.5
_ANSWER_S = 10.0
_PAUSE_S = 1.0
_ENDING_S = 30.0
_LONGEST_PAUSE_S = 60.0
_WAITING_S = 10.0


@dataclass
class _Node:
    """One node of the run.

    Attributes:
        number: Number from 0; a node that replaces another has the same number.
        host: Where the node runs; empty while Ray has no room for it.
        exit_code: How it ended; None while it runs.
    """

    number: int
    actor: Any
    begun: Any
    host: str = ""
    ray_node: str = ""
    exit_code: int | None = None
    is_leaving: bool = False
    refusal: str | None = None
    began: float = field(default_factory=time.monotonic)


class RayNodes(threading.Thread):
    """Keeps a number of nodes on Ray while the run continues.

    A node that Ray has no room for waits, which asks an autoscaler for room. One whose node of Ray is lost, or is about to be
    taken away, gets another place. One that cannot be begun, since its code fails there, is tried again ever more seldom; where
    that befalls all of them, and none has ever run, the run is given up.

    Args:
        ray: The module, connected.
        order: The order to each node; the same for all.
        show: Called with the name of a node and each line that it prints.
        give_up: Called once where no node can be begun.

    Attributes:
        refusal: Why no node could be begun; None: a node was begun, or may yet be.
    """

    def __init__(
        self,
        ray: Any,
        number: int,
        demand: Demand,
        order: Order,
        show: Callable[[str, str], None],
        say: Callable[[str], None],
        give_up: Callable[[], None],
        placement: str = "SPREAD",
    ) -> None:
        super().__init__(name="ray", daemon=True)
        self._placement = placement
        self._ray, self._number, self._demand, self._order = ray, number, demand, order
        self._show, self._say, self._give_up = show, say, give_up
        self._nodes: list[_Node] = []
        self._is_over = threading.Event()
        self._out_of_reach = self._has_run = False
        self._said: set[str] = set()
        self._refusals = 0
        self.refusal: str | None = None

    def run(self) -> None:
        """Begin the nodes, and keep them running until `close`."""
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
                            pause_s = (
                                _PAUSE_S
                                if node.refusal is None
                                else min(_LONGEST_PAUSE_S, 2.0**self._refusals)
                            )
                            again[node.number] = time.monotonic() + pause_s
                self._tell_who_waits()
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
            resources=dict(self._demand.resources),
            **({"label_selector": dict(self._demand.labels)} if self._demand.labels else {}),
            max_restarts=0,
            max_concurrency=1,
            scheduling_strategy=self._placement,
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
                self._has_run = True
                self._say(f"node on {node.host}, by Ray")
            heard = self._ray.get(node.actor.hear.remote(), timeout=_ANSWER_S)
        except errors.GetTimeoutError:
            return False
        except errors.RayTaskError as error:  # what its own code has raised
            return self._refused(node, error)
        except errors.RayActorError as error:
            if getattr(error, "actor_init_failed", False):
                return self._refused(node, error)
            self._say(f"{node.host or 'a node'}: Ray has lost it; it is begun again where there is room")
            return True
        for line in heard.lines:
            self._show(node.host, line)
        node.exit_code = heard.exit_code
        if node.exit_code is not None:
            self._kill(node)
        return node.exit_code is not None

    def _refused(self, node: _Node, error: Exception) -> bool:
        """Take note that a node's own code fails where Ray has put it; it is gone."""
        node.refusal = reason = _last_line(error)
        self._refusals += 1
        self._say_once(f"{node.host or 'a node'} could not be begun: {reason}")
        self._kill(node)
        if not self._has_run and self.refusal is None and self._refusals >= self._number:
            self.refusal = reason
            self._give_up()
        return True

    def _tell_who_waits(self) -> None:
        waiting = [n for n in self._nodes if not n.host and time.monotonic() - n.began > _WAITING_S]
        if waiting:
            asked = f"{len(waiting)} of {self._number} nodes wait for room, {self._demand} each"
            self._say_once(f"{asked}: `ray status` shows what there is; an autoscaler may bring more")

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)

    def _ask_draining_to_leave(self) -> None:
        draining = draining_nodes() if self._nodes else set()
        if draining is None:
            self._say_once(
                "this version of Ray does not say which nodes it takes away: they are lost, and begun again elsewhere"
            )
            return
        for node in self._nodes:
            if node.ray_node in draining and not node.is_leaving:
                node.is_leaving = True
                self._say(f"{node.host}: Ray takes this node away; it is asked to leave")
                node.actor.leave.remote()

    def _kill(self, node: _Node) -> None:
        try:
            self._ray.kill(node.actor)
        except Exception as error:  # noqa: BLE001  # ray's own: it is gone already, or no one can reach it
            self._say(f"{node.host or 'a node'}: {error}")


def _last_line(error: Exception) -> str:
    """Return the end of what ray says, which is the exception's own line in a traceback of the other process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
