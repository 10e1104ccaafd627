"""Where a loop of the script's own begins and ends: the schedule of `Run.batches`, or, of a loader of its own, nothing but counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.runtime.process.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.runtime.data.index_schedule import IndexSchedule
    from elasticflow.runtime.data.shard_schedule import ShardSchedule

_OWN_ORDER = {"kind": "own", "version": 1}


class LoopSchedule:
    """The schedule of a loop, which is not known before the loop begins. A `Schedule` (`runtime/process/position.py`).

    Attributes:
        steps: Of `Run.batches`; None: the script reads its data itself.
        has_ended: The script says that its loop is over.
    """

    def __init__(self) -> None:
        self.steps: IndexSchedule | ShardSchedule | None = None
        self.has_ended = False

    @property
    def start(self) -> Position:
        """Before the first step."""
        return Position(0, 0, 0, 0, is_epoch_end=False) if self.steps is None else self.steps.start

    @property
    def samples(self) -> int | None:
        """Length of the dataset; None if nobody knows."""
        return None if self.steps is None else self.steps.samples

    @property
    def global_batch_size(self) -> int:
        """Samples per step; 0: the script knows."""
        return 0 if self.steps is None else self.steps.global_batch_size

    @property
    def order_record(self) -> int | Mapping[str, Any]:
        """What tells its order of samples from every other one."""
        return _OWN_ORDER if self.steps is None else self.steps.order_record

    def is_end(self, position: Position) -> bool:
        """True if no step is left after *position*."""
        return self.has_ended or (self.steps is not None and self.steps.is_end(position))

    def remaining(self, position: Position) -> int | None:
        """Return how many steps are left after *position*; None if nobody knows."""
        return None if self.steps is None else self.steps.remaining(position)


def after_own_step(position: Position, samples: int) -> Position:
    """Return where training stands after a step of *samples* samples that the script has read itself."""
    return Position(
        position.step + 1, position.offset + samples, 0, position.samples + samples, is_epoch_end=False
    )
