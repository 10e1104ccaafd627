"""The norm of a step's gradient, with bits that do not depend on how a model is shared out.

Squares are rounded to multiples of a power of two that is coarse enough for every sum of them to be exact in double precision
(pre-rounding; J. Demmel and H. D. Nguyen, "Fast Reproducible Floating-Point Summation", 2013). Exact sums have the same bits in
any order, so ranks may add up their own rows, and add these sums up between them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow.errors import StateError
from elasticflow.runtime.process import torch_private
from elasticflow.runtime.process.sharded_tensors import is_sharded, local_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# Elements from which on a tensor has a grid of its own; smaller tensors have one together, and few kernels.
_LARGE = 1 << 16
_PIECE = 1 << 14


def use_exact_norm() -> None:
    """Have `clip_grad_norm_` and `get_total_norm` of torch use `exact_norm`, in this process from now on."""
    torch_private.replace_total_norm(_total_norm)


def exact_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of *tensors* together, in single precision: the same bits however they are shared out by rows.

    Collective among the ranks that share them. It differs from the true norm by about as much as single precision does; if a few
    of n elements are more than 2**26 / n times as large as the others together, the others may count less.
    """
    sharded = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    group = None if sharded is None else sharded.device_mesh.get_group()  # type: ignore[attr-defined]
    small = [tensor for tensor in tensors if tensor.numel() < _LARGE]
    parts = [[tensor] for tensor in tensors if tensor.numel() >= _LARGE]
    parts += [small] if small else []
    values = [_flat(part) for part in parts]
    counts = [sum(tensor.numel() for tensor in part) for part in parts]
    largest = torch.stack([_largest_of(value) for value in values])
    if group is not None:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    _, exponents = torch.frexp(largest.square())
    room = torch.tensor([(count - 1).bit_length() + 1 for count in counts], device=largest.device)
    grids = torch.ldexp(torch.full_like(largest, 1.5), exponents + room)
    sums = torch.stack([_rounded_squares(value, grid) for value, grid in zip(values, grids, strict=True)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums.sum().sqrt().float()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    flat = [local_of(tensor).detach().reshape(-1) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _largest_of(values: Tensor) -> Tensor:
    if not values.numel():
        return torch.zeros((), dtype=torch.float64, device=values.device)
    largest: Tensor = torch.linalg.vector_norm(values, math.inf)
    return largest.double()


def _rounded_squares(values: Tensor, grid: Tensor) -> Tensor:
    """Return the sum of the squares, each rounded to the grid: in double precision, and exact."""
    total = torch.zeros_like(grid)
    # On a CPU piece by piece, as caches hold them: a quarter of the time (20 million elements, torch 2.13).
    for piece in torch.split(values, _PIECE if values.device.type == "cpu" else max(1, values.numel())):
        wide = piece.double()
        total += torch.addcmul(grid, wide, wide).sub_(grid).sum()
    return total


def _total_norm(
    tensors: Any,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,  # torch's signature
    foreach: bool | None = None,
) -> Tensor:
    """Stand in for torch's `get_total_norm`."""
    del foreach
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not given:
        return torch.tensor(0.0)
    if float(norm_type) != 2.0:
        if any(map(is_sharded, given)):
            raise StateError(
                f"the {norm_type}-norm of a sharded model's gradients may have other bits at another number of workers",
                "clip_grad_norm_(parameters, max_norm) with the 2-norm",
            )
        return torch_private.total_norm(given, norm_type)
    with torch.no_grad():
        norm = exact_norm(given)
    if error_if_nonfinite and not math.isfinite(float(norm)):
        raise RuntimeError(f"The total norm of the gradients is {float(norm)}: it cannot be clipped")
    return norm
