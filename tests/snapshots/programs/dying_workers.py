"""Generations of two workers at one writer; each takes a whole snapshot, and one rank dies in the next (imports torch once).

Arguments: address of the writer, folder of the run, names of fault points. For each point and each rank, one JSON line:
the point, the rank that died there, and the step of the newest snapshot afterwards, counted from the generation's start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import NoReturn

import torch
import torch._dynamo  # else the first optimizer of each child imports it
from torch import nn

from elasticflow.run_folder import snapshot_name
from elasticflow.runtime.snapshot.rank_shard import ShardPlanner
from elasticflow.runtime.state.state import State
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection

WORLD = 2
address, folder, *points = sys.argv[1:]
catalog = Catalog(Storage(folder))


def connect(rank: int, generation: int) -> StagingClient:
    """Greet the writer as a rank of *generation*."""
    return StagingClient.connect(
        address, rank=rank, world_size=WORLD, local_world_size=WORLD, generation=generation, timeout_s=100
    )


def take(client: StagingClient, state: State, rank: int, generation: int, step: int) -> None:
    """Stage this rank's shard, as `runtime.snapshot.Snapshots` does."""
    captured = state.capture()
    shard = ShardPlanner(rank, WORLD).shard_of(captured)
    entries = shard.copy_into(client.buffer(shard.nbytes, timeout_s=100))
    record = (
        SnapshotRecord({"position": {"step": step}, "state": {}}, ManifestFacts(trigger="steps"))
        if rank == 0
        else None
    )
    name = snapshot_name(step, generation, f"{step:08x}")
    client.stage(name=name, step=step, tensors=entries, nbytes=shard.nbytes, record=record)


def work(rank: int, generation: int, fault: str) -> NoReturn:
    """Take two snapshots, with *fault* armed for the second."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(50, 100), nn.Linear(100, 20))
    state = State(model=model, optimizer=torch.optim.SGD(model.parameters()))
    client = connect(rank, generation)
    take(client, state, rank, generation, 10 * generation + 1)
    client.flush(20)
    fault_injection.arm({fault_injection.VARIABLE: fault})
    take(client, state, rank, generation, 10 * generation + 2)
    os._exit(0)  # a survivor, too, is ended at once


def generation_of(number: int, point: str, victim: int) -> int:
    """Return the step of the newest snapshot when the next generation is answered, less the first it could be."""
    pids = []
    for rank in range(WORLD):
        pid = os.fork()
        if pid == 0:
            work(rank, number, f"{point}=kill@1" if rank == victim else "")
        pids.append(pid)
    for rank, pid in enumerate(pids):
        _, status = os.waitpid(pid, 0)
        expected = -signal.SIGKILL if rank == victim else 0
        assert os.waitstatus_to_exitcode(status) == expected, f"rank {rank} at {point}: status {status}"
    catalog.claim_generation({})
    connect(0, number + 1).close()  # answered when the older generation's snapshots have an outcome
    newest = catalog.newest()
    assert newest is not None
    assert newest.generation == number
    assert verify.verify(catalog, newest) == []
    assert catalog.damaged() == {}
    return newest.step - 10 * number


number = 0
catalog.claim_generation({})
for point in points:
    for victim in range(WORLD):
        number += 1
        print(json.dumps([point, victim, generation_of(number, point, victim)]), flush=True)
os._exit(0)
