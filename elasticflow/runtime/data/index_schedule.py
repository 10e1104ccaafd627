"""The schedule of samples: it says which samples make up a step, at any world size.

The stream of samples is endless: place p of it is sample `permutation[n, seed, p // n](p % n)`, unless the job declares
another order (`runtime/data/order/`). A position is a number of samples, so a run can continue at another world size or another
batch size, and finding the samples of any step costs the same as finding those of the next one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.errors import DatasetError
from elasticflow.runtime.data.order.order import ShuffledOrder
from elasticflow.runtime.process.position import Position

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from elasticflow.runtime.data.order.order import Order, OrderRecord


class IndexSchedule:
    """Every step of a run, computed when asked for.

    Args:
        samples: Samples of an epoch: the length of the dataset, or of *order*.
        global_batch_size: Samples per step, the same at every world size.
        epochs: Passes over the dataset; or
        steps: Optimizer steps.
        tail: Treatment of samples at an epoch's end that fill no batch: "spill" (the batch continues in the
            next epoch), "short" (a smaller batch) or "drop" (not trained on in that epoch).
        order: Which sample stands at which place; None: each once per epoch, shuffled.

    Raises:
        DatasetError: nothing would ever be trained.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        tail: str = "spill",
        seed: int = 0,
        order: Order | None = None,
    ) -> None:
        if tail == "drop" and samples < global_batch_size:
            raise DatasetError(
                f'the dataset has {samples} samples, fewer than a global batch of {global_batch_size}, and tail = "drop" drops them all',
                'use smaller global batches, or tail = "short"',
            )
        self.samples, self.global_batch_size = samples, global_batch_size
        self.order: Order = order or ShuffledOrder(samples, seed)
        self.tail, self._epochs, self._steps = tail, epochs, steps
        self.start = Position(0, 0, 0, 0, is_epoch_end=False)

    @property
    def order_record(self) -> OrderRecord:
        """Identity of its order of samples."""
        return self.order.record

    def is_end(self, position: Position) -> bool:
        """True if no step is left after *position*."""
        return self.remaining(position) == 0

    def remaining(self, position: Position) -> int:
        """Return the number of steps left after *position*."""
        if self._steps is not None:
            return max(0, self._steps - position.step)
        assert self._epochs is not None
        n, size = self.samples, self.global_batch_size
        if position.offset >= self._epochs * n:
            return 0
        if self.tail == "spill":
            return -(-(self._epochs * n - position.offset) // size)

        def steps_of(samples: int) -> int:
            return samples // size if self.tail == "drop" else -(-samples // size)

        later = self._epochs - position.offset // n - 1
        return steps_of(n - position.offset % n) + later * steps_of(n)

    def batch(self, position: Position) -> tuple[int, int, Position]:
        """Return the next step: offset of its first sample, number of its samples, position after it."""
        n, size, offset = self.samples, self.global_batch_size, position.offset
        left = n - offset % n
        if self.tail == "spill":
            count = size if self._epochs is None else min(size, self._epochs * n - offset)
            after = offset + count
        elif self.tail == "short":
            count = min(size, left)
            after = offset + count
        else:
            if left < size:  # the batch size grew since the snapshot
                offset, left = offset + left, n
            count = size
            after = offset + (left if left - size < size else size)
        end = Position(
            step=position.step + 1,
            offset=after,
            epoch=after // n,
            samples=position.samples + count,
            is_epoch_end=after // n > position.offset // n,
        )
        return offset, count, end

    def indices(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at ascending places of the stream."""
        return self.order.indices(offsets)
