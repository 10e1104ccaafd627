"""What rank 0 tells of a snapshot besides its tensors: state.json and the manifest's facts."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from elasticflow.run_folder import snapshot_name
from elasticflow.runtime.data import index_schedule
from elasticflow.runtime.process import environment

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position, Schedule
    from elasticflow.runtime.state.state import Captured, State


class Recorder:
    """Makes names and records of snapshots.

    Args:
        me: This worker.
        state: What a snapshot holds.
        schedule: What positions mean.

    Attributes:
        parent: The committed snapshot that this generation goes on from, if any.
    """

    def __init__(self, me: Worker, state: State, schedule: Schedule) -> None:
        self._me, self._evaluation = me, state.evaluation
        self._schedule = {"samples": schedule.samples, "global_batch_size": schedule.global_batch_size}
        self._kind = environment.of(me.device)
        self._fingerprints = dict(me.fingerprints)
        self.parent: str | None = None

    def name(self, step: int) -> str:
        """Return what the snapshot of *step* is called, on every rank."""
        me = self._me
        text = f"{me.run_id}/{step}/{me.generation}".encode()
        return snapshot_name(step, me.generation, blake2b(text, digest_size=4).hexdigest())

    def record(self, position: Position, captured: Captured, trigger: str) -> dict[str, Any] | None:
        """Return the record, on rank 0; see `StagingClient.stage`."""
        me, evaluation = self._me, self._evaluation
        if me.rank != 0:
            return None
        state = {
            "position": position._asdict(),
            "order": index_schedule.VERSION,
            "schedule": self._schedule,
            "seed": me.seed,
            "random": me.random_version,
            "draws_random": me.generators.look(),
            "job": me.job,
            "job_digest": me.job_digest,
            "state": captured.tree,
        }
        manifest = {
            "trigger": trigger,
            "parent": self.parent,
            "metric": None if evaluation is None else evaluation.metric_at(position),
            "ranked_by": None if evaluation is None else evaluation.measure,
            "epoch": position.epoch,
            "samples": position.samples,
            "aliases": captured.aliases,
            "memory_formats": captured.memory_formats,
            "fingerprints": self._fingerprints,
            "versions": self._kind,
        }
        return {"state": state, "manifest": manifest}
