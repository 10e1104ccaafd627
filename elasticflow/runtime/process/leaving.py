"""Leaving before anything is trained, and the record of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.runtime.process.stopping import Leaving

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.store.catalog import Catalog


def beat_or_leave(worker: Worker) -> None:
    """Report that this rank lives: a snapshot is being read for it.

    Raises:
        Leaving: this rank was asked to leave.
    """
    worker.heartbeat.beat()
    if worker.leaves_untrained:
        raise Leaving


def record_stop(worker: Worker, catalog: Catalog) -> None:
    """Record beside the snapshots that training has ended, if it has, for launches on other machines; rank 0 does."""
    if worker.rank == 0 and worker.stopped is not None and worker.stopped.is_end:
        catalog.write_stop({"step": worker.progress.number, **worker.stopped._asdict()})


def recall_stop(worker: Worker, catalog: Catalog, step: int) -> None:
    """Have a run that stopped after *step* stop again before the next step; rank 0 requests it."""
    stop = catalog.read_stop() if worker.rank == 0 else None
    # At another step its last snapshot is damaged, and the run resumes from an earlier one. What the job file says
    # may have changed: the evaluation asks again.
    if stop is not None and stop["step"] == step and stop["by_rank"] is not None:
        worker.vote.stop_wanted = stop["reason"]
