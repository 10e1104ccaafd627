"""Device, store and process group of a worker (floor R)."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from elasticflow.runtime.identity import Identity

# Under our agent a hang is noticed by its heartbeats; a collective's own limit would only end a slow evaluation.
_TIMEOUT = {"launched": timedelta(hours=24), "torchrun": timedelta(hours=2)}
_STORE_TIMEOUT = timedelta(minutes=5)


def choose_device(identity: Identity) -> torch.device:
    """Return this rank's GPU if the machine has one for every local rank, else the CPU.

    This process runs on cores near its GPU afterwards, if `[torchrun] numa_binding` asks for it.
    """
    if identity.numa is not None:
        _bind_to_cores(identity.numa, identity.local_rank)
    if torch.cuda.is_available() and torch.cuda.device_count() >= identity.local_world_size:
        device = torch.device("cuda", identity.local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def _bind_to_cores(mode: str, gpu: int) -> None:
    """Do what torch's agent does for workers that it starts itself, and fails as it does where there is no GPU."""
    from torch.numa import binding

    options = binding.NumaOptions(binding.AffinityMode(mode))
    binding._maybe_apply_numa_binding_to_current_process(gpu_index=gpu, numa_options=options)  # noqa: SLF001


def set_threads(threads: int | None, local_world_size: int) -> None:
    """Give this process *threads* CPU threads, or its share of the node's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or max(1, cores // local_world_size))


def connect(identity: Identity) -> Store | None:
    """Return the key-value store all ranks share; None for a plain process. Every rank."""
    if identity.way == "plain":
        return None
    if identity.way == "torchrun":
        store, _, _ = next(rendezvous("env://", timeout=_STORE_TIMEOUT))
        return PrefixStore("elasticflow", store)
    place = identity.rendezvous.under(f"run/{identity.generation}")
    if place.backend == "etcd-v2":
        from elasticflow.runtime.etcd_store import EtcdStore

        return EtcdStore(place, _STORE_TIMEOUT)
    store = TCPStore(place.host, place.port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
    return PrefixStore(place.prefix, store)


def form(identity: Identity, store: Store, device: torch.device) -> None:
    """Form the process group: gloo for CPU tensors, nccl for CUDA's. Collective: every rank."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        # A name of its own per generation: keys of a dead group would be taken for this one's.
        store=PrefixStore(f"pg/{identity.generation}", store),
        rank=identity.rank,
        world_size=identity.world_size,
        timeout=_TIMEOUT[identity.way],
    )


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
    found = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size)]
    dist.all_gather(found, mine)
    return [bytes(row[: int(size)].tolist()).decode() for row, size in zip(found, sizes, strict=True)]


def all_true(mine: bool, world_size: int) -> bool:
    """True if *mine* is true on every rank. Collective: every rank."""
    if world_size == 1:
        return mine
    vote = torch.tensor([mine], dtype=torch.int32)
    dist.all_reduce(vote, dist.ReduceOp.MIN)
    return bool(vote.item())
