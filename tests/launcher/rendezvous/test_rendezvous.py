"""Who takes part in which generation, over a real store inside this process."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not re-exported
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from elasticflow.launcher.rendezvous.keys import is_requested, join_store
from elasticflow.launcher.rendezvous.meeting import serve
from elasticflow.launcher.rendezvous.rounds import Feed, SupervisedRendezvous
from elasticflow.launcher.supervisor.head import Head
from elasticflow.rendezvous_place import RendezvousPlace
from elasticflow.runtime import group
from elasticflow.runtime.identity import Identity
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Launch:
    """A head and what it takes to join it."""

    head: Head
    place: RendezvousPlace

    def agent(self, node: str = "n0") -> SupervisedRendezvous:
        """Return the rendezvous of another agent."""
        return SupervisedRendezvous(join_store(self.place), node, "run", self.place)


@pytest.fixture
def launch() -> Launch:
    """Return a head that serves a store on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    place = RendezvousPlace("127.0.0.1", listener.getsockname()[1])
    return Launch(Head(PrefixStore(place.prefix, serve(listener))), place)


def test_lone_node_forms_a_generation_without_a_last_call(launch: Launch) -> None:
    """The node set is known; torch 2.13's own rendezvous waits 30 s for others when fewer than the most are there."""
    agent = launch.agent()
    launch.head.form(4, (("n0", 2),), 12.5)
    began = time.monotonic()
    info = agent.next_rendezvous()

    assert time.monotonic() - began < 1
    assert (0, 1) == (info.rank, info.world_size)
    assert (4, 12.5, False) == (agent.round.generation, agent.round.failed_at, agent.round.stop)


def test_keys_of_a_generation_are_not_seen_in_the_next(launch: Launch) -> None:
    """Torch 2.13 hands all attempts one store without a prefix: attempt 2 reads the addresses of attempt 1."""
    agent = launch.agent()
    launch.head.form(1, (("n0", 2),), None)
    first = agent.next_rendezvous().store
    first.set("MASTER_ADDR", "stale")
    launch.head.form(2, (("n0", 2),), None)
    second = agent.next_rendezvous().store

    assert first.check(["MASTER_ADDR"])
    assert not second.check(["MASTER_ADDR"])


def test_process_groups_of_two_generations_share_no_key(launch: Launch, tmp_path: Path) -> None:
    """What the workers of one generation left in the store is not there for those of the next, same rank or not."""
    stores = []
    for generation in ("1", "2"):
        identity = Identity.read(
            {
                "ELASTICFLOW_GENERATION": generation,
                "RANK": "0",
                "WORLD_SIZE": "2",
                "ELASTICFLOW_RENDEZVOUS": launch.place.url,
            },
            tmp_path,
        )
        store = group.connect(identity)
        assert store is not None
        stores.append(store)
    stores[0].set("pg/0/rank0", "stale address")

    assert stores[0].check(["pg/0/rank0"])
    assert not stores[1].check(["pg/0/rank0"])


def test_agent_started_late_skips_old_rounds(launch: Launch) -> None:
    """An agent that takes over forms the generation decided after it joined, not its predecessor's."""
    launch.head.form(1, (("n0", 2),), None)
    launch.head.form(2, (("n0", 2),), None)
    agent = launch.agent()
    agent.skip_old()
    launch.head.form(3, (("n0", 2),), None)
    agent.next_rendezvous()

    assert 3 == agent.round.generation


def test_first_agent_has_nothing_to_skip(launch: Launch) -> None:
    """Before any round is published, skipping changes nothing."""
    agent = launch.agent()
    agent.skip_old()
    launch.head.form(1, (("n0", 2),), None)
    agent.next_rendezvous()

    assert 1 == agent.round.generation


def test_rounds_without_this_node_are_passed_over(launch: Launch) -> None:
    """A node takes part when it is named, at its place in the order of nodes."""
    agent = launch.agent("n1")
    launch.head.form(1, (("n0", 2),), None)
    launch.head.form(2, (("n0", 3), ("n1", 2)), None)
    info = agent.next_rendezvous()

    assert (2, 1, 2) == (agent.round.generation, info.rank, info.world_size)
    assert (1, 3, 2, 5) == agent.place


def test_stop_lets_every_agent_leave(launch: Launch) -> None:
    """The end of the launch is torch's own graceful exit, and stays visible."""
    agents = [launch.agent("n0"), launch.agent("n1")]
    launch.head.stop()
    for agent in agents:
        assert not agent.is_closed()
        with pytest.raises(RendezvousGracefulExitError):
            agent.next_rendezvous()
        assert agent.is_closed()


def test_one_agent_cannot_close_the_rendezvous_for_all(launch: Launch) -> None:
    """Torch 2.13 closes it for ever when one agent has used up its restarts; here that is not an agent's business."""
    agent, other = launch.agent("n0"), launch.agent("n1")
    agent.set_closed()
    agent.shutdown()
    launch.head.form(1, (("n1", 2),), None)
    other.next_rendezvous()

    assert 1 == other.round.generation
    assert 0 == other.num_nodes_waiting()


def test_drain_is_asked_of_one_generation_only(launch: Launch) -> None:
    """A request does not reach into the next generation."""
    store = join_store(launch.place)
    launch.head.request("drain", 3)
    wait_until(lambda: is_requested(store, "drain", 3))

    assert not is_requested(store, "drain", 4)
    assert not is_requested(store, "stop", 3)


def test_messages_arrive_once_and_in_order(launch: Launch) -> None:
    """Each message is taken once, those of one agent in the order of posting."""
    feeds = [Feed(join_store(launch.place)) for _ in range(2)]
    taken: list[dict[str, Any]] = []

    def all_of(count: int) -> bool:
        taken.extend(launch.head.take())
        return len(taken) >= count

    for number in range(6):
        feeds[number % 2].post({"number": number})
    wait_until(lambda: all_of(6))
    feeds[0].post({"number": 6})
    wait_until(lambda: all_of(7))

    assert [0, 2, 4, 6] == [m["number"] for m in taken if m["number"] % 2 == 0]
    assert [1, 3, 5] == [m["number"] for m in taken if m["number"] % 2 == 1]
    assert [] == launch.head.take()


def test_agent_killed_before_it_spoke_holds_up_nobody(launch: Launch) -> None:
    """The next agent's messages arrive, whatever the one before it was about to say."""
    Feed(join_store(launch.place))
    Feed(join_store(launch.place)).post({"type": "node", "node": "n0"})

    wait_until(lambda: [{"type": "node", "node": "n0"}] == launch.head.take(), 5)
