"""Where rank 0 of a script may listen: a free port, the same on all nodes, another one in each generation."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from elasticflow.launcher.agent.master import master_of
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


def test_one_node_has_the_loopback() -> None:
    """No key is written, and rank 0 can listen there."""
    host, port = master_of(cast("RemoteControlStore", None), "store", None, _assignment(0, 1))
    assert host == "127.0.0.1"
    socket.create_server((host, port)).close()


@pytest.mark.parametrize(("towards", "expected"), [("10.0.0.7", "10.0.0.7"), ("::1", "store")])
def test_all_nodes_know_what_rank_0s_node_has_found(
    monkeypatch: pytest.MonkeyPatch, towards: str, expected: str
) -> None:
    """Its address towards the launch's keys; if it is on the machine that serves them, theirs."""
    keys: dict[str, Any] = {}
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    store = cast(
        "RemoteControlStore", SimpleNamespace(own_address=towards, set=keys.__setitem__, get=keys.__getitem__)
    )
    first = master_of(store, "store", None, _assignment(0, 2))

    assert first == master_of(store, "store", None, _assignment(1, 2))
    assert first[0] == expected
    master_of(store, "store", None, _assignment(0, 2, generation=2))
    assert keys.keys() == {"master/1", "master/2"}
