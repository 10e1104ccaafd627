"""The position of training, and the schedule of its beginning and end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping


class Position(NamedTuple):
    """Position of training after a number of finished steps.

    Attributes:
        step: Finished optimizer steps.
        offset: Index in the endless stream of samples, of which `tail = "drop"` skips some.
        epoch: Finished passes over the dataset.
        is_epoch_end: The last step reached or crossed the end of an epoch.
        cursors: Samples that each data shard has given in this epoch; see `runtime/data/shard_schedule.py`. Empty for a
            map-style dataset.
        stage: Beginning of the current stage of a loop in the script itself: the stage's number from 0, then its first step,
            offset, epoch and samples. Empty in the first stage; see `runtime/loop/loop_schedule.py`.
    """

    step: int
    offset: int
    epoch: int
    samples: int
    is_epoch_end: bool
    cursors: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()

    @property
    def in_epoch(self) -> int:
        """Number of the last step's epoch, from 1; a step that crossed an epoch's end counts to the epoch that it ended."""
        return self.epoch + (not self.is_epoch_end)


class Schedule(Protocol):
    """The beginning and end of a run: the `Schedule` of data read by index, in `runtime/data/index_schedule.py`, or of data shards."""

    @property
    def start(self) -> Position:
        """Position before the first step."""

    @property
    def samples(self) -> int | None:
        """Length of the dataset; None if unknown."""

    @property
    def global_batch_size(self) -> int:
        """Samples per step."""

    @property
    def order_record(self) -> int | Mapping[str, Any]:
        """Identity of the order of samples: in another order, a position means other samples."""

    def is_end(self, position: Position) -> bool:
        """True if no step is left after *position*."""

    def remaining(self, position: Position) -> int | None:
        """Return the number of steps left after *position*; None if unknown."""


def even_split(count: int, parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range of part *index* if *count* items are cut into *parts* even, contiguous parts."""
    return index * count // parts, (index + 1) * count // parts
