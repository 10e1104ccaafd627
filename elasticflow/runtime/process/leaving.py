"""Exit before anything is trained, and the record of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.runtime.process.stopping import Leaving

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.store.catalog import Catalog


def beat_or_leave(worker: Worker) -> None:
    """Report that this rank lives, while a snapshot is read for it.

    Raises:
        Leaving: this rank was asked to exit.
    """
    worker.heartbeat.beat()
    if worker.leaves_untrained:
        raise Leaving


def record_stop(worker: Worker, catalog: Catalog) -> None:
    """Record the end of training, if it has ended, beside the snapshots for launches on other machines. Rank 0 writes."""
    if worker.rank == 0 and worker.stopped is not None and worker.stopped.is_end:
        catalog.write_stop({"step": worker.progress.number, **worker.stopped._asdict()})


def recall_stop(worker: Worker, catalog: Catalog, step: int) -> None:
    """Have a run that stopped after *step* stop again before the next step; rank 0 requests it."""
    stop = catalog.read_stop() if worker.rank == 0 else None
    # If the step differs, the last snapshot is damaged and the run resumes from an earlier one. A stop by the job file
    # (`by_rank` None) is not repeated, since the file may have changed: the evaluation decides again.
    if stop is not None and stop["step"] == step and stop["by_rank"] is not None:
        worker.vote.stop_wanted = stop["reason"]
