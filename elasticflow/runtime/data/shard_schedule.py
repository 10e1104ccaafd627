"""The schedule of data shards of unknown lengths: it says which samples of each shard make up a step.

One rule makes an epoch's order: the next sample comes from the shard that has given the fewest samples; among equals, from
the shard with the lowest number. So a position is the number of samples that each shard has given, its cursor. The steps
after a position depend neither on the world size nor on the batches that led to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from elasticflow.errors import DatasetError
from elasticflow.runtime.data.order.order import VERSION
from elasticflow.runtime.process.position import Position, even_split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.runtime.data.order.order import OrderRecord


class Supply(Protocol):
    """The samples of all data shards in the epoch that is being read."""

    def look(self, wanted: Sequence[int]) -> list[int]:
        """Return how many samples each shard still has, counted up to *wanted*. Collective: every rank."""

    def take(self, counts: Sequence[int]) -> None:
        """Make the next *counts* samples of the shards the step's."""

    def turn(self) -> None:
        """Begin the next epoch; all shards have given all they have."""


class ShardSchedule:
    """The end of a run over data shards, and the samples of each step.

    Every step has the global batch's samples, but for the last one of the run; of each epoch with tail = "short". A
    shard that would keep a single sample gives it too, since BatchNorm refuses single ones: the step is larger then.

    A virtual shard takes its part of a batch from its own data shards only, and nothing once they are used up: batches
    get smaller before an epoch ends.

    Args:
        epochs: Passes over the data; or
        steps: Optimizer steps.
        tail: Treatment of samples at an epoch's end that fill no batch: "spill" or "short".
        virtual_shards: Virtual shards per batch, with exact consistency; a divisor of *shards*.
    """

    def __init__(
        self,
        shards: int,
        global_batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        tail: str = "spill",
        virtual_shards: int | None = None,
    ) -> None:
        if tail not in ("spill", "short"):
            raise ValueError(f'tail = "{tail}": must be spill or short')
        if virtual_shards is not None and shards % virtual_shards:
            raise ValueError(f"{virtual_shards} virtual shards cannot share {shards} data shards evenly")
        self.shards, self.global_batch_size, self.epochs = shards, global_batch_size, epochs
        self.samples: int | None = None  # no one knows
        self._steps, self._tail = steps, tail
        parts = virtual_shards or 1
        self._groups = [range(*even_split(shards, parts, part)) for part in range(parts)]
        self._sizes = [
            high - low for low, high in (even_split(global_batch_size, parts, p) for p in range(parts))
        ]
        self.start = Position(0, 0, 0, 0, is_epoch_end=False, cursors=(0,) * shards)

    @property
    def order_record(self) -> OrderRecord:
        """Identity of its order of samples."""
        return VERSION

    def is_end(self, position: Position) -> bool:
        """True if no step is left after *position*."""
        if self._steps is not None:
            return position.step >= self._steps
        assert self.epochs is not None
        return position.epoch >= self.epochs

    def remaining(self, position: Position) -> int | None:
        """Return the number of steps left after *position*; None if it is unknown until more is read."""
        if self._steps is not None:
            return max(0, self._steps - position.step)
        return 0 if self.is_end(position) else None

    def wanted(self, position: Position, live: Sequence[bool]) -> list[int]:
        """Return how many samples each *live* shard must have for the next step to take no look at any.

        Two more than the step takes: one more shows that the shard continues, and a single one would be taken along.
        """
        shares = self._shares(self._sizes, position.cursors, live)
        return [share + 2 if goes_on else 0 for share, goes_on in zip(shares, live, strict=True)]

    def next(self, position: Position, live: list[bool], supply: Supply, *, is_plenty: bool) -> Position:
        """Return the position after the step that follows *position*, and have *supply* take the step's samples.

        Args:
            live: Which shards continue, as far as is known; those that end in this step are struck out.
            is_plenty: All shards have what `wanted` says.

        Raises:
            DatasetError: an epoch has no samples. On every rank.
        """
        missing, cursors, epoch = list(self._sizes), list(position.cursors), position.epoch
        while True:
            single = [False] * self.shards  # one sample is left
            while self._can_take(missing, live):
                counts = self._shares(missing, cursors, live)
                if not is_plenty:
                    available = supply.look([n + 2 if on else 0 for n, on in zip(counts, live, strict=True)])
                    live[:] = [has > n for has, n in zip(available, counts, strict=True)]
                    single = [has == n + 1 for has, n in zip(available, counts, strict=True)]
                    counts = [min(pair) for pair in zip(available, counts, strict=True)]
                self._take(counts, missing, cursors, supply)
            if any(single):
                self._take([int(one) for one in single], missing, cursors, supply)
                live[:] = [on and not one for on, one in zip(live, single, strict=True)]
            count = sum(self._sizes) - sum(missing)
            if any(live):
                break
            if not any(cursors):
                raise DatasetError(f"none of the {self.shards} data shards has a sample in epoch {epoch + 1}")
            epoch, cursors = epoch + 1, [0] * self.shards
            live[:] = [True] * self.shards
            supply.turn()
            if epoch == self.epochs or (count and self._tail == "short"):
                break
        return Position(
            step=position.step + 1,
            offset=position.offset + count,
            epoch=epoch,
            samples=position.samples + count,
            is_epoch_end=epoch > position.epoch,
            cursors=tuple(cursors),
        )

    def _can_take(self, missing: Sequence[int], live: Sequence[bool]) -> bool:
        return any(
            left > 0 and any(live[shard] for shard in group)
            for left, group in zip(missing, self._groups, strict=True)
        )

    def _take(self, counts: list[int], missing: list[int], cursors: list[int], supply: Supply) -> None:
        supply.take(counts)
        for number, group in enumerate(self._groups):
            for shard in group:
                cursors[shard] += counts[shard]
                missing[number] -= counts[shard]

    def _shares(self, sizes: Sequence[int], cursors: Sequence[int], live: Sequence[bool]) -> list[int]:
        counts = [0] * self.shards
        for size, group in zip(sizes, self._groups, strict=True):
            members = [shard for shard in group if live[shard]]
            for shard, share in zip(members, shares(size, [cursors[m] for m in members]), strict=True):
                counts[shard] = share
        return counts


def shares(count: int, cursors: Sequence[int]) -> list[int]:
    """Return how many of the next *count* samples are each shard's, where the one with the lowest cursor is next."""
    if count <= 0 or not cursors:
        return [0] * len(cursors)
    ascending = sorted(cursors)
    level, lowest = ascending[0], len(cursors)
    for number, cursor in enumerate(ascending):
        if (cursor - level) * number > count:  # not enough to raise all before it that far
            lowest = number
            break
        count -= (cursor - level) * number
        level = cursor
    more, rest = divmod(count, lowest)
    level += more
    counts = []
    for cursor in cursors:
        extra = cursor <= level and rest > 0
        rest -= extra
        counts.append(max(0, level - cursor) + extra)
    return counts
