"""What ends training between two votes: StopTraining, or a wish to leave where data is awaited.

What the job's own code raises on one rank ends training on all of them. That rank goes on taking part, with noughts,
until all have agreed: in the vote of the step in which it was raised or of the next one, or at the end of the
evaluation. The step whose vote says so is not applied. A rank that was asked to leave while it waits for data, or
evaluates, does the same, and training goes on from there in the next generation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow import StopTraining
from elasticflow.runtime.process.votes import LEAVE

if TYPE_CHECKING:
    from types import TracebackType

    from elasticflow.runtime.process.votes import Vote

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


def ballot(vote: Vote) -> str:
    """Return what this rank tells all others for `agreed`; empty if it wants to go on."""
    return "" if vote.stop_wanted is None else f"!{vote.stop_wanted}"


def agreed(ballots: list[str]) -> Stopped | None:
    """Return why no further step is taken if any rank wants that; *ballots* are all ranks'."""
    left = None
    for rank, text in enumerate(ballots):
        if text not in ("", f"!{LEAVE}"):
            return Stopped(text[1:], rank)
        if text and left is None:
            left = Stopped(None, rank)
    return left
