"""Decides which process leads a job's next launch, and opens the control store of that launch.

The store is the supervisor's own, or one that outlives supervisors: etcd, or the store of `elasticflow rendezvous serve`.
Several jobs may use the same store, each with one launch at a time, so their keys are apart:

    elasticflow/<job>/claim/<n>   how many processes wanted to lead the n-th launch of the job; the first does
    elasticflow/<job>/led/<n>     the n-th launch has a leader
    elasticflow/<job>/newest      number of the newest launch, or of an earlier one: a process may stop before it writes
    elasticflow/<job>/<n>/...     keys of the n-th launch: `launcher/rendezvous/store_keys.py`

A supervisor changes `head` all the time. Once it is silent another process may lead the next launch (`join.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from elasticflow.errors import INTERRUPTED, LedElsewhereError, RendezvousError
from elasticflow.launcher.rendezvous.liveness import Beat, SupervisorWatch
from elasticflow.launcher.rendezvous.network import listen
from elasticflow.launcher.rendezvous.store_keys import EXIT_CODE, SUPERVISOR_BEAT, TOLD
from elasticflow.launcher.rendezvous.token import new_token
from elasticflow.protocol import control_store
from elasticflow.protocol.store_address import StoreAddress, StoreLostError, is_here, split

if TYPE_CHECKING:
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.launcher.rendezvous.connections import Refused
    from elasticflow.launcher.rendezvous.store_server import StoreServer
    from elasticflow.protocol.control_store import ControlStore

NAME_REMEDY = "write a name that every machine knows (getent hosts NAME), or an address"
_NEWEST = "newest"
_LOOK_S = 0.25
_CLAIM_S = 5.0
_ANSWER_S = 10.0
_ELSEWHERE_S = 3.0
_LONGEST_SILENCE_S = 20.0


@dataclass
class LaunchStore:
    """The control store of one launch, as its supervisor has it.

    Attributes:
        address: Where this machine's agents find the launch's keys.
        endpoint: The address at which other machines join; None if none may.
        server: Serves the store in this process; None if another process serves it.
    """

    address: StoreAddress
    endpoint: str | None
    server: StoreServer | None = None
    _beat: Beat | None = None

    def connect(self) -> ControlStore:
        """Return the store as the launch's supervisor uses it.

        Raises:
            StoreLostError: the store does not answer.
        """
        if self.server is None:
            return control_store.connect(self.address, TOLD)
        self.server.store(self.address.prefix.rpartition("/")[0]).set(_NEWEST, "1")
        return self.server.store(self.address.prefix)

    def is_led_anew(self) -> bool:
        """Return whether a later launch of the job has a leader: this process was silent for too long.

        False where the store is this process' own, and where it does not answer.
        """
        return self.server is None and has_later_launch(self.address)

    def refused(self) -> Refused | None:
        """Return what is to be told of connections that this process has refused; None if nothing is."""
        return None if self.server is None else self.server.refusals.take()

    def close(self) -> None:
        """Give no sign of life any more, and free the port: another launch of this process may need it."""
        if self._beat is not None:
            self._beat.stop()
        if self.server is not None:
            self.server.close()

    def outlive_store(self) -> None:
        """Let this process continue without the store: the launch is over, and only has to be written down."""
        if self._beat is not None:
            self._beat.outlive_store()


def open_store(plan: LaunchPlan, token: str = "") -> LaunchStore:
    """Return the control store of a launch of *plan*, which this process leads from now on.

    Args:
        token: Secret that all machines of the run know; empty: there is none, and a launch that no other machine may join
            makes one of its own.

    Raises:
        TokenRefusedError: the store has another token.
        PortTakenError: the endpoint's port is in use.
        RendezvousError: the store that the job names does not answer, or the endpoint's host does not resolve.
        LedElsewhereError: another process leads a run of the job there, or another machine serves a launch there.
    """
    if not plan.is_store_outside and plan.nodes_max == 1:
        token = token or new_token()
    if plan.endpoint is None:
        listener = listen("127.0.0.1", 0)
        host, port = listener.getsockname()[:2]
        address = store_address_of(plan, host, port, token).under("1")
        # Nodes that are simulated on this machine may be joined by others on it.
        endpoint = None if plan.nodes_max == 1 else address.endpoint
        return LaunchStore(address, endpoint, _serve(listener, token))
    host, number = split(plan.endpoint)
    address = store_address_of(plan, host, number, token)
    if not plan.is_store_outside:
        if not (names_this_machine := is_here(host)):
            _check_elsewhere(address)
        listener = listen("", address.port)
        if not names_this_machine:
            address = replace(address, host="127.0.0.1")
        server = _serve(listener, token)
        return LaunchStore(address.under("1"), None if plan.nodes_max == 1 else plan.endpoint, server)
    try:
        launch_address = address.under(str(_lead(connect(address), address)))
    except StoreLostError as error:
        raise RendezvousError(
            str(error), "once it answers again, the same command resumes the run"
        ) from error
    return LaunchStore(launch_address, plan.endpoint, _beat=_start_beat(launch_address))


def _serve(listener: socket.socket, token: str) -> StoreServer:
    # asyncio takes 30 ms to import: a process that joins a launch, or uses a store outside, does not wait for it.
    from elasticflow.launcher.rendezvous.store_server import StoreServer

    return StoreServer(listener, token)


def _check_elsewhere(address: StoreAddress) -> None:
    """Check that the job's endpoint, which is no address of this machine's own, may be one that leads to it."""
    try:
        socket.create_connection((address.host, address.port), timeout=_ELSEWHERE_S).close()
    except socket.gaierror as error:
        raise RendezvousError(
            f"nodes.endpoint: {address.host} does not resolve: {error.strerror}", NAME_REMEDY
        ) from error
    except OSError:
        return
    raise LedElsewhereError(
        f"nodes.endpoint: {address.endpoint} is another machine, and a launch is served there",
        f"take part in it: elasticflow run JOB --join {address.endpoint}; or have nodes.endpoint name this machine",
    )


def _start_beat(address: StoreAddress) -> Beat:
    """Have this supervisor give signs of life in a store that another process serves; without the store this process ends."""

    def end_process() -> None:
        sys.stderr.write(f"the store at {address.endpoint} does not answer: this launch ends\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    # A request that fails is left to the supervisor, which sees that, too; one that never returns is not.
    beat = Beat(
        lambda: control_store.connect(address),
        SUPERVISOR_BEAT,
        _LONGEST_SILENCE_S,
        when_silent=end_process,
    )
    beat.start()
    return beat


def store_address_of(plan: LaunchPlan, host: str, port: int, token: str = "") -> StoreAddress:
    """Return the address of the job's keys in the store at *host*:*port*, which asks for *token*."""
    backend = "etcd-v2" if plan.rdzv_backend == "etcd-v2" else "c10d"
    address = StoreAddress(host, port, backend=backend, options=plan.rdzv_options, token=token)
    return address.under(plan.job_name)


def connect(address: StoreAddress) -> ControlStore:
    """Return a client of the store at *address*, which another process serves.

    Raises:
        RendezvousError: no store answers there, or this version of elasticflow cannot use it.
    """
    try:
        socket.create_connection((address.host, address.port), timeout=_ANSWER_S).close()
        store = control_store.connect(address, answer_s=_ANSWER_S)
        store.check([_NEWEST])
    except (OSError, ImportError, StoreLostError) as error:
        if isinstance(error, socket.gaierror):
            message = f"nodes.endpoint: {address.host} does not resolve: {error.strerror}"
            raise RendezvousError(message, NAME_REMEDY) from error
        raise RendezvousError(
            f"no store for the rendezvous at {address.endpoint}: {str(error).splitlines()[0]}",
            "start etcd there with --enable-v2, and pip install 'elasticflow[etcd]' here"
            if address.backend == "etcd-v2"
            else f"start it there: elasticflow rendezvous serve --port {address.port}",
        ) from error
    return store


def newest_launch(store: ControlStore) -> int:
    """Return the number of the newest launch of the job that has *store*; 0 if there was none."""
    number = newest = int(store.get(_NEWEST)) if store.check([_NEWEST]) else 0
    # Claims have no gap; processes that died right after theirs have led nothing.
    while store.check([f"claim/{number + 1}"]):
        number += 1
        if store.check([f"led/{number}"]):
            newest = number
    return newest


def has_later_launch(launch: StoreAddress) -> bool:
    """Return whether the job has a later launch than the one whose keys are at *launch*; False if the store does not answer."""
    job, _, number = launch.prefix.rpartition("/")
    with contextlib.suppress(StoreLostError):
        store = control_store.connect(replace(launch, prefix=job), answer_s=_ANSWER_S)
        return newest_launch(store) > int(number)
    return False


def _lead(store: ControlStore, address: StoreAddress) -> int:
    """Return the number of the launch that this process leads from now on.

    Raises:
        LedElsewhereError: another process leads a launch of the job.
    """
    number = newest_launch(store)
    led = LedElsewhereError(
        f"a run of this job is led by another process, at {address.endpoint}",
        f"take part in it: elasticflow run JOB --join {address.endpoint}",
    )
    if number and _is_led(address.under(str(number))):
        raise led
    while True:
        number += 1
        # A process that was stopped right after its claim finds that another one has passed it over.
        if store.add(f"claim/{number}", 1) == 1 and newest_launch(store) < number:
            store.set(f"led/{number}", "1")
            store.set(_NEWEST, str(number))
            if newest_launch(store) > number:  # this process was stopped before these two lines
                raise led
            # The keys of older launches are not read any more, and the store outlives all runs.
            control_store.connect(address.under(str(number - 2))).forget()
            return number
        deadline = time.monotonic() + _CLAIM_S
        while time.monotonic() < deadline:  # the process that claimed it may have died right after
            if newest_launch(store) >= number:
                raise led
            time.sleep(_LOOK_S)


def _is_led(address: StoreAddress) -> bool:
    store = control_store.connect(address)
    if store.check([EXIT_CODE]):
        return False
    watch = SupervisorWatch(store)
    while not watch.look():
        if watch.has_changed:
            return True
        time.sleep(_LOOK_S)
    return False
