"""The schedule of a loop that the script writes: stages in sequence, each an `IndexSchedule` or nothing but counts.

A script may train on one dataset and then on another. Each is a stage: its steps, samples and epochs count from where the
one before ended, and positions count all stages together. `Position.stage` says where the current stage began, so that
a position means the same samples after a restart.
"""

from __future__ import annotations

from hashlib import blake2b
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
        steps: The current stage's own schedule, which counts from the stage's beginning; None: the script reads its data.
        epochs: Epochs of the current stage where the script reads its data inside `Run.epochs`; None: unknown.
        has_ended: The script says that its loop is over.
        has_more: The script came to a loop of a later stage, which it does not begin: the run was asked to exit.
    """

    def __init__(self) -> None:
        self.steps: IndexSchedule | ShardSchedule | None = None
        self.epochs: int | None = None
        self.has_ended = self.has_more = False

    @property
    def start(self) -> Position:
        """Position before the first step."""
        return Position(0, 0, 0, 0, is_epoch_end=False) if self.steps is None else self.steps.start

    @property
    def samples(self) -> int | None:
        """Length of the dataset; None if unknown."""
        return None if self.steps is None else self.steps.samples

    @property
    def global_batch_size(self) -> int:
        """Samples per step; 0: the script knows."""
        return 0 if self.steps is None else self.steps.global_batch_size

    @property
    def order_record(self) -> int | Mapping[str, Any]:
        """Identifies the order of the samples among all orders."""
        return _OWN_ORDER if self.steps is None else self.steps.order_record

    def is_end(self, position: Position) -> bool:
        """True if no step of the current stage is left after *position*, and no later stage is known."""
        if self.has_more:
            return False
        if self.has_ended:
            return True
        if self.steps is not None:
            return self.steps.is_end(within(position))
        return self.epochs is not None and within(position).epoch >= self.epochs

    def remaining(self, position: Position) -> int | None:
        """Return the number of steps left in the current stage after *position*; None if unknown."""
        return None if self.steps is None else self.steps.remaining(within(position))


def stage_of(position: Position) -> int:
    """Return the number of the stage that *position* is in, from 0."""
    return position.stage[0] if position.stage else 0


def next_stage(position: Position, number: int) -> Position:
    """Return the beginning of stage *number*, where *position* is after the last step of the stage before."""
    began = (number, position.step, position.offset, position.epoch, position.samples)
    return position._replace(stage=began, cursors=(), is_epoch_end=False)


def within(position: Position) -> Position:
    """Return *position* counted from the beginning of its stage."""
    return _shifted(position, position.stage, -1)._replace(stage=()) if position.stage else position


def overall(local: Position, stage: tuple[int, ...]) -> Position:
    """Return the position over all stages of *local*, which counts from the beginning of *stage*."""
    return _shifted(local, stage, 1)._replace(stage=stage) if stage else local


def _shifted(position: Position, stage: tuple[int, ...], sign: int) -> Position:
    names = ("step", "offset", "epoch", "samples")
    return position._replace(**{
        name: getattr(position, name) + sign * before for name, before in zip(names, stage[1:], strict=True)
    })  # fmt: skip


def stage_seed(seed: int, stage: int) -> int:
    """Return the seed of a stage's order and draws: the run's in the first stage, another in each later one."""
    if stage == 0:
        return seed
    digest = blake2b(f"{seed} stage {stage}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little")


def after_own_step(position: Position, samples: int) -> Position:
    """Return where training stands after a step of *samples* samples that the script has read itself."""
    return position._replace(
        step=position.step + 1,
        offset=position.offset + samples,
        samples=position.samples + samples,
        is_epoch_end=False,
    )


def after_own_epoch(position: Position) -> Position:
    """Return where training stands after an epoch of data that the script has read itself."""
    return position._replace(epoch=position.epoch + 1, is_epoch_end=True)
