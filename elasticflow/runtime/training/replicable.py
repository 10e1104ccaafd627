"""Checks that every worker can hold a whole replica of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.errors import StateError
from elasticflow.runtime.process.sharded_tensors import is_sharded

if TYPE_CHECKING:
    import torch
    from torch import nn

REMEDY = (
    "leave fully_shard, FSDP, tensor parallelism and device meshes out of model.entry: every worker has a whole replica, "
    "and gradients are exchanged for you; a model that must be sharded is cut by [parallel] of the job file, or by join(shard=...)"
)


def require_whole(model: nn.Module) -> None:
    """Make sure that no parameter of *model* is a piece of a larger one.

    Raises:
        StateError: a parameter is one, by FSDP2 or tensor parallelism; named.
    """
    for name, parameter in model.named_parameters():
        if is_sharded(parameter):
            raise StateError(f"{name} is a DTensor: the model is sharded", REMEDY)


def require_on(model: nn.Module, device: torch.device) -> None:
    """Make sure that all parameters of *model* are on this rank's device.

    Raises:
        StateError: a parameter is elsewhere; named.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise StateError(
                f"{name} is on the meta device, and has no values: run.wrap gives every rank rank 0's",
                'build the model on the CPU; for one that no worker can hold whole: parallel.init = "meta" in a job file, or a loop that '
                "calls fully_shard itself",
            )
        if parameter.device.type != device.type:
            raise StateError(
                f"{name} is on {parameter.device}, and this rank trains on {device}",
                "model.to(run.device) before it is wrapped",
            )
