"""Decisions that all ranks learn together at each step: to exit, to stop, to act by the clock, to follow a change on some rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Asked = Literal["snapshot", "evaluation", "memory", "buffers", "random"]
"""A request that a callback decides at each step; see `Vote.when`."""
# In the order of `Vote.requests`.
_DECIDED = ("leave", "stop", "snapshot", "evaluation", "memory", "count", "buffers", "random", "names", "end")

LEAVE = ""
"""Value of `Vote.stop_wanted`: this rank was asked to exit while it waited for data; it does not end training."""


class Vote:
    """One rank's requests and the decisions of all ranks; the step object exchanges them once per step.

    Attributes:
        leave_wanted: This rank was asked to exit; set by the signal handler alone.
        stop_wanted: Reason for which this rank wants no further step: the job's own reason to end training, or `LEAVE`; see
            `stopping`.
        stop_known: Such a reason of any rank, if the ranks have exchanged it ahead of the vote.
        stop_is_by_rule: The reason comes from the job file's `train.stop_when`.
        count_wanted: One of this rank's data shards may end in the next step; see `runtime/data/shard_loader.py`.
        end_wanted: This rank's script wants training to end: `Run.stop`.
        names_wanted: This rank's step returned a scalar that has no place yet; see `runtime/training/scalars.py`.
        may_skip: This rank can take part in a step without its data.
        may_cut_short: A request to exit cuts an evaluation short; if false, it waits for the evaluation's end.
        may_leave_untrained: This rank may exit before the first step, since the store has its whole state; false if a newer state
            may be held in memory.
        leave: All ranks exit after this step.
        stop: All ranks exit, or end training, before this step, which is not applied.
        snapshot: All ranks take a snapshot after this step, due by the clock.
        evaluation: All ranks evaluate after this step, due by the clock.
        memory: All ranks hold their state in memory after this step, due by the clock.
        count: All ranks compare the remaining samples of their data shards before the next step.
        buffers: All ranks take over rank 0's buffers before the next step.
        random: All ranks seed python's and numpy's generators from the next step on.
        names: All ranks agree on the places of scalars after this step.
        end: Some rank's script wants training to end; `Run` decides after which step.
        part: This rank's part of the current step's samples, as far as it has read them; None: all ranks have the same.
        end_own_part: Called when this rank is about to exchange something with the others; see `measuring/own_time.py`.
    """

    def __init__(self) -> None:
        self.leave_wanted = False
        self.stop_wanted: str | None = None
        self.stop_known: str | None = None
        self.stop_is_by_rule = False
        self.may_skip = self.may_cut_short = self.may_leave_untrained = True
        self.count_wanted = False
        self._asked: dict[Asked, Callable[[], int]] = dict.fromkeys(get_args(Asked), bool)
        self.names_wanted = self.end_wanted = False
        self.leave = self.stop = self.snapshot = self.evaluation = self.memory = self.count = False
        self.buffers = self.random = self.names = self.end = False
        self.part: float | None = None
        self.end_own_part: Callable[[], None] = lambda: None

    def when(self, request: Asked, is_wanted: Callable[[], int]) -> None:
        """Have *is_wanted* decide once per step if this rank makes the *request*; replaces an earlier callback.

        Its result is True or False, where the request of one rank suffices. Where all ranks have to make it, a rank that does
        not returns minus their number, which outweighs all others: some steps learn the sum, and some the mean.

        `snapshot` and `evaluation` are due by rank 0's clock, `memory` by its clock or by those of all ranks; `buffers`: this step changed buffers that the next
        step reads (`training/model_buffers.py`); `random`: the model or the optimizer draws from python's or numpy's generator.
        """
        self._asked[request] = is_wanted

    def requests(self) -> tuple[float, ...]:
        """Return this rank's current requests and its changes in this step, to be exchanged now; 1 or 0, but see `when`."""
        self.end_own_part()
        return (
            self.leave_wanted,
            self.stop_wanted is not None,
            self._asked["snapshot"](),
            self._asked["evaluation"](),
            self._asked["memory"](),
            self.count_wanted,
            self._asked["buffers"](),
            self._asked["random"](),
            self.names_wanted,
            self.end_wanted,
        )

    def resolve(self, sums: Sequence[float]) -> None:
        """Take over the requests of all ranks; *sums* has the sum or the mean over all ranks for each entry of `requests`."""
        for name, total in zip(_DECIDED, sums, strict=True):
            setattr(self, name, total > 0)


NUM_REQUESTS = len(Vote().requests())
"""Number of entries of `Vote.requests`."""
