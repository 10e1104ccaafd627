"""The gradients that ranks exchange: those of the models that DistributedDataParallel wraps, or that are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from elasticflow.runtime.loop.kept import bare
from elasticflow.runtime.process.sharded_tensors import is_over_all_ranks
from elasticflow.runtime.snapshot.reachable import living

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from elasticflow.runtime.state.state import State


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


def wrapped_parameters() -> set[int]:
    """Return `id` of the parameters whose gradients DistributedDataParallel exchanges; as slow as `living`."""
    return {id(each) for wrapper in living(DistributedDataParallel) for each in wrapper.parameters()}
