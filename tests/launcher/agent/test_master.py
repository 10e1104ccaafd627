"""Where rank 0 of a script may listen: a free port, the same on all nodes, another one in each generation."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elasticflow.launcher.agent.workers import master_of
from elasticflow.launcher.rendezvous.supervisor_channel import Assignment

if TYPE_CHECKING:
    from elasticflow.protocol.control_store import RemoteControlStore


def _assignment(node: int, nodes: int, generation: int = 1) -> Assignment:
    return Assignment(
        generation=generation,
        failed_at=None,
        group_rank=node,
        group_world_size=nodes,
        first_rank=2 * node,
        nproc=2,
        world_size=2 * nodes,
    )


def _never() -> None:
    raise AssertionError("nothing is waited for")


def _store(keys: dict[str, Any], own_address: str) -> RemoteControlStore:
    fake = SimpleNamespace(
        own_address=own_address,
        set=keys.__setitem__,
        get=lambda key, _: keys[key],
        check=lambda names: all(name in keys for name in names),
    )
    return cast("RemoteControlStore", fake)


def test_one_node_has_the_loopback() -> None:
    """No key is written, and rank 0 can listen there."""
    host, port = master_of(cast("RemoteControlStore", None), "store", None, _assignment(0, 1), _never)
    assert host == "127.0.0.1"
    socket.create_server((host, port)).close()


@pytest.mark.parametrize(("towards", "expected"), [("10.0.0.7", "10.0.0.7"), ("::1", "store")])
def test_all_nodes_know_what_rank_0s_node_has_found(
    monkeypatch: pytest.MonkeyPatch, towards: str, expected: str
) -> None:
    """Its address towards the launch's keys; if it is on the machine that serves them, theirs."""
    keys: dict[str, Any] = {}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    store = _store(keys, towards)
    first = master_of(store, "store", None, _assignment(0, 2), _never)

    assert first == master_of(store, "store", None, _assignment(1, 2), _never)
    assert first[0] == expected
    master_of(store, "store", None, _assignment(0, 2, generation=2), _never)
    assert keys.keys() == {"orders/master/1", "orders/master/2"}


def test_node_of_rank_0_that_is_lost_is_not_waited_for() -> None:
    """It was lost between the order and its answer: whoever waits looks what the supervisor says meanwhile."""
    looks = iter(range(3))

    def look() -> None:
        if next(looks, None) is None:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        master_of(_store({}, "10.0.0.7"), "store", None, _assignment(1, 2), look)
