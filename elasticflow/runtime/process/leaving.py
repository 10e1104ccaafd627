"""Leaving before anything is trained, and word of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.runtime.process.stopping import Leaving

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.store.catalog import Catalog


def read_on(me: Worker) -> None:
    """Take note that a snapshot is being read.

    Raises:
        Leaving: this rank was asked to leave.
    """
    me.heartbeat.beat()
    if me.leaves_untrained:
        raise Leaving


def record(me: Worker, catalog: Catalog) -> None:
    """Leave word beside the snapshots that the run has ended, for launches on other machines; rank 0."""
    if me.rank == 0 and me.stopped is not None and me.stopped.is_end:
        catalog.write_stop({"step": me.progress.number, **me.stopped._asdict()})


def recall(me: Worker, catalog: Catalog, step: int) -> None:
    """Have a run that stopped after *step* stop again before the next one; rank 0."""
    found = catalog.read_stop() if me.rank == 0 else None
    if found is not None and found["step"] == step:  # else its last snapshot is damaged: it goes on before it
        me.vote.stop_wanted = found["reason"]
