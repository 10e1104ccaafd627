"""Threads, store and process group of a worker."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from elasticflow.protocol import control_store
from elasticflow.protocol.store_address import address_for_others
from elasticflow.runtime.process import devices, torch_private
from elasticflow.runtime.process.torch_private import PrefixStore, TCPStore
from elasticflow.system.processes import usable_cores

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from elasticflow.protocol.control_store import RemoteControlStore
    from elasticflow.runtime.process.identity import Identity
    from elasticflow.runtime.process.torch_private import Store

# Under our agent a hang is noticed by its heartbeats; a collective's own limit would only end a slow evaluation.
_TIMEOUT = {"launcher": timedelta(hours=24), "torchrun": timedelta(hours=2)}
_STORE_TIMEOUT = timedelta(minutes=5)
_POLL_S = 0.01
# Workers that wait for rank 0 to accept them: a whole generation connects at once.
_BACKLOG = 4096
# Key of the address at which rank 0 serves the store of its generation.
_STORE = "store"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def set_threads(threads: int | None, local_world_size: int) -> None:
    """Give this process *threads* CPU threads, or its share of the node's cores."""
    torch.set_num_threads(threads or max(1, usable_cores() // local_world_size))


def connect(identity: Identity, device: torch.device) -> Store | None:
    """Return the key-value store that all ranks share; None for a plain process. Every rank.

    Under our agent, rank 0 serves a new store in each generation, so that keys of a dead generation are never read, and
    neither the supervisor nor the agents need torch. The launch's keys hold the store's address.

    Raises:
        DeviceError: an earlier generation of this launch trained on another device type than *device*'s; rank 0.
    """
    if identity.started_by == "python":
        return None
    if identity.started_by == "torchrun":
        shared, _, _ = next(rendezvous("env://", timeout=_STORE_TIMEOUT))
        of_all_groups = PrefixStore("elasticflow", shared)
        if identity.rank == 0:
            devices.require_type_of_launch(of_all_groups, device)
        start = identity.torchrun_folder if identity.node == "0" else ""
        return own_part(of_all_groups, identity.rank, identity.world_size, start, identity.local_world_size)
    keys = control_store.connect(identity.rendezvous.under("run"))
    address = f"{identity.generation}/{_STORE}"
    if identity.rank == 0:
        devices.require_type_of_launch(keys, device)
        listener = _listen(identity)
        host, port = listener.getsockname()[:2]
        store = TCPStore(
            "127.0.0.1" if ipaddress.ip_address(host).is_unspecified else host,
            port,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        keys.set(address, json.dumps([_own_address(identity, keys), port]))
        return store
    # The process group's own limit: rank 0 may be slow, and its heartbeats show a hang.
    host, port = json.loads(keys.get(address, _TIMEOUT["launcher"].total_seconds()))
    # Without an address of its own, rank 0 is on the machine that serves the launch's keys.
    host = host or identity.rendezvous.host
    return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)


def own_part(store: Store, rank: int, world_size: int, start: str = "", of_start: int = 0) -> Store:
    """Return a part of *store* that only the living ranks of this group use. Collective: every rank.

    torchrun (2.13) serves one store through all its restarts, so the store still holds the keys of killed groups: their
    generation and their addresses. `TORCHELASTIC_RESTART_COUNT` does not tell groups apart, since each agent counts for
    itself. So each rank writes a word that no process has used before, and rank 0 answers under that word with the part's
    name.

    Workers of a torchrun that was killed live on, and come to the store of the next one if the port is the same: on the node
    of rank 0 the ranks look for one another under *start*.

    Args:
        start: A text that the ranks on the node of rank 0 share with no other start's ranks; empty on other nodes, or if there is none.
        of_start: Number of ranks on the node of rank 0; used by rank 0 alone.

    Raises:
        TimeoutError: a rank did not come in time.
    """
    word = uuid4().hex
    if rank != 0:
        store.set(_question(rank, start), word)
        name = store.get(f"part/{word}").decode()
        store.set(f"{name}/knows/{rank}", "")
        return PrefixStore(name, store)
    missing, answered = set(range(1, world_size)), {""}
    deadline = time.monotonic() + _STORE_TIMEOUT.total_seconds()
    while missing:
        for other in sorted(missing):
            question = _question(other, start if other < of_start else "")
            asks = store.get(question).decode() if store.check([question]) else ""
            # A killed process may have written this word; its successor writes another word later.
            if asks not in answered:
                store.set(f"part/{asks}", word)
                answered.add(asks)
            if store.check([f"{word}/knows/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not come within {_STORE_TIMEOUT}")
        time.sleep(_POLL_S if missing else 0)
    return PrefixStore(word, store)


def _question(rank: int, start: str) -> str:
    return f"came/{start}/{rank}"


def announce(store: Store, environ: MutableMapping[str, str]) -> None:
    """Set the address of rank 0's store in *environ*, where the job's own code may look for it by `env://`."""
    if isinstance(store, TCPStore):
        environ.update({"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)})


def _listen(identity: Identity) -> socket.socket:
    """Return a listening socket on a free port.

    It listens on the loopback if all workers are on this machine, else at the address that the job names, else on all
    interfaces.
    """
    if identity.world_size == identity.local_world_size:
        return socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
    if identity.address is not None:
        family = socket.AF_INET6 if ":" in identity.address else socket.AF_INET
        return socket.create_server((identity.address, 0), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


def _own_address(identity: Identity, keys: RemoteControlStore) -> str | None:
    """Return the address at which other workers reach this machine: the one that the job names, else `address_for_others`."""
    if identity.world_size == identity.local_world_size:
        return "127.0.0.1"
    return identity.address or address_for_others(keys.own_address)


def form(identity: Identity, store: Store | None, device: torch.device) -> None:
    """Form the process group: gloo for CPU tensors, torch's default backend for the device's. Collective: every rank.

    A plain process forms a group of one rank, for the job's own code that needs a group; a group that the script has
    formed before stays.

    Raises:
        DeviceError: the ranks have devices of several types; on every rank.
    """
    backend = _backend(identity, device)
    if store is None:
        if not dist.is_initialized():
            with _on_loopback():
                dist.init_process_group(backend, store=torch_private.HashStore(), rank=0, world_size=1)
        return
    devices.require_one_type(identity, store, device, _TIMEOUT[identity.started_by])
    dist.init_process_group(
        backend,
        # Each generation has its own prefix: keys of a dead group would be taken for keys of this group.
        store=PrefixStore(f"pg/{identity.generation}", store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=_TIMEOUT[identity.started_by],
    )


def new_group(identity: Identity, ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Return a new group of *ranks*, of all ranks by default, which waits as long as the group of all ranks. Collective: every rank."""
    made: dist.ProcessGroup = dist.new_group(
        None if ranks is None else list(ranks), timeout=_TIMEOUT.get(identity.started_by)
    )
    return made


def _backend(identity: Identity, device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    of_device = "gloo" if identity.shares_device else dist.get_default_backend_for_device(device)
    return f"cpu:gloo,{device.type}:{of_device}"


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have gloo listen on the loopback only, for a group that no other process will join."""
    if _INTERFACE in os.environ:
        yield
        return
    os.environ[_INTERFACE] = "lo0" if sys.platform == "darwin" else "lo"
    try:
        yield
    finally:
        del os.environ[_INTERFACE]


def gather_text(text: str, world_size: int) -> list[str]:
    """Return every rank's *text*, by rank. Collective: every rank."""
    if world_size == 1:
        return [text]
    texts = [""] * world_size
    dist.all_gather_object(texts, text)
    return texts


def send_text(text: str | None, source: int) -> str:
    """Return the *text* of rank *source*; it is None on all others. Collective: every rank."""
    texts: list[Any] = [text]
    dist.broadcast_object_list(texts, source)
    return str(texts[0])


def all_true(mine: bool, world_size: int) -> bool:
    """True if *mine* is true on every rank. Collective: every rank."""
    if world_size == 1:
        return mine
    vote = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(vote, dist.ReduceOp.MIN)
    return bool(vote.item())


# Less than any digest or negated digest.
_ABSTAINS = -(2**60)


class DigestComparison:
    """Compares digests of texts between all ranks: the constructor starts the comparison, `are_equal` waits for it.

    Collective: every rank constructs it at the same place, and calls `are_equal` once.

    Args:
        texts: This rank's texts, as many on every rank. A text is compared with those at the same place of other ranks; with
            None, this rank takes part there without a text that counts.
    """

    def __init__(self, *texts: str | None) -> None:
        most = [_ABSTAINS if text is None else _digest_of(text) for text in texts]
        least = [_ABSTAINS if text is None else -_digest_of(text) for text in texts]
        self._ends = torch.tensor([most, least])
        self._work: Any = dist.all_reduce(self._ends, dist.ReduceOp.MAX, async_op=True)

    def are_equal(self) -> bool:
        """Wait for all ranks; true if at each place all texts that count are the same."""
        self._work.wait()
        return all(most in (-least, _ABSTAINS) for most, least in zip(*self._ends.tolist(), strict=True))


def _digest_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
