"""Where the agents of a launch meet: in the supervisor's own store, or in one that outlives it.

A store that outlives supervisors is etcd, or what `elasticflow rendezvous serve` serves. Several runs may use it, one
of a job at a time, so its keys are apart:

    elasticflow/<job>/claim/<n>   how many processes wanted to lead the n-th launch of the job; the first does
    elasticflow/<job>/newest      number of the newest launch
    elasticflow/<job>/<n>/...     keys of the n-th launch: `launcher/rendezvous/store_keys.py`

A supervisor changes `head` all the time. Once it is silent another process may lead the next launch (`join.py`).
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import LedElsewhereError, RendezvousError
from elasticflow.launcher.rendezvous.liveness import SupervisorHeartbeat, SupervisorWatch
from elasticflow.launcher.rendezvous.network import listen
from elasticflow.launcher.rendezvous.store_keys import EXIT_CODE, TOLD, join_store
from elasticflow.launcher.rendezvous.store_server import StoreServer
from elasticflow.protocol.store_address import StoreAddress, StoreLostError, is_here

if TYPE_CHECKING:
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.protocol.control_store import ControlStore

_NEWEST = "newest"
_LOOK_S = 0.25
_CLAIM_S = 5.0
_ANSWER_S = 10.0


@dataclass
class LaunchStore:
    """Where the agents of one launch meet.

    Attributes:
        address: Where this machine's agents find the launch's keys.
        endpoint: What other machines are told; None if there are none.
        server: What serves the store in this process; None if somebody else serves it.
    """

    address: StoreAddress
    endpoint: str | None
    server: StoreServer | None = None
    _signs: SupervisorHeartbeat | None = None

    def connect(self) -> ControlStore:
        """Return the launch's keys as its supervisor uses them.

        Raises:
            StoreLostError: who serves them does not answer.
        """
        if self.server is None:
            return join_store(self.address, looks_at=TOLD)
        self.server.store(self.address.prefix.rpartition("/")[0]).set(_NEWEST, "1")
        return self.server.store(self.address.prefix)

    def close(self) -> None:
        """Be silent, and give the port back: another launch of this process may need it."""
        if self._signs is not None:
            self._signs.end()
        if self.server is not None:
            self.server.close()

    def outlive_store(self) -> None:
        """Let this process go on without the store: the launch is over, and what is left is to write that down."""
        if self._signs is not None:
            self._signs.outlive_store()


def open_store(plan: LaunchPlan) -> LaunchStore:
    """Return where the agents of a launch of *plan* meet; this process leads it from now on.

    Raises:
        PortTakenError: the endpoint's port is in use.
        RendezvousError: nobody serves the store that the job names.
        LedElsewhereError: another process leads a run of the job there.
    """
    if plan.endpoint is None:
        listener = listen("127.0.0.1", 0)
        address = store_address_of(plan, *listener.getsockname()[:2]).under("1")
        # Nodes that are played on this machine may be joined by others on it.
        return LaunchStore(address, None if plan.nodes_max == 1 else address.endpoint, StoreServer(listener))
    host, _, number = plan.endpoint.rpartition(":")
    address = store_address_of(plan, host, int(number))
    if not plan.is_store_outside:
        listener = listen("", address.port)
        if not is_here(host):
            address = store_address_of(plan, "127.0.0.1", address.port)
        server = StoreServer(listener)
        return LaunchStore(address.under("1"), None if plan.nodes_max == 1 else plan.endpoint, server)
    try:
        launch = address.under(str(_lead(connect(address), address)))
    except StoreLostError as error:
        raise RendezvousError(str(error), "once it answers again, the same command goes on") from error
    return LaunchStore(launch, plan.endpoint, _signs=SupervisorHeartbeat(launch))


def store_address_of(plan: LaunchPlan, host: str, port: int) -> StoreAddress:
    """Return where runs of the job of *plan* meet in the store at *host*:*port*."""
    backend = "etcd-v2" if plan.rdzv_backend == "etcd-v2" else "c10d"
    address = StoreAddress(host, port, backend=backend, options=plan.rdzv_options)
    return address.under(plan.job_name)


def connect(address: StoreAddress) -> ControlStore:
    """Return the keys at *address* in a store that somebody else serves.

    Raises:
        RendezvousError: nobody does, or this version of elasticflow cannot use it.
    """
    try:
        socket.create_connection((address.host, address.port), timeout=_ANSWER_S).close()
        keys = join_store(address, looks_at="", answer_s=_ANSWER_S)
        keys.check([_NEWEST])
    except (OSError, ImportError, StoreLostError) as error:
        raise RendezvousError(
            f"no store for the rendezvous at {address.endpoint}: {str(error).splitlines()[0]}",
            "start etcd there with --enable-v2, and pip install 'elasticflow[etcd]' here"
            if address.backend == "etcd-v2"
            else f"start it there: elasticflow rendezvous serve --port {address.port}",
        ) from error
    return keys


def newest_launch(keys: ControlStore) -> int:
    """Return the number of the newest launch of the job whose keys these are; 0 if there was none."""
    return int(keys.get(_NEWEST)) if keys.check([_NEWEST]) else 0


def _lead(keys: ControlStore, address: StoreAddress) -> int:
    """Return the number of the launch that this process leads from now on.

    Raises:
        LedElsewhereError: another process leads one.
    """
    number = newest_launch(keys)
    led = LedElsewhereError(
        f"a run of this job is led by another process, at {address.endpoint}",
        f"take part in it: elasticflow run JOB --join {address.endpoint}",
    )
    if number and _is_led(address.under(str(number))):
        raise led
    while True:
        number += 1
        if keys.add(f"claim/{number}", 1) == 1:
            keys.set(_NEWEST, str(number))
            # Nobody reads them any more, and the store outlives all runs.
            join_store(address.under(str(number - 2)), looks_at="").forget()
            return number
        deadline = time.monotonic() + _CLAIM_S
        while time.monotonic() < deadline:  # unless it died right after it claimed
            if newest_launch(keys) >= number:
                raise led
            time.sleep(_LOOK_S)


def _is_led(address: StoreAddress) -> bool:
    keys = join_store(address, looks_at="")
    if keys.check([EXIT_CODE]):
        return False
    watch = SupervisorWatch(keys)
    while not watch.is_silent():
        if watch.has_changed:
            return True
        time.sleep(_LOOK_S)
    return False
