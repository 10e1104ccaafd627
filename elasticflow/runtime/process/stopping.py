"""Requests to take no further step, and what all ranks make of them.

StopTraining, raised by the job's own code on one rank, ends training on all of them. That rank continues taking part, with
zeros, until all ranks have agreed: in the vote of the step in which it was raised or of the next one, or at the end of
the evaluation. The step whose vote says so is not applied. A rank that was asked to leave while it waits for data, or
evaluates, requests the same, and training resumes from there in the next generation.

Nothing here needs a `Worker`; what does is in `leaving`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.errors import StopTraining
from elasticflow.runtime.process.votes import LEAVE

if TYPE_CHECKING:
    from types import TracebackType

    from elasticflow.runtime.process.votes import Vote

# Characters.
_LONGEST_REASON = 1000
# Beginning of a ballot: the job's own code, or the job file, ends training.
_OWN, _RULE = "!", "="


class Stopped(NamedTuple):
    """All ranks take no further step.

    Attributes:
        reason: Why training has ended; None: it has not, a rank was asked to leave.
        by_rank: The first rank that requested it; None: all ranks, since the job file says so (`train.stop_when`).
    """

    reason: str | None
    by_rank: int | None

    @property
    def is_end(self) -> bool:
        """True if training has ended."""
        return self.reason is not None


class Leaving(Exception):  # noqa: N818  # nothing failed
    """Raised where a rank waits, once it was asked to leave."""


class Stoppable:
    """`with` this, StopTraining cuts the block short and becomes this rank's request."""

    def __init__(self, vote: Vote) -> None:
        self._vote = vote

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, StopTraining):
            return False
        request_stop(self._vote, error)
        return True


def request_stop(vote: Vote, stop: StopTraining) -> None:
    """Have this rank request the end of training; the first reason that it was given counts."""
    if vote.stop_wanted is None:
        # Raised in a loader process, it comes with the traceback there as its text.
        reason = str(stop).rpartition("StopTraining: ")[2].strip()[:_LONGEST_REASON] or "no reason given"
        vote.stop_wanted = reason.encode("utf-8", "backslashreplace").decode()  # it travels between ranks


def ballot(vote: Vote) -> str:
    """Return this rank's text for `decide`; empty if it wants to continue."""
    if vote.stop_wanted is None:
        return ""
    return f"{_RULE if vote.stop_is_by_rule else _OWN}{vote.stop_wanted}"


def decide(ballots: list[str]) -> Stopped | None:
    """Return why no further step is taken, if any rank requested that; *ballots* are all ranks', by rank."""
    leaving = None
    for rank, text in enumerate(ballots):
        if text not in ("", f"{_OWN}{LEAVE}"):
            return Stopped(text[1:], None if text[0] == _RULE else rank)
        if text and leaving is None:
            leaving = Stopped(None, rank)
    return leaving
