"""Facts that all ranks learn together at each step: to exit, to stop, actions due by the clock, changes on some rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Asked = Literal["snapshot", "evaluation", "memory", "buffers", "random"]
"""A request that somebody else decides on, whenever it is asked for."""
LEAVE = ""
"""As `Vote.stop_wanted`: this rank was asked to leave while it waited for data, and no rank ends training."""


class Vote:
    """One rank's requests and what all ranks resolved; the step object carries them once per step.

    Attributes:
        leave_wanted: Set by the signal handler, and by nothing else.
        stop_wanted: Why this rank wants no further step: the reason of the job's own code to end training, or `LEAVE`;
            see `stopping`.
        stop_is_by_rule: The reason is that of the job file: `train.stop_when`.
        count_wanted: One of this rank's data shards may end in the next step; see `runtime/data/shard_loader.py`.
        end_wanted: This rank's script wants training to end: `Run.stop`.
        names_wanted: This rank's step returned a scalar that has no place yet; see `runtime/measuring/scalars.py`.
        may_skip: This rank can take part in a step without its data.
        may_cut_short: A request to leave cuts an evaluation short; else it waits for the evaluation's end.
        may_leave_untrained: Before the first step all there is lies on the store; with a memory tier it may not.
        leave: All ranks leave after this step.
        stop: All ranks leave, or end training, before this step: it is not applied.
        snapshot: All ranks take a snapshot after this step, because of the time.
        evaluation: All ranks evaluate after this step, because of the time.
        memory: All ranks hold their state in memory after this step, because of the time.
        count: All ranks compare what their data shards still have before the next step.
        buffers: All ranks take over rank 0's buffers before the next step.
        random: All ranks seed python's and numpy's generator from the next step on.
        names: All ranks agree on the places of scalars after this step.
        end: Some rank's script wants training to end; `Run` decides after which step.
    """

    def __init__(self) -> None:
        self.leave_wanted = False
        self.stop_wanted: str | None = None
        self.stop_is_by_rule = False
        self.may_skip = self.may_cut_short = self.may_leave_untrained = True
        self.count_wanted = False
        self._asked: dict[Asked, Callable[[], bool]] = dict.fromkeys(get_args(Asked), bool)
        self.names_wanted = self.end_wanted = False
        self.leave = self.stop = self.snapshot = self.evaluation = self.memory = self.count = False
        self.buffers = self.random = self.names = self.end = False

    def when(self, request: Asked, is_wanted: Callable[[], bool]) -> None:
        """Have *is_wanted* say once per step whether this rank makes the *request*: another one is forgotten.

        `snapshot`, `evaluation` and `memory` are due by rank 0's clock; `buffers`: this step changed buffers that the next one
        reads (`training/model_buffers.py`); `random`: the model or the optimizer draws from python's or numpy's generator.
        """
        self._asked[request] = is_wanted

    def requests(self) -> tuple[float, ...]:
        """Return what this rank wants now, and what it changed in this step, 1 or 0 each."""
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
        """Take over what some rank requested: *sums* are those of all ranks' `requests`."""
        (
            self.leave,
            self.stop,
            self.snapshot,
            self.evaluation,
            self.memory,
            self.count,
            self.buffers,
            self.random,
            self.names,
            self.end,
        ) = [total > 0 for total in sums]


NUM_REQUESTS = len(Vote().requests())
"""How many numbers `Vote.requests` gives."""
