"""Chooses `MASTER_ADDR` and `MASTER_PORT` anew in each generation: there rank 0 of a script serves its process group's store."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING

from elasticflow.launcher.rendezvous import network
from elasticflow.launcher.rendezvous.store_keys import master_key
from elasticflow.protocol.store_address import address_for_others
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.rendezvous.supervisor_channel import Assignment
    from elasticflow.protocol.control_store import RemoteControlStore

_LOOPBACK = "127.0.0.1"
# Rank 0's node tells within milliseconds, and is lost long before the limit if it does not live.
_LOOK_S, _LONGEST_S = 0.005, 300.0


def master_of(
    store: RemoteControlStore,
    host: str,
    interface: str | None,
    assignment: Assignment,
    may_wait: Callable[[], None],
) -> tuple[str, int]:
    """Return address and port at which rank 0 may listen, the same on every node; waits for rank 0's node.

    Nothing holds the port meanwhile: another program may take it, as with torchrun.

    Args:
        interface: Interface that workers talk over, if the job names one.
        may_wait: Called again and again while rank 0's node has not told: it may be lost; an exception ends the wait.

    Raises:
        StoreLostError: the store does not answer, or rank 0's node has not told in time.
    """
    if assignment.group_world_size == 1:
        return _LOOPBACK, _free_port(_LOOPBACK)
    key = master_key(assignment.generation)
    if assignment.first_rank == 0:
        address, port = _own_address(store, interface), _free_port("")
        store.set(key, json.dumps([address, port]))
    else:
        for _ in attempts(_LONGEST_S, _LOOK_S):
            if store.check([key]):
                break
            may_wait()
        address, port = json.loads(store.get(key, _LOOK_S))
    # Without an address of its own it is on the machine that serves the launch's keys.
    return address or host, port


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _own_address(store: RemoteControlStore, interface: str | None) -> str | None:
    """Return the address under which other nodes reach this machine: the job's, or that towards the launch's keys."""
    return address_for_others(store.own_address) if interface is None else network.find(interface).address
