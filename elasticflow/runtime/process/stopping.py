"""Requests to take no further step, and the decision of all ranks.

StopTraining, raised by the job's own code on one rank, ends training on all of them. That rank continues to take part, with
zeros, until all ranks have agreed: in the vote of the same step or of the next step, or at the end of the evaluation. The
step whose vote decides to stop is not applied. A rank that is asked to exit while it waits for data, or evaluates,
requests the same, and training resumes from there in the next generation.
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
        reason: Reason for the end of training; None: training has not ended, but a rank was asked to exit.
        by_rank: The first rank that requested the stop; None: all ranks did, by the job file's rule (`train.stop_when`).
    """

    reason: str | None
    by_rank: int | None

    @property
    def is_end(self) -> bool:
        """True if training has ended."""
        return self.reason is not None


class Leaving(Exception):  # noqa: N818  # nothing failed
    """Raised where a rank waits, once the rank was asked to exit."""


class Stoppable:
    """Context manager that catches StopTraining and makes it this rank's request."""

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
    """Have this rank request the end of training; the reason of the first request counts."""
    if vote.stop_wanted is None:
        # An exception from a loader process has that process's traceback as its text.
        vote.stop_wanted = reason_of(str(stop).rpartition("StopTraining: ")[2])


def reason_of(given: object) -> str:
    """Return the reason that the job's code has *given* for the end of training as a text that ranks can exchange; never empty."""
    text = "" if given is None else str(given).strip()[:_LONGEST_REASON]
    return text.encode("utf-8", "backslashreplace").decode() or "no reason given"


def ballot(vote: Vote) -> str:
    """Return this rank's text for `decide`; empty if it wants to continue."""
    if vote.stop_wanted is None:
        return ""
    return f"{_RULE if vote.stop_is_by_rule else _OWN}{vote.stop_wanted}"


def decide(ballots: list[str]) -> Stopped | None:
    """Return the decision to take no further step, if any rank requested it; *ballots* are the texts of all ranks, by rank."""
    leaving = None
    for rank, text in enumerate(ballots):
        if text not in ("", f"{_OWN}{LEAVE}"):
            return Stopped(text[1:], None if text[0] == _RULE else rank)
        if text and leaving is None:
            leaving = Stopped(None, rank)
    return leaving
