"""Options of `Run.gradients`, the steps that compute the gradients of the global batch, and the gradients that nothing exchanges."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel

from elasticflow.errors import StateError
from elasticflow.runtime.loop.batch import Batch
from elasticflow.runtime.loop.kept import bare
from elasticflow.runtime.process.reachable import living
from elasticflow.runtime.process.sharded_tensors import is_over_all_ranks, is_sharded
from elasticflow.runtime.training import several_optimizers
from elasticflow.runtime.training.ddp import DDPStep
from elasticflow.runtime.training.exact import ExactStep
from elasticflow.runtime.training.exact_norm import use_exact_norm
from elasticflow.runtime.training.manual_step import ManualStep
from elasticflow.runtime.training.precision import AUTOCAST
from elasticflow.runtime.training.several_optimizers import parameters_of
from elasticflow.runtime.training.shard_model import require_elementwise
from elasticflow.runtime.training.sharded_step import ShardedStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from collections.abc import Set as AbstractSet

    from torch import nn
    from torch.optim import Optimizer

    from elasticflow.runtime.data.index_loader import Batch as OwnPart
    from elasticflow.runtime.process.context import Worker
    from elasticflow.runtime.process.position import Position
    from elasticflow.runtime.state.state import State


@dataclass(frozen=True)
class Gradients:
    """Options of `Run.gradients`, which computes the gradients of the global batch.

    Attributes:
        precision: Precision of the forward pass: "fp32", "bf16" or "fp16"; for "fp16" pass a GradScaler to `Run.keep`.
        on_nonfinite: "stop" at a loss that is not finite, or "skip" the step.
        virtual_shards: Number of parts of each batch whose gradients are added up in a fixed order, so that the bits are the same
            at any number of workers up to this number. None: DistributedDataParallel adds up the ranks' gradients.
        ddp: Options of DistributedDataParallel, and sync_batchnorm.
        moves_optimizers: The function given to `Run.gradients` steps each optimizer itself, once. It is called with all samples
            of a rank. Before an optimizer steps, the gradients of its parameters become those of the global batch.
        clip_grad_norm: Largest norm of an optimizer's gradients, with *moves_optimizers*.
        logs_grad_norm: A step's log line shows the gradient norm of each optimizer, with *moves_optimizers*.

    Raises:
        StateError: a value is unknown, or two options exclude each other.
    """

    precision: str = "fp32"
    on_nonfinite: str = "stop"
    virtual_shards: int | None = None
    ddp: Mapping[str, Any] = field(default_factory=dict)
    moves_optimizers: bool = False
    clip_grad_norm: float | None = None
    logs_grad_norm: bool = True

    def __post_init__(self) -> None:
        """Refuse what a step would ignore."""
        for name, words in (("precision", ("fp32", *AUTOCAST)), ("on_nonfinite", ("stop", "skip"))):
            if (value := getattr(self, name)) not in words:
                raise StateError(
                    f"elasticflow.Gradients({name}={value!r}): must be one of {', '.join(words)}"
                )
        shards = self.virtual_shards
        if shards is not None and (type(shards) is not int or shards < 1):
            raise StateError(f"virtual_shards={shards!r}: must be a whole number from 1")
        if shards is not None and self.moves_optimizers:
            raise StateError(
                "elasticflow.Gradients(moves_optimizers=True) was given virtual shards, and the bits of a step that moves its "
                "optimizers depend on the number of workers",
                "leave virtual_shards out",
            )
        if self.moves_optimizers and self.precision != "fp32":
            raise StateError(
                f"elasticflow.Gradients(moves_optimizers=True, precision={self.precision!r}): the function makes the forwards itself",
                "leave precision out, and use torch.autocast in the function",
            )
        if self.moves_optimizers and self.on_nonfinite == "skip":
            raise StateError(
                'elasticflow.Gradients(moves_optimizers=True, on_nonfinite="skip"): an optimizer may have moved by then',
                "leave on_nonfinite out: gradients that are not finite end the run",
            )
        if self.clip_grad_norm is not None and not self.moves_optimizers:
            raise StateError(
                f"elasticflow.Gradients(clip_grad_norm={self.clip_grad_norm!r}) is for moves_optimizers=True, and would clip nothing",
                "call torch.nn.utils.clip_grad_norm_ between run.gradients and optimizer.step()",
            )


class LoopStep:
    """Computes the gradients of a loop's steps for `Run.gradients`; a loop that exchanges gradients itself has a `LoopStep`, too.

    Args:
        how: Options of the gradients. None: the script exchanges gradients itself.
        virtual_shards: Parts of a batch as `Run.batches` cuts it for workers that share a model.
    """

    def __init__(
        self,
        worker: Worker,
        how: Gradients | None,
        parts: Mapping[str, Any],
        virtual_shards: int | None = None,
    ) -> None:
        self._fn: Callable[[Batch], Any] | None = None
        self._end: Position | None = None
        self._make = partial(self._made, worker, how, parts)
        self._step = self._make(virtual_shards)
        self.is_exact = self._step is not None and self._step.is_exact

    @property
    def was_skipped(self) -> bool:
        """True if the last step was skipped because its loss was not finite."""
        return self._step is not None and self._step.was_skipped

    @property
    def adds_up(self) -> bool:
        """True if gradients of several batches add up until an optimizer uses them; a step that moves optimizers uses its own."""
        # A step that shares the model is made at its first batch.
        return not isinstance(self._step, ManualStep)

    def forward_backward(
        self, fn: Callable[[Batch], Any], part: OwnPart, virtual_shards: int | None = None
    ) -> float:
        """Compute the gradients of a global batch by calls of *fn* for its parts; return the mean loss. Collective: every rank.

        Args:
            virtual_shards: Parts of the batch as `Run.batches` has cut it.

        Raises:
            StateError: workers share the model, and a batch of an earlier stage had another number of parts.
        """
        if self._step is None:  # only now the number of parts is known
            self._step = self._make(virtual_shards)
        assert self._step is not None
        if isinstance(self._step, ShardedStep) and self._step.virtual_shards != virtual_shards:
            raise StateError(
                f"batches of this stage have {virtual_shards} parts, and those of an earlier one had {self._step.virtual_shards}: "
                "workers that share a model add up as many in each stage",
                "give run.batches the same size and micro_batch_size in each stage, or elasticflow.join virtual_shards",
            )
        self._fn, self._end = fn, part.end
        try:
            if isinstance(self._step, ManualStep):
                return self._step.run(part)
            return self._step.forward_backward(part)
        finally:
            self._fn = None

    def _made(
        self, worker: Worker, how: Gradients | None, parts: Mapping[str, Any], virtual_shards: int | None
    ) -> DDPStep | ExactStep | ShardedStep | ManualStep | None:
        """Return what makes the steps; None: the script itself does, or their parts are not known before its batches are."""
        if how is None:
            return None
        model = parts["model"]
        if how.moves_optimizers:
            return ManualStep(
                worker, model, self._of_part, parts["optimizers"],
                clip_grad_norm=how.clip_grad_norm, logs_grad_norm=how.logs_grad_norm,
            )  # fmt: skip
        if worker.sharding is not None or worker.world_size > 1:
            optimizers = several_optimizers.optimizers(parts.get("optimizers") or parts.get("optimizer"))
            _require_of_model(model, optimizers)
            if worker.sharding is not None:
                require_elementwise(optimizers.items())
                use_exact_norm()
        common: dict[str, Any] = {
            "precision": how.precision,
            "on_nonfinite": how.on_nonfinite,
            "scaler": parts.get("scaler") if how.precision == "fp16" else None,
        }
        if worker.layout.is_cut:
            shards, is_exact = how.virtual_shards or virtual_shards, how.virtual_shards is not None
            if shards is None:
                return None
            return ShardedStep(
                worker, model, self._of_part, virtual_shards=shards, is_exact=is_exact, **common
            )
        if how.virtual_shards is not None:
            return ExactStep(worker, model, self._of_part, virtual_shards=how.virtual_shards, **common)
        return DDPStep(worker, model, self._of_part, ddp=how.ddp, **common)

    def _of_part(self, model: Any, data: Any, made: Any = None) -> Any:
        del model, made  # the script's function has them
        assert self._fn is not None
        assert self._end is not None
        return self._fn(Batch(0, 0, 1.0, self._end, 0, data))


def _require_of_model(model: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
    """Make sure that the optimizers move nothing but *model*, and what the script itself has wrapped or sharded.

    Raises:
        StateError: an optimizer moves something whose gradients nothing exchanges; the message names it.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for name, optimizer in optimizers.items():
        others = [p for p in parameters_of([optimizer]) if p.requires_grad and id(p) not in own]
        if others:
            # As slow as `living`, so only now.
            wrapped = {id(p) for wrapper in living(DistributedDataParallel) for p in wrapper.parameters()}
            others = [p for p in others if id(p) not in wrapped and not is_sharded(p)]
        if others:
            raise StateError(
                f"{name} moves a parameter of shape {tuple(others[0].shape)} that is not of the kept model (and {len(others) - 1} more), "
                "and run.gradients exchanges the gradients of the model alone",
                "make one module of all that is trained, and keep it as model, such as nn.ModuleDict with a forward of its own",
            )


def not_exchanged(state: State, wrapped: AbstractSet[int], *, is_first: bool) -> str | None:
    """Return the gradients that ranks do not exchange, as a phrase; None: a wrapper of the script's exchanges all.

    Args:
        wrapped: `id` of the parameters that were trained when `Run.wrap` was called.
    """
    trained = {name: p for name, p in state.model.named_parameters() if p.requires_grad}
    if state.is_sharded:
        is_exchanged = all(is_over_all_ranks(p) for p in trained.values())
        return (
            None if is_exchanged or not is_first else "nothing exchanged their gradients between the replicas"
        )
    left_out = [name for name, parameter in trained.items() if id(parameter) not in wrapped]
    if left_out and len(left_out) < len(trained):
        return f"{left_out[0]} was frozen when run.wrap was called, so its gradients are not exchanged"
    wrappers = living(DistributedDataParallel) if left_out else []
    if left_out and not any(bare(each) is state.model or state.model in each.modules() for each in wrappers):
        return "nothing exchanged their gradients"
    frozen = [n for n, p in state.model.named_parameters() if id(p) in wrapped and not p.requires_grad]
    if frozen:
        return (
            f"{frozen[0]} was frozen after run.wrap was called, and DistributedDataParallel exchanges no gradient before it has "
            "that parameter's; run.wrap(model, find_unused_parameters=True) does without, also if the parameter is trained later"
        )
    if not is_first:
        return None  # models that are wrapped have differed after an earlier step of this start, too
    return (
        "their gradients were not exchanged though the model is wrapped: the loop calls the bare model, a layer takes no part in "
        "the loss (run.wrap(model, find_unused_parameters=True)), a forward sets parameters from its rank's own samples (as "
        "ActNorm does; dist.broadcast them after it), an optimizer holds the state of some parameters only on each rank (as Muon "
        "may), or not every rank began with the same parameters"
    )
