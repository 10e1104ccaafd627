"""Who takes part in the next generation: decided by the supervisor, read by agents (floor 3).

All of it lies in the supervisor's store, under one prefix a launch, in plain keys (`set`, `get`, `add`,
`check` only, so that another store fits the same interface):

    feeds, feed/<f>/<i>     number of agents so far; messages of the f-th to the supervisor, in order
    rounds, round/<i>       number of decisions so far; the i-th: a generation to form, or to stop
    drain/<generation>      workers of this generation are asked to leave after a step
    stop/<generation>       workers of this generation are to be killed now: a peer has failed
    ranks/<generation>/...  what agents tell each other, fresh for every generation (torch 2.13 hands all
                            generations the same keys, and the next one reads stale addresses)

Workers use the same store under `run/<generation>/`, for the same reason (runtime/group.py).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not re-exported
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

if TYPE_CHECKING:
    from socket import socket

_POLL_S = 0.002
PREFIX = "elasticflow"


@dataclass(frozen=True)
class Round:
    """Who takes part next (torch's word), the same for every node.

    Attributes:
        stop: The launch is over; agents leave.
        generation: Number of the generation to form.
        nodes: Ids of its nodes in rank order.
        failed_at: Unix time of the failure it answers, if any.
    """

    stop: bool = False
    generation: int = 0
    nodes: tuple[str, ...] = ()
    failed_at: float | None = None


def join_store(host: str, port: int) -> Store:
    """Return a client of the supervisor's store."""
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    return PrefixStore(PREFIX, client)


class Feed:
    """Messages of one agent to the supervisor, in order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._number = store.add("feeds", 1)
        self._posted = 0

    def post(self, message: dict[str, Any]) -> None:
        """Append one message; it arrives even if this process is killed right after.

        One `set` a message: counted by `add` first, as numbers shared by all agents would be, an agent killed
        between the two would leave a gap at which the supervisor waits for ever.
        """
        self._posted += 1
        self._store.set(_feed_key(self._number, self._posted), json.dumps(message))


def _feed_key(feed: int, number: int) -> str:
    return f"feed/{feed}/{number}"


class Head:
    """The supervisor's side: hosts the store, hears agents, publishes rounds."""

    def __init__(self, listener: socket) -> None:
        """Serve the launch's store on *listener*; it outlives every agent."""
        port = listener.getsockname()[1]
        server = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        self._store = PrefixStore(PREFIX, server)
        self._taken: list[int] = []  # messages taken so far, by feed
        self._count = 0

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that agents have sent since the last call, and forget them."""
        messages = []
        self._taken += [0] * (self._store.add("feeds", 0) - len(self._taken))
        for index in range(len(self._taken)):
            while self._store.check([key := _feed_key(index + 1, self._taken[index] + 1)]):
                messages.append(json.loads(self._store.get(key)))
                self._store.delete_key(key)
                self._taken[index] += 1
        return messages

    def form(self, generation: int, nodes: tuple[str, ...], failed_at: float | None) -> None:
        """Have *nodes* form *generation*."""
        self._publish(Round(generation=generation, nodes=nodes, failed_at=failed_at))

    def stop(self) -> None:
        """Have every agent leave."""
        self._publish(Round(stop=True))

    def request(self, what: str, generation: int) -> None:
        """Ask the workers of *generation* to `drain`, or have them killed (`stop`)."""
        self._store.set(f"{what}/{generation}", "1")

    def _publish(self, round_: Round) -> None:
        self._count += 1
        self._store.set(f"round/{self._count}", json.dumps(asdict(round_)))
        self._store.set("rounds", str(self._count))


def is_requested(store: Store, what: str, generation: int) -> bool:
    """Return whether the supervisor asked for `drain` or `stop` of *generation*."""
    return bool(store.check([f"{what}/{generation}"]))


class SupervisedRendezvous(RendezvousHandler):
    """torch's rendezvous interface over the supervisor's rounds: no last call, no election."""

    def __init__(self, store: Store, node: str, run_id: str, host: str, port: int) -> None:
        self._store = store
        self._node = node
        self._run_id = run_id
        self._address = RendezvousStoreInfo(host, port)
        self._seen = 0
        self.round = Round()

    def skip_old(self) -> None:
        """Forget rounds that were published before this agent was started."""
        if self._store.check(["rounds"]):
            self._seen = int(self._store.get("rounds"))

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that names this node; it has no time limit: the supervisor's life is one.

        Raises:
            RendezvousGracefulExitError: the launch is over.
        """
        while True:
            key = f"round/{self._seen + 1}"
            while not self._store.check([key]):
                time.sleep(_POLL_S)
            self._seen += 1
            fields = json.loads(self._store.get(key))
            self.round = Round(**{**fields, "nodes": tuple(fields["nodes"])})
            if self.round.stop:
                raise RendezvousGracefulExitError("the supervisor ended the launch")
            if self._node in self.round.nodes:
                rank = self.round.nodes.index(self._node)
                store = PrefixStore(f"ranks/{self.round.generation}", self._store)
                return RendezvousInfo(store, rank, len(self.round.nodes), self._address)

    def get_backend(self) -> str:
        """Return the backend's name in torch's own events."""
        return "elasticflow"

    @property
    def use_agent_store(self) -> bool:
        """Workers use the supervisor's store."""
        return True

    def is_closed(self) -> bool:
        """Return whether the launch is over."""
        return self.round.stop

    def set_closed(self) -> None:
        """Do nothing: one node never closes the rendezvous for all."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the supervisor asks for a drain when nodes wait."""
        return 0

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Leave the store alone: it is the supervisor's."""
        return True
