"""Who takes part in the next generation, as agents read it: decided by the supervisor, in `head.py` (floor 3).

The keys are told in `keys.py`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not re-exported
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from elasticflow.launcher.rendezvous.keys import FEEDS, ROUNDS, feed_key, round_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.rendezvous.keys import Keys
    from elasticflow.rendezvous_place import RendezvousPlace

_POLL_S = 0.002
_LOOK_S = 0.05


class Place(NamedTuple):
    """A node's part in a generation: its number, its first worker's rank, its workers, all workers."""

    number: int
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

    def place(self, node: str) -> Place | None:
        """Return where *node* takes part, or None if it does not."""
        first = 0
        for number, (name, nproc) in enumerate(self.nodes):
            if name == node:
                return Place(number, first, nproc, sum(count for _, count in self.nodes))
            first += nproc
        return None


class Feed:
    """Messages of one agent to the supervisor, in order.

    Attributes:
        number: Its number among all agents of the launch.
    """

    def __init__(self, store: Keys) -> None:
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


class SupervisedRendezvous(RendezvousHandler):
    """torch's rendezvous interface over the supervisor's rounds: no last call, no election.

    Args:
        store: The launch's, from `join_store`.
        node: Id of this node.
        run_id: The run's.
        place: Where the store is.

    Attributes:
        may_wait: Called several times a second while this node waits; an exception ends the wait.
        round: The one that `next_rendezvous` returned last.
        place: This node's part in it.
    """

    def __init__(self, store: Keys, node: str, run_id: str, place: RendezvousPlace) -> None:
        self._store = store
        self._node = node
        self._run_id = run_id
        self._address = RendezvousStoreInfo(place.host, place.port)
        self.may_wait: Callable[[], None] = lambda: None
        self._seen = 0
        self.round = Round()
        self.place = Place(0, 0, 0, 0)

    def skip_old(self) -> None:
        """Forget rounds that were published before this agent was started."""
        if self._store.check([ROUNDS]):
            self._seen = int(self._store.get(ROUNDS))

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round that names this node; it has no time limit: the supervisor's life is one.

        Raises:
            RendezvousGracefulExitError: the launch is over.
        """
        while True:
            self._wait_for(round_key(self._seen + 1))
            self._seen += 1
            fields = json.loads(self._store.get(round_key(self._seen)))
            nodes = tuple((node, nproc) for node, nproc in fields.pop("nodes"))
            self.round = Round(nodes=nodes, **fields)
            if self.round.stop:
                raise RendezvousGracefulExitError("the supervisor ended the launch")
            if (place := self.round.place(self._node)) is not None:
                self.place = place
                return RendezvousInfo(
                    self._store_of_round(), place.number, len(self.round.nodes), self._address
                )

    def _store_of_round(self) -> Store:
        """Return what torch hands to `_assign_worker_ranks`; ours reads the round instead (`agent.py`)."""
        if isinstance(self._store, Store):
            return PrefixStore(f"ranks/{self.round.generation}", self._store)
        return cast("Store", self._store)

    def _wait_for(self, key: str) -> None:
        looked = 0.0
        while not self._store.check([key]):
            if (now := time.monotonic()) >= looked + _LOOK_S:
                looked = now
                self.may_wait()
            time.sleep(_POLL_S)

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
