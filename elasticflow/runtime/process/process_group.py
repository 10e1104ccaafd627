"""Device, store and process group of a worker."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import sys
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from elasticflow.protocol import control_store
from elasticflow.protocol.store_address import is_here
from elasticflow.runtime.process import torch_private
from elasticflow.runtime.process.torch_private import PrefixStore, TCPStore

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from elasticflow.protocol.control_store import RemoteControlStore
    from elasticflow.runtime.process.identity import Identity
    from elasticflow.runtime.process.torch_private import Store

# Under our agent a hang is noticed by its heartbeats; a collective's own limit would only end a slow evaluation.
_TIMEOUT = {"launcher": timedelta(hours=24), "torchrun": timedelta(hours=2)}
_STORE_TIMEOUT = timedelta(minutes=5)
_POLL_S = 0.01
# Workers that wait for rank 0 to accept them: all of a generation come at a time.
_BACKLOG = 4096
# Where rank 0 serves the store of its generation's workers.
_STORE = "store"
_INTERFACE = "GLOO_SOCKET_IFNAME"


def choose_device(identity: Identity) -> torch.device:
    """Return this rank's GPU if the machine has one for every local rank, else the CPU.

    This process runs on cores near its GPU afterwards, if `[torchrun] numa_binding` asks for it.
    """
    if identity.numa is not None:
        torch_private.bind_to_cores(identity.numa, identity.local_rank)
    if torch.cuda.is_available() and torch.cuda.device_count() >= identity.local_world_size:
        device = torch.device("cuda", identity.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def set_threads(threads: int | None, local_world_size: int) -> None:
    """Give this process *threads* CPU threads, or its share of the node's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // local_world_size))


def connect(identity: Identity) -> Store | None:
    """Return the key-value store all ranks share; None for a plain process. Every rank.

    Under our agent rank 0 serves it, anew in each generation: what a dead one left is never read, and neither the
    supervisor nor the agents need torch. The launch's keys say where it is.
    """
    if identity.started_by == "python":
        return None
    if identity.started_by == "torchrun":
        shared, _, _ = next(rendezvous("env://", timeout=_STORE_TIMEOUT))
        return own_part(PrefixStore("elasticflow", shared), identity.rank, identity.world_size)
    keys = control_store.connect(identity.rendezvous.under(f"run/{identity.generation}"))
    if identity.rank == 0:
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
        keys.set(_STORE, json.dumps([_own_address(identity, keys), port]))
        return store
    # As long as the process group would wait: rank 0 may take its time, and a hang is noticed by its heartbeats.
    host, port = json.loads(keys.get(_STORE, _TIMEOUT["launcher"].total_seconds()))
    # Without an address of its own it is on the machine that serves the launch's keys.
    host = host or identity.rendezvous.host
    return TCPStore(host, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)


def own_part(store: Store, rank: int, world_size: int) -> Store:
    """Return a part of *store* that only this group's ranks use, which are alive. Collective: every rank.

    torchrun (2.13) serves one store through all its restarts, so it has what killed groups wrote: their generation, and the
    addresses at which they were reached. `TORCHELASTIC_RESTART_COUNT` does not tell groups apart, as agents count for
    themselves. So rank 0 names a part, and tells it to each rank under a word that no process has used before.

    Raises:
        TimeoutError: not all ranks have come.
    """
    word = uuid4().hex
    if rank != 0:
        store.set(f"came/{rank}", word)
        name = store.get(f"part/{word}").decode()
        store.set(f"{name}/knows/{rank}", "")
        return PrefixStore(name, store)
    missing, answered = set(range(1, world_size)), {""}
    deadline = time.monotonic() + _STORE_TIMEOUT.total_seconds()
    while missing:
        for other in sorted(missing):
            asks = store.get(f"came/{other}").decode() if store.check([f"came/{other}"]) else ""
            # One that was killed may have asked, and its successor asks later.
            if asks not in answered:
                store.set(f"part/{asks}", word)
                answered.add(asks)
            if store.check([f"{word}/knows/{other}"]):
                missing.remove(other)
        if missing and time.monotonic() > deadline:
            raise TimeoutError(f"ranks {sorted(missing)} did not come within {_STORE_TIMEOUT}")
        time.sleep(_POLL_S if missing else 0)
    return PrefixStore(word, store)


def announce(store: Store, environ: MutableMapping[str, str]) -> None:
    """Have *environ* name the store that rank 0 serves: code of the job's own may look for it by `env://`."""
    if isinstance(store, TCPStore):
        environ.update({"MASTER_ADDR": store.host, "MASTER_PORT": str(store.port)})


def _listen(identity: Identity) -> socket.socket:
    """Return a listening socket on a free port: for this machine alone where all workers are on it.

    On the interface that the job names, if it names one.
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
    """Return the address under which other workers reach this machine: the job's, or that towards the launch's keys.

    None where that is the loopback and the host's name stands for no other address of this machine: others reach it
    where they find the keys.
    """
    if identity.world_size == identity.local_world_size:
        return "127.0.0.1"
    if identity.address is not None:
        return identity.address
    if not ipaddress.ip_address(address := keys.own_address).is_loopback:
        return address
    # A host's name may stand for an address that only others know it by, or for one that it had once.
    with suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if is_here(named) and not ipaddress.ip_address(named).is_loopback:
            return named
    return None


def form(identity: Identity, store: Store | None, device: torch.device) -> None:
    """Form the process group: gloo for CPU tensors, nccl for CUDA's. Collective: every rank.

    A plain process is a group of one, so that code of the job's own that asks for a group has it; a group that the
    script has formed before stays.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if store is None:
        if not dist.is_initialized():
            with _on_loopback():
                dist.init_process_group(backend, store=torch_private.HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(
        backend,
        # A name of its own per generation: keys of a dead group would be taken for this one's.
        store=PrefixStore(f"pg/{identity.generation}", store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=_TIMEOUT[identity.started_by],
    )


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Have gloo listen where no other machine reaches it, in a group that no other process will join."""
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
    data = text.encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(int(size) for size in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(rows, mine)
    return [bytes(row[: int(size)].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def all_true(mine: bool, world_size: int) -> bool:
    """True if *mine* is true on every rank. Collective: every rank."""
    if world_size == 1:
        return mine
    vote = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(vote, dist.ReduceOp.MIN)
    return bool(vote.item())


# Less than any digest, and than any negative one.
_ABSTAINS = -(2**60)


class DigestComparison:
    """Compares a digest of a text between all ranks: begun when it is made, answered when it is asked.

    No rank waits for another before it asks. Collective: every rank makes one at the same place, and asks each once.

    Args:
        text: This rank's; None: it takes part, and what it holds does not count.
    """

    def __init__(self, text: str | None) -> None:
        most = least = _ABSTAINS
        if text is not None:
            most = int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
            least = -most
        self._ends = torch.tensor([most, least])
        self._work = dist.all_reduce(self._ends, dist.ReduceOp.MAX, async_op=True)

    def are_equal(self) -> bool:
        """Wait for all ranks; true if the texts of those that count were the same."""
        if self._work is not None:
            self._work.wait()
        most, least = self._ends.tolist()
        return most in (-least, _ABSTAINS)
