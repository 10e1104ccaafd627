"""Where the agents of a launch meet: in the supervisor's own store, or in one that outlives it (floor 3).

A store that outlives supervisors is etcd, or what `elasticflow rendezvous serve` serves. Several runs may use it, one
of a job at a time, so its keys are apart:

    elasticflow/<job>/claim/<n>   how many processes wanted to lead the n-th launch of the job; the first does
    elasticflow/<job>/newest      number of the newest launch
    elasticflow/<job>/<n>/...     keys of the n-th launch: `keys.py`
    elasticflow/served            versions of who serves the store; nothing in etcd

A supervisor changes `head` all the time. Once it is silent another process may lead the next launch (`join.py`).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.errors import LedElsewhereError, NodeRefusedError, RendezvousError
from elasticflow.launcher.rendezvous.head_signs import HeadSigns, HeadWatch
from elasticflow.launcher.rendezvous.interface import is_here, listen
from elasticflow.launcher.rendezvous.invitation import versions
from elasticflow.rendezvous_place import RendezvousPlace

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's stubs do not re-export it

    from elasticflow.compiler.plan import LaunchPlan
    from elasticflow.launcher.rendezvous.keys import Keys

SERVED = "served"
_NEWEST = "newest"
_LOOK_S = 0.25
_CLAIM_S = 5.0
_ANSWER_S = 10.0


@dataclass
class Meeting:
    """Where the agents of one launch meet.

    Attributes:
        place: Where this machine's agents find the launch's keys.
        endpoint: What other machines are told; None if there are none.
        listener: Where the supervisor is to serve the store; None if somebody else serves it.
    """

    place: RendezvousPlace
    endpoint: str | None
    listener: socket.socket | None = None
    _signs: HeadSigns | None = None

    def open(self) -> Keys:
        """Return the launch's keys as its supervisor uses them; serves them if they are its own."""
        from elasticflow.launcher.rendezvous.keys import TOLD, join_store  # torch, once it is of use

        if self.listener is None:
            return join_store(self.place, looks_at=TOLD)
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not re-exported

        server = serve(self.listener)
        job = self.place.prefix.rpartition("/")[0]
        keys: Keys = PrefixStore(self.place.prefix, server)
        PrefixStore(job, server).set(_NEWEST, "1")
        return keys

    def close(self) -> None:
        """Be silent, and give the port back if it was not used."""
        if self._signs is not None:
            self._signs.end()
        if self.listener is not None:
            self.listener.close()


def meet(plan: LaunchPlan) -> Meeting:
    """Return where the agents of a launch of *plan* meet; this process leads it from now on.

    Raises:
        PortTakenError: the endpoint's port is in use.
        RendezvousError: nobody serves the store that the job names.
        LedElsewhereError: another process leads a run of the job there.
    """
    if plan.endpoint is None:
        listener = listen("127.0.0.1", 0)
        place = place_of(plan, *listener.getsockname()[:2]).under("1")
        # Nodes that are played on this machine may be joined by others on it.
        return Meeting(place, None if plan.nodes_max == 1 else place.endpoint, listener)
    host, _, number = plan.endpoint.rpartition(":")
    place = place_of(plan, host, int(number))
    if not plan.is_store_outside:
        listener = listen("", place.port)
        if not is_here(host):
            place = place_of(plan, "127.0.0.1", place.port)
        return Meeting(place.under("1"), None if plan.nodes_max == 1 else plan.endpoint, listener)
    launch = place.under(str(_lead(connect(place), place)))
    return Meeting(launch, plan.endpoint, _signs=HeadSigns(launch))


def place_of(plan: LaunchPlan, host: str, port: int) -> RendezvousPlace:
    """Return where runs of the job of *plan* meet in the store at *host*:*port*."""
    backend = "etcd-v2" if plan.rdzv_backend == "etcd-v2" else "c10d"
    place = RendezvousPlace(host, port, backend=backend, options=plan.rdzv_options)
    return place.under(plan.job_name)


def serve(listener: socket.socket) -> Store:
    """Return torch's store, served by a thread of this process on *listener*."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not re-exported

    host, port = listener.getsockname()[:2]
    here = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104  # where this process finds it
    return TCPStore(here, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def connect(place: RendezvousPlace) -> Keys:
    """Return the keys at *place* in a store that somebody else serves.

    Raises:
        RendezvousError: nobody does.
        NodeRefusedError: it is served by other versions than this machine has.
    """
    found: list[Keys] = []
    why: list[str] = []

    def try_it() -> None:
        from elasticflow.launcher.rendezvous.keys import join_store

        try:
            keys = join_store(place, looks_at="", answer_s=_ANSWER_S / 2)
            keys.check([_NEWEST])
            found.append(keys)
        except (RuntimeError, ImportError) as error:
            why.append(str(error).splitlines()[0])

    try:
        socket.create_connection((place.host, place.port), timeout=_ANSWER_S).close()
    except OSError as error:
        why.append(str(error))
    else:
        # torch's store waits for ever for an answer in its own language (2.13).
        thread = threading.Thread(target=try_it, daemon=True)
        thread.start()
        thread.join(2 * _ANSWER_S)
    if found:
        _check_versions(place)
        return found[0]
    reason = why[0] if why else "what answers there is no store"
    raise RendezvousError(
        f"no store for the rendezvous at {place.endpoint}: {reason}",
        "start etcd there with --enable-v2, and pip install 'elasticflow[etcd]' here"
        if place.backend == "etcd-v2"
        else f"start it there: elasticflow rendezvous serve --port {place.port}",
    )


def _check_versions(place: RendezvousPlace) -> None:
    """Return if the store speaks as this machine's torch does.

    Raises:
        NodeRefusedError: it may not.
    """
    if place.backend != "c10d":
        return
    from elasticflow.launcher.rendezvous.keys import join_store

    root = join_store(RendezvousPlace(place.host, place.port))
    there = json.loads(root.get(SERVED)) if root.check([SERVED]) else {}
    for name, version in versions().items():
        if there.get(name, version) != version:
            raise NodeRefusedError(
                f"the store at {place.endpoint} is served by {name} {there[name]}, this machine has {version}",
                f"install {name} {version} there, or {there[name]} here",
            )


def newest_launch(keys: Keys) -> int:
    """Return the number of the newest launch of the job whose keys these are; 0 if there was none."""
    return int(keys.get(_NEWEST)) if keys.check([_NEWEST]) else 0


def _lead(keys: Keys, place: RendezvousPlace) -> int:
    """Return the number of the launch that this process leads from now on.

    Raises:
        LedElsewhereError: another process leads one.
    """
    number = newest_launch(keys)
    led = LedElsewhereError(
        f"a run of this job is led by another process, at {place.endpoint}",
        f"take part in it: elasticflow run JOB --join {place.endpoint}",
    )
    if number and _is_led(place.under(str(number))):
        raise led
    while True:
        number += 1
        if keys.add(f"claim/{number}", 1) == 1:
            keys.set(_NEWEST, str(number))
            _forget(place.under(str(number - 2)))
            return number
        deadline = time.monotonic() + _CLAIM_S
        while time.monotonic() < deadline:  # unless it died right after it claimed
            if newest_launch(keys) >= number:
                raise led
            time.sleep(_LOOK_S)


def _forget(place: RendezvousPlace) -> None:
    """Remove the keys of a launch that nobody reads any more: etcd outlives all runs, and keeps them on disk."""
    if place.backend == "etcd-v2":
        from elasticflow.etcd_keys import EtcdKeys

        EtcdKeys(place).forget()


def _is_led(place: RendezvousPlace) -> bool:
    from elasticflow.launcher.rendezvous.keys import EXIT_CODE, join_store

    keys = join_store(place, looks_at="")
    if keys.check([EXIT_CODE]):
        return False
    watch = HeadWatch(keys)
    while not watch.is_silent():
        if watch.has_changed:
            return True
        time.sleep(_LOOK_S)
    return False
