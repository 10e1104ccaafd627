"""This rank's connection to the snapshot writer of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.client.writer_process import start_writer
from elasticflow.snapshots.format.writer_config import WriterStart

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.snapshot.policy import Policy
    from elasticflow.runtime.state.state import State

_started: list[Any] = []  # writers live as long as the worker that started them


def connect(me: Worker, policy: Policy, prefix: str, state: State) -> StagingClient:
    """Return this rank's connection; without an agent of ours, a node's first rank starts the writer. Every rank.

    Raises:
        SnapshotError: there is no writer, or it refuses this generation.
    """
    address = me.identity.writer
    if address is None:
        if me.local_rank == 0:
            best_mode = None if state.evaluation is None else state.evaluation.best_mode
            uri = policy.uri or str(me.run_folder.path)
            start = WriterStart(uri, me.run_id, policy.writer_config(best_mode), prefix)
            _started.append(start_writer(start))
            address = _started[-1].address
            if me.store is not None:
                me.store.set(f"writer/{me.node}", address)
        else:
            assert me.store is not None
            address = me.store.get(f"writer/{me.node}").decode()
    return StagingClient.connect(
        address,
        rank=me.rank,
        world_size=me.world_size,
        local_world_size=me.local_world_size,
        generation=me.generation,
    )
