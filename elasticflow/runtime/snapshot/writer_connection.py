"""This rank's connection to the snapshot writer of its node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.tables.units import parse_size
from elasticflow.snapshots.client.staging import StagingClient
from elasticflow.snapshots.client.writer_process import start_writer

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
            _started.append(start_writer(_config(me, policy, prefix, state)))
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


def _config(me: Worker, policy: Policy, prefix: str, state: State) -> dict[str, Any]:
    evaluation = state.evaluation
    return {
        "uri": policy.uri or str(me.run_folder.path),
        "options": policy.options,
        "prefix": prefix,
        "run_id": me.run_id,
        "keep_last": policy.keep_last,
        "keep_best": policy.keep_best,
        "keep_every": policy.keep_every,
        "keep_within": policy.keep_within,
        "integrity": policy.integrity,
        "staging_limit": None if policy.staging_limit is None else parse_size(policy.staging_limit),
        "best_mode": None if evaluation is None else evaluation.best_mode,
    }
