"""Leaving before anything is trained, and the record of a run that has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.runtime.process.stopping import Leaving

if TYPE_CHECKING:
    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.store.catalog import Catalog


def beat_or_leave(me: Worker) -> None:
    """Report that this rank lives: a snapshot is being read for it.

    Raises:
        Leaving: this rank was asked to leave.
    """
    me.heartbeat.beat()
    if me.leaves_untrained:
        raise Leaving


def record_stop(me: Worker, catalog: Catalog) -> None:
    """Record beside the snapshots that training has ended, if it has, for launches on other machines; rank 0 does."""
    if me.rank == 0 and me.stopped is not None and me.stopped.is_end:
        catalog.write_stop({"step": me.progress.number, **me.stopped._asdict()})


def recall_stop(me: Worker, catalog: Catalog, step: int) -> None:
    """Have a run that stopped after *step* stop again before the next step; rank 0 requests it."""
    stop = catalog.read_stop() if me.rank == 0 else None
    # At another step its last snapshot is damaged, and the run goes on from an earlier one.
    if stop is not None and stop["step"] == step:
        me.vote.stop_wanted = stop["reason"]
