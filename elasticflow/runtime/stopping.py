"""What ends training between two votes: StopTraining, or a wish to leave where data is awaited (floor R).

What the job's own code raises on one rank ends training on all of them. That rank goes on taking part, with noughts,
until all have agreed: in the vote of the step in which it was raised or of the next one, or at the end of the
evaluation. The step whose vote says so is not applied. A rank that was asked to leave while it waits for data, or
evaluates, does the same, and training goes on from there in the next generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow import StopTraining
from elasticflow.runtime.vote import LEAVE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from elasticflow.runtime.data import Batch
    from elasticflow.runtime.member import Worker
    from elasticflow.runtime.vote import Vote
    from elasticflow.snapshots.catalog import Catalog

_LONGEST_REASON = 1000  # characters


class Stopped(NamedTuple):
    """Why all ranks take no further step, and the first rank that wanted that; None: it was asked to leave."""

    reason: str | None
    by_rank: int

    @property
    def is_end(self) -> bool:
        """Whether training has ended."""
        return self.reason is not None


class Leaving(Exception):  # noqa: N818  # nothing failed
    """Raised where a rank waits, once it was asked to leave."""


class Stoppable:
    """`with` this, StopTraining cuts the block short and becomes this rank's wish."""

    def __init__(self, vote: Vote) -> None:
        self._vote = vote

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, StopTraining):
            return False
        want(self._vote, error)
        return True


def want(vote: Vote, stop: StopTraining) -> None:
    """Remember the first reason that this rank was given."""
    if vote.stop_wanted is None:
        # Raised in a loader process, it comes with the traceback there as its text.
        reason = str(stop).rpartition("StopTraining: ")[2].strip()[:_LONGEST_REASON] or "no reason given"
        vote.stop_wanted = reason.encode("utf-8", "backslashreplace").decode()  # it travels between ranks


def micro_batches(batch: Batch, vote: Vote) -> Iterator[tuple[Any, int]]:
    """Yield the micro-batches of this rank; (None, 0) for each from where its code wants training to end."""
    for _ in batch.model_keys:
        piece: tuple[Any, int] = None, 0
        if vote.stop_wanted is None:
            try:
                piece = next(batch.micro_batches)
            except StopTraining as stop:
                want(vote, stop)
            except Leaving:
                vote.stop_wanted = LEAVE
        yield piece


def agree(me: Worker) -> Stopped | None:
    """Return why no further step is taken if any rank wants that. Collective: every rank."""
    wish = me.vote.stop_wanted
    left = None
    for rank, text in enumerate(me.gather_text("" if wish is None else f"!{wish}")):
        if text not in ("", f"!{LEAVE}"):
            return Stopped(text[1:], rank)
        if text and left is None:
            left = Stopped(None, rank)
    return left


def leave_untrained(me: Worker) -> None:
    """Return if no rank was asked to leave. Collective: every rank.

    Raises:
        Leaving: one was, for `worker.run`: nothing was trained, so there is nothing to save. On every rank.
    """
    if not me.all_true(not _leaves_untrained(me)):
        raise Leaving


def read_on(me: Worker) -> None:
    """Take note that a snapshot is being read.

    Raises:
        Leaving: this rank was asked to leave.
    """
    me.heartbeat.beat()
    if _leaves_untrained(me):
        raise Leaving


def _leaves_untrained(me: Worker) -> bool:
    return me.vote.leave_wanted and me.vote.may_leave_untrained


def record(me: Worker, catalog: Catalog) -> None:
    """Leave word beside the snapshots that the run has ended, for launches on other machines; rank 0."""
    if me.rank == 0 and me.stopped is not None and me.stopped.is_end:
        catalog.write_stop({"step": me.progress.number, **me.stopped._asdict()})


def recall(me: Worker, catalog: Catalog, step: int) -> None:
    """Have a run that stopped after *step* stop again before the next one; rank 0."""
    found = catalog.read_stop() if me.rank == 0 else None
    if found is not None and found["step"] == step:  # else its last snapshot is damaged: it goes on before it
        me.vote.stop_wanted = found["reason"]
