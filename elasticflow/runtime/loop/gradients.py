"""The ways in which `Run.gradients` makes the gradients of the global batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.manual_step import ManualStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position


@dataclass(frozen=True)
class Gradients:
    """The way in which `Run.gradients` makes the gradients of the global batch.

    Attributes:
        precision: "fp32", "bf16" or "fp16" forwards; for fp16 `Run.keep` is given a GradScaler.
        on_nonfinite: "stop" at a loss that is not finite, or "skip" the step.
        virtual_shards: Parts of each batch that are added up in a fixed order, so that the bits are the same at any number
            of workers up to this one; None: DistributedDataParallel adds up what each rank has of it.
        ddp: Options of DistributedDataParallel, and sync_batchnorm.
        moves_optimizers: The function given to `Run.gradients` moves the optimizers itself, once each: before one moves, the
            gradients of its parameters become the global batch's. It is called with all samples of a rank.
        clip_grad_norm: Largest norm of the gradients of such an optimizer.
        logs_grad_norm: A step's line says that norm for each such optimizer.
    """

    precision: str = "fp32"
    on_nonfinite: str = "stop"
    virtual_shards: int | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    moves_optimizers: bool = False
    clip_grad_norm: float | None = None
    logs_grad_norm: bool = True


class LoopStep:
    """Makes the steps of a loop, as far as `Run.gradients` does; a loop that exchanges gradients itself has one, too.

    Args:
        worker: This worker.
        how: The way in which gradients are made; None: the script exchanges them.
        parts: The arguments of `State`.

    Attributes:
        is_exact: Steps have the same bits at every world size.
    """

    def __init__(self, worker: Worker, how: Gradients | None, parts: Mapping[str, Any]) -> None:
        self._fn: Callable[[Batch], Any] | None = None
        self._end: Position | None = None
        self._step = None if how is None else self._made(worker, how, parts)
        self.is_exact = self._step is not None and self._step.is_exact

    @property
    def was_skipped(self) -> bool:
        """True if the last step's loss was not finite, and the step is left out."""
        return self._step is not None and self._step.was_skipped

    def forward_backward(self, fn: Callable[[Batch], Any], part: OwnPart) -> float:
        """Leave the gradients of a global batch, of which *fn* is told part by part; return its mean loss. Collective."""
        assert self._step is not None
        self._fn, self._end = fn, part.end
        try:
            if isinstance(self._step, ManualStep):
                return self._step.run(part)
            return self._step.forward_backward(part)
        finally:
            self._fn = None

    def _made(
        self, worker: Worker, how: Gradients, parts: Mapping[str, Any]
    ) -> DDPStep | ExactStep | ManualStep:
        model = parts["model"]
        if how.moves_optimizers:
            return ManualStep(
                worker, model, self._of_part, parts["optimizers"],
                clip_grad_norm=how.clip_grad_norm, logs_grad_norm=how.logs_grad_norm,
            )  # fmt: skip
        common: dict[str, Any] = {
            "precision": how.precision,
            "on_nonfinite": how.on_nonfinite,
            "scaler": parts.get("scaler") if how.precision == "fp16" else None,
        }
        if how.virtual_shards is not None:
            return ExactStep(worker, model, self._of_part, virtual_shards=how.virtual_shards, **common)
        return DDPStep(worker, model, self._of_part, ddp=dict(how.ddp), **common)

    def _of_part(self, model: Any, data: Any, made: Any = None) -> Any:
        del model, made  # the script's function has them
        assert self._fn is not None
        assert self._end is not None
        return self._fn(Batch(0, 0, 1.0, self._end, 0, data))
