"""Who takes part in which generation, over a real store inside this process."""

from __future__ import annotations

import itertools
import socket
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
import torch
from torch.distributed.rendezvous import rendezvous

from elasticflow.launcher.fork_server.server_process import HelperLostError
from elasticflow.launcher.rendezvous.store_keys import ORDERS, is_requested
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.launcher.rendezvous.supervisor_channel import Assignment, Orders, Outbox
from elasticflow.launcher.supervisor.agent_channel import AgentChannel
from elasticflow.protocol import control_store
from elasticflow.protocol.messages import LogLines, NodeReady
from elasticflow.protocol.store_address import StoreAddress, StoreLostError
from elasticflow.runtime.process import process_group
from elasticflow.runtime.process.identity import Identity
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.protocol.control_store import RemoteControlStore
    from elasticflow.protocol.messages import Message


@dataclass
class Launch:
    """The supervisor's channel, and where agents find it."""

    channel: AgentChannel
    address: StoreAddress

    def agent(self, node: str = "n0") -> Orders:
        """Return the orders as another agent reads them."""
        return Orders(control_store.connect(self.address, ORDERS), node)


def generation_of(agent: Orders) -> int:
    """Return the number of the next generation that the agent takes part in."""
    assignment = agent.wait_for_next()
    assert assignment is not None
    return assignment.generation


@pytest.fixture
def launch() -> Launch:
    """Return a channel in a store that is served on a free port."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = StoreAddress("127.0.0.1", listener.getsockname()[1])
    return Launch(AgentChannel(StoreServer(listener).store(address.prefix)), address)


def test_lone_node_forms_a_generation_without_a_last_call(launch: Launch) -> None:
    """The node set is known; torch 2.13's own rendezvous waits 30 s for others when fewer than the most are there."""
    agent = launch.agent()
    launch.channel.form(4, (("n0", 2),), 12.5)
    began = time.monotonic()
    assignment = agent.wait_for_next()

    assert time.monotonic() - began < 1
    assert assignment is not None
    assert Assignment(4, assignment.failed_at, 0, 1, first_rank=0, nproc=2, world_size=2) == assignment


def test_clock_that_is_set_does_not_move_a_failure(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps by an hour at each look: training continued seconds after the failure all the same."""
    jumps = itertools.cycle((3600.0, -3600.0))
    monkeypatch.setattr(time, "time", lambda: 1e9 + next(jumps))
    agent, began = launch.agent(), time.monotonic()
    launch.channel.form(4, (("n0", 2),), began - 2.0)
    assignment = agent.wait_for_next()

    assert assignment is not None
    assert assignment.failed_at is not None
    assert began - 2.0 <= assignment.failed_at <= time.monotonic() - 2.0


def test_no_agent_reads_what_all_others_are_to_do(launch: Launch) -> None:
    """Each of a thousand nodes has its own ranks, and reads a few kilobytes for that; parts of old generations are forgotten."""
    nodes = tuple((f"host-{number:04d}.cluster.internal", 1 + number % 3) for number in range(1000))
    server = launch.channel._store._server  # type: ignore[attr-defined]
    for generation in range(1, 5):
        launch.channel.form(generation, nodes, None)
    agents = [(launch.agent(node), nproc) for node, nproc in nodes[::50]]
    keys = control_store.connect(launch.address, ORDERS)
    order = keys.get("orders/round/4")
    parts = [value for _, value in server._keys.below(f"{launch.address.prefix}/parts/4/")]
    first_ranks = {node: sum(nproc for _, nproc in nodes[:place]) for place, (node, _) in enumerate(nodes)}
    for agent, nproc in agents:
        agent._seen = 3
        expected = (4, first_ranks[agent._node], nproc, 1000, 1999)
        assignment = agent.wait_for_next()
        assert assignment is not None
        found = (assignment.generation, assignment.first_rank, assignment.nproc)
        assert expected == (*found, assignment.group_world_size, assignment.world_size)

    assert len(order) < 300
    assert max(map(len, parts)) < 8000
    assert 1000 == sum(value.count(b".internal") for value in parts)
    kept = {path.split("/")[-2] for path, _ in server._keys.below(f"{launch.address.prefix}/parts/")}
    assert {"3", "4"} == kept


def test_messages_are_looked_for_where_there_are_any(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a thousand outboxes are empty most of the time, and the supervisor looks a hundred times a second."""
    boxes = [Outbox(control_store.connect(launch.address)) for _ in range(40)]
    for box in boxes:
        box.post(NodeReady(f"n{box.number}", "h", 1))
    assert 40 == len(launch.channel.take())
    looked: list[str] = []
    check = launch.channel._store.check

    def counted(keys: list[str]) -> bool:
        looked.extend(keys)
        return check(keys)

    monkeypatch.setattr(launch.channel._store, "check", counted)
    assert not launch.channel.take()
    assert not looked
    boxes[7].post(LogLines((), 3))
    boxes[7].post(LogLines((), 4))

    assert [LogLines((), 3), LogLines((), 4)] == launch.channel.take()
    assert 3 == len(looked)


def test_process_groups_of_two_generations_share_no_key(launch: Launch, tmp_path: Path) -> None:
    """What the workers of one generation left in the store is not there for those of the next, same rank or not."""
    stores = []
    for generation in ("1", "2"):
        identity = Identity.read(
            {
                "ELASTICFLOW_GENERATION": generation,
                "RANK": "0",
                "WORLD_SIZE": "2",
                "ELASTICFLOW_RENDEZVOUS": launch.address.url,
            },
            tmp_path,
        )
        store = process_group.connect(identity, torch.device("cpu"))
        assert store is not None
        stores.append(store)
    stores[0].set("pg/0/rank0", "stale address")

    assert stores[0].check(["pg/0/rank0"])
    assert not stores[1].check(["pg/0/rank0"])


def test_store_of_a_generation_is_found_by_the_jobs_own_code(launch: Launch, tmp_path: Path) -> None:
    """`env://` leads to what rank 0 serves, as it does under torchrun."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "elsewhere"}
    environment = {"ELASTICFLOW_GENERATION": "7", "ELASTICFLOW_RENDEZVOUS": launch.address.url, **place}
    store = process_group.connect(Identity.read(environment, tmp_path), torch.device("cpu"))
    assert store is not None
    process_group.announce(store, environment)
    store.set("mine", "1")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
            patch.setenv(name, value)
        found, _, _ = next(rendezvous("env://", rank=1))

    assert b"1" == found.get("mine")


@pytest.mark.parametrize(
    ("towards", "named", "expected"),
    [("10.1.2.3", "192.0.2.1", "10.1.2.3"), ("127.0.0.1", "192.0.2.1", None), ("127.0.0.1", "127.0.1.1", None)],
    ids=["another machine", "a name for an address that is not here", "a name for the loopback"],
)  # fmt: skip
def test_workers_reach_rank_0_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, towards: str, named: str, expected: str | None
) -> None:
    """By its address towards the keys; where that is the loopback, by the host's name only if that is an address of it."""
    monkeypatch.setattr(socket, "gethostbyname", lambda _: named)
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "ELASTICFLOW_GENERATION": "1"}
    identity = Identity.read(place, tmp_path)
    keys = cast("RemoteControlStore", SimpleNamespace(own_address=towards))

    assert expected == process_group._own_address(identity, keys)


def test_agent_started_late_skips_old_orders(launch: Launch) -> None:
    """An agent that takes over forms the generation decided after it joined, not its predecessor's."""
    launch.channel.form(1, (("n0", 2),), None)
    launch.channel.form(2, (("n0", 2),), None)
    agent = launch.agent()
    agent.skip_old()
    launch.channel.form(3, (("n0", 2),), None)

    assert 3 == generation_of(agent)


def test_agent_that_comes_when_the_launch_is_over_exits(launch: Launch) -> None:
    """One that was started again while the last workers ended; the supervisor waits for it."""
    launch.channel.form(1, (("n0", 2),), None)
    launch.channel.stop()
    agent = launch.agent()
    agent.skip_old()

    assert agent.wait_for_next() is None


def test_first_agent_has_nothing_to_skip(launch: Launch) -> None:
    """Before any order is published, skipping changes nothing."""
    agent = launch.agent()
    agent.skip_old()
    launch.channel.form(1, (("n0", 2),), None)

    assert 1 == generation_of(agent)


def test_orders_without_this_node_are_passed_over(launch: Launch) -> None:
    """A node takes part when it is named, at its place in the order of nodes."""
    agent = launch.agent("n1")
    launch.channel.form(1, (("n0", 2),), None)
    launch.channel.form(2, (("n0", 3), ("n1", 2)), None)

    assert Assignment(2, None, 1, 2, first_rank=3, nproc=2, world_size=5) == agent.wait_for_next()


def test_stop_lets_every_agent_leave(launch: Launch) -> None:
    """The end of the launch is told to each, also to one that has not looked for a while."""
    agents = [launch.agent("n0"), launch.agent("n1")]
    launch.channel.form(1, (("n0", 2),), None)
    assert 1 == generation_of(agents[0])
    launch.channel.stop()

    assert [None, None] == [agent.wait_for_next() for agent in agents]


def test_agent_that_gives_up_closes_nothing_for_the_others(launch: Launch) -> None:
    """Torch 2.13 closes the rendezvous for ever when one agent has used up its restarts; here others are not asked."""
    agent, other = launch.agent("n0"), launch.agent("n1")

    def give_up() -> None:
        raise HelperLostError("fork server", -9)

    with pytest.raises(HelperLostError):
        agent.wait_for_next(give_up)
    launch.channel.form(1, (("n1", 2),), None)

    assert 1 == generation_of(other)


def test_drain_is_asked_of_one_generation_only(launch: Launch) -> None:
    """A request does not reach into the next generation."""
    store = control_store.connect(launch.address, ORDERS)
    launch.channel.request("drain", 3)
    wait_until(lambda: is_requested(store, "drain", 3))

    assert not is_requested(store, "drain", 4)
    assert not is_requested(store, "stop", 3)


def test_messages_arrive_once_and_in_order(launch: Launch) -> None:
    """Each message is taken once, those of one agent in the order of posting."""
    outboxes = [Outbox(control_store.connect(launch.address, ORDERS)) for _ in range(2)]
    taken: list[Message] = []

    def all_of(count: int) -> bool:
        taken.extend(launch.channel.take())
        return len(taken) >= count

    for number in range(6):
        outboxes[number % 2].post(LogLines((), held=number))
    wait_until(lambda: all_of(6))
    outboxes[0].post(LogLines((), held=6))
    wait_until(lambda: all_of(7))

    numbers = [m.held for m in taken if isinstance(m, LogLines) and m.held is not None]
    assert [0, 2, 4, 6] == [number for number in numbers if number % 2 == 0]
    assert [1, 3, 5] == [number for number in numbers if number % 2 == 1]
    assert [] == launch.channel.take()


def test_agent_killed_before_it_spoke_holds_up_nobody(launch: Launch) -> None:
    """The next agent's messages arrive, whatever the one before it was about to say."""
    Outbox(control_store.connect(launch.address, ORDERS))
    Outbox(control_store.connect(launch.address, ORDERS)).post(NodeReady("n0", "host", 2))

    wait_until(lambda: [NodeReady("n0", "host", 2)] == launch.channel.take(), 5)


def test_message_that_did_not_get_through_leaves_no_gap(launch: Launch) -> None:
    """The supervisor reads an outbox in order: it would wait for the missing message for ever."""
    store = control_store.connect(launch.address, ORDERS)
    is_cut = True

    def set_key(key: str, value: str) -> None:
        if is_cut:
            raise StoreLostError("no way")
        store.set(key, value)

    outbox = Outbox(cast("RemoteControlStore", SimpleNamespace(add=store.add, set=set_key)))
    with pytest.raises(StoreLostError):
        outbox.post(NodeReady("n0", "host", 1))
    is_cut = False
    outbox.post(NodeReady("n0", "host", 2))

    assert [NodeReady("n0", "host", 2)] == launch.channel.take()
