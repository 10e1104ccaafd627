"""Steps of a loop of the script's own: what snapshots ask of who makes them, and those that add up virtual shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.runtime.own_loop.batch import Batch
from elasticflow.runtime.training.exact import ExactStep

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position


class ScriptStep:
    """What `Snapshots` asks of who makes the steps."""

    was_skipped = False

    def __init__(self, *, is_exact: bool) -> None:
        self.is_exact = is_exact


class ScriptExactStep:
    """Exact steps of a function that takes one shard at a time."""

    def __init__(self, worker: Worker, model: Any, virtual_shards: int) -> None:
        self._fn: Callable[[Batch], Any] | None = None
        self._end: Position | None = None
        self._step = ExactStep(
            worker, model, self._shard, precision="fp32", on_nonfinite="stop", virtual_shards=virtual_shards
        )

    def forward_backward(self, fn: Callable[[Batch], Any], part: OwnPart) -> float:
        """Leave the gradients of a global batch, of which *fn* is told shard by shard; return its mean loss. Collective."""
        self._fn, self._end = fn, part.end
        try:
            return self._step.forward_backward(part)
        finally:
            self._fn = None

    def _shard(self, model: Any, data: Any) -> Any:
        del model
        assert self._fn is not None
        assert self._end is not None
        return self._fn(Batch(0, 0, 1.0, self._end, 0, data))
