"""The rows of a sharded tensor that this rank holds, and the ranks that hold the same rows.

`fully_shard` of torch (FSDP2) cuts each parameter along its first dimension and makes it a DTensor, whose local part this
rank trains. A snapshot stores local parts; see `snapshots/format/pieces.py`.

A DTensor itself tells nothing about memory: its `data_ptr()` is 0, and its `_version` stays the same while an optimizer
writes the local part (seen in torch 2.13). So all code that looks at memory looks at `local_of`.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow.errors import StateError, StepResultError
from elasticflow.runtime.process import torch_private
from elasticflow.snapshots.format.pieces import Part

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn

_PLAIN = "shard each parameter along its first dimension: fully_shard(module) of torch.distributed.fsdp, without a placement of your own"


class Shards(NamedTuple):
    """The part of a model that this rank holds: the same for all of its parameters.

    Attributes:
        holders: Ranks that hold this part, ascending; one for each replica of the model.
    """

    shard: int
    degree: int
    holders: tuple[int, ...]


NOT_SHARDED = Shards(0, 1, ())


class Box(NamedTuple):
    """Rows `[begin, end)` of a tensor: the part that this rank holds, which may be empty."""

    shape: tuple[int, ...]
    begin: int
    end: int
    shards: Shards


def is_sharded(value: Any) -> bool:
    """True if *value* is a DTensor; imports nothing."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor; any other tensor is returned itself."""
    return torch_private.local_tensor_of(tensor) if is_sharded(tensor) else tensor


def whole_of(value: Any) -> Any:
    """Return the whole tensor of a DTensor; any other value is returned itself. Collective for a DTensor: the ranks that share it.

    A number that torch made of a sharded tensor, such as its norm, is a DTensor whose `item()` is of this rank's rows.
    """
    return value.full_tensor() if is_sharded(value) else value


def require_whole_scalars(result: Mapping[Any, Any]) -> None:
    """Make sure that no number beside a step's loss is a DTensor.

    Raises:
        StepResultError: a number was made of a sharded parameter; the message names it.
    """
    for name, value in result.items():
        if is_sharded(value) and not value.dim():
            raise StepResultError(
                f"the scalar {name} was made of a parameter of a sharded model, and is of this worker's rows alone",
                "log it in a hook with all_ranks = true by log_scalar; or log value.full_tensor(), which every rank calls",
            )


def box_of(tensor: Tensor, name: str) -> Box | None:
    """Return the rows of a DTensor that this rank holds; None for a plain tensor.

    Raises:
        StateError: it is shared out in another way than by rows, which ranks hold the same rows is not known, or it has no values;
            *name* is named.
    """
    if not is_sharded(tensor):
        return None
    if tensor.is_meta:
        raise StateError(
            f"{name} is on the meta device, and has no values",
            "model.to_empty(device=run.device) once it is sharded, then its initialization, both before run.keep",
        )
    shards = _shards_of(tensor, name)
    shape = tuple(tensor.shape)
    if not tensor.numel():
        raise StateError(
            f"{name} is a DTensor without elements, of which no rank could store a row", "leave it out"
        )
    box = _cut(shape, shards)
    if local_of(tensor).shape != (box.end - box.begin, *shape[1:]):
        raise StateError(
            f"{name} is a DTensor of shape {shape}, and part {shards.shard} of {shards.degree} has shape "
            f"{tuple(local_of(tensor).shape)}: it is not cut into even rows",
            _PLAIN,
        )
    return box


def box_among(tensor: Tensor, name: str, shape: tuple[int, ...]) -> Box:
    """Return the rows that this rank would hold of a tensor of *shape* that is shared out among the ranks of a DTensor.

    Raises:
        StateError: as by `box_of`.
    """
    return _cut(shape, _shards_of(tensor, name))


def _cut(shape: tuple[int, ...], shards: Shards) -> Box:
    begin, end = Part(shards.shard, shards.degree).rows(shape[0])
    return Box(shape, begin, end, shards)


def like(rows: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a DTensor of *shape* that is shared out as *tensor* is, and has *rows* as its local part; no communication."""
    from torch.distributed.tensor import DTensor

    # Without shape and stride torch would infer them, wrongly for uneven rows. The rows lie in memory one after the other.
    made: Tensor = DTensor.from_local(
        rows, tensor.device_mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=_strides_of(shape)  # type: ignore[attr-defined]
    )  # fmt: skip
    return made


def _strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def refuse_draws(device: torch.device) -> None:
    """Have random draws into sharded tensors raise a StateError, where each rank would draw the same numbers for its rows."""
    if device.type == "cpu":
        torch_private.refuse_draws_into_parts(_drawn_into_rows)


def _drawn_into_rows() -> StateError:
    return StateError(
        "random numbers were drawn into a sharded tensor, as by torch.nn.init or normal_: on CPUs each rank would draw the same "
        "numbers for its own rows",
        "draw them before the model is sharded, from plain tensors of the whole shape",
    )


def require_no_hooks(parameter: Tensor, name: str) -> None:
    """Make sure that nothing is to see or change the gradient of a parameter of a sharded model as a backward makes it.

    Raises:
        StateError: a hook was registered, which torch would never call; *name* is named.
    """
    if torch_private.has_gradient_hooks(parameter):
        raise StateError(
            f"{name} has a hook on its gradient, which is not called once the model is sharded",
            "change gradients between the backward, or run.gradients, and optimizer.step()",
        )


def is_over_all_ranks(tensor: Any) -> bool:
    """True for a DTensor whose mesh has all ranks: torch exchanges its gradients between replicas, too."""
    return is_sharded(tensor) and tensor.device_mesh.size() == dist.get_world_size()


def part_of(modules: Iterable[nn.Module]) -> Part | None:
    """Return the rows that this rank holds of the sharded tensors of *modules*; None: no parameter is sharded.

    Raises:
        StateError: as by `box_of`.
    """
    for module in modules:
        for name, parameter in module.named_parameters():
            if is_sharded(parameter):
                return Part(*_shards_of(parameter, name)[:2])
    return None


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called with, in the order of `modules()`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (
        [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    )


def reshard(model: nn.Module) -> None:
    """Have the parameters be this rank's parts: after a forward without a backward those of the root are gathered ones.

    Every rank may call it by itself: nothing is exchanged.
    """
    for module in sharded_modules(model):
        module.reshard()


def _shards_of(tensor: Any, name: str) -> Shards:
    from torch.distributed.tensor import Replicate, Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    cut = [dim for dim, placement in enumerate(placements) if not isinstance(placement, Replicate)]
    if (
        len(cut) != 1
        or type(placements[cut[0]]) is not Shard
        or placements[cut[0]].dim != 0
        or not tensor.dim()
    ):
        raise StateError(f"{name} is a DTensor with placements {tuple(placements)}", _PLAIN)
    try:
        return _shards_on(mesh, cut[0], dist.get_world_size())
    except StateError as error:
        raise StateError(f"{name} is a DTensor over ranks {error.message}", error.remedy) from None


@lru_cache(maxsize=8)  # asking a mesh takes a third of the time that training stands still for a snapshot
def _shards_on(mesh: Any, dim: int, world_size: int) -> Shards:
    ranks, place = mesh.mesh, mesh.get_coordinate()
    if place is None:
        raise StateError(f"{ranks.flatten().tolist()}, and this rank is not among them", _PLAIN)
    degree, shard = ranks.size(dim), place[dim]
    everybody = ranks.flatten().tolist()
    if sorted(everybody) == list(range(world_size)):
        holders = ranks.select(dim, shard).flatten().tolist()
    elif ranks.dim() == 1 and world_size % degree == 0 and everybody == _neighbours(everybody[0], degree):
        # Other replicas have meshes of their own, over the ranks that follow one another.
        holders = [first + shard for first in range(0, world_size, degree)]
    else:
        raise StateError(
            f"{everybody} of {world_size}: which ranks hold the same rows is not known",
            "make a mesh of all ranks, init_device_mesh(device, (replicas, shards)), or one of consecutive ranks for each replica",
        )
    return Shards(shard, degree, tuple(sorted(holders)))


def _neighbours(rank: int, degree: int) -> list[int]:
    """Return the ranks of the replica that *rank* belongs to, if replicas are consecutive ranks."""
    first = rank - rank % degree
    return list(range(first, first + degree))
