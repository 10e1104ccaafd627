"""The micro-batches of a rank, until the job's own code, or a request to leave, ends training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.errors import StopTraining
from elasticflow.runtime.process.stopping import Leaving, request_stop
from elasticflow.runtime.process.votes import LEAVE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.runtime.data.index_loader import Batch
    from elasticflow.runtime.process.votes import Vote


def micro_batches(batch: Batch, vote: Vote) -> Iterator[tuple[Any, int]]:
    """Yield the micro-batches of this rank; (None, 0) for each from where its code wants training to end."""
    for _ in batch.model_keys:
        piece: tuple[Any, int] = None, 0
        if vote.stop_wanted is None:
            try:
                piece = next(batch.micro_batches)
            except StopTraining as stop:
                request_stop(vote, stop)
            except Leaving:
                vote.stop_wanted = LEAVE
        yield piece
