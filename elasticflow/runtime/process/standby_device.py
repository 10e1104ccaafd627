"""The GPU of a standby: opened, and its libraries loaded, before the standby is needed; a standby changes no bit of a run.

What the libraries read when they begin is as it will be for the worker, or they are left alone. Constants are computed on:
no random number is drawn, no switch of torch is touched, and autograd begins no thread, which would deny gradients to
processes forked later.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional, grad

from elasticflow.runtime.process import devices
from elasticflow.system import nvidia_smi

if TYPE_CHECKING:
    from collections.abc import Mapping

# Variables that cuBLAS, cuDNN and torch's use of them read when they begin, and on which bits may depend.
_LIBRARIES = ("CUBLAS", "CUDNN", "NVIDIA_TF32_", "TORCH_ALLOW_TF32_", "TORCH_BLAS_", "TORCH_CUDNN_")
# Upper bounds of what a context takes of its GPU's memory, and of kernels and workspaces of cuBLAS and cuDNN beside it. Both
# are estimates, and are asked for twice over.
_CONTEXT_BYTES, _LIBRARIES_BYTES = 600 << 20, 600 << 20
# The time that the driver may take to report free memory.
_QUERY_LIMIT_S = 10.0
# Sizes that no job has: a library may keep its choice of a kernel for each size.
_IMAGES, _WEIGHTS, _ROWS = (2, 24, 11, 13), (40, 24, 3, 3), (56, 72)


def library_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in *environ* on which the bits of a GPU's libraries may depend."""
    return {name: value for name, value in environ.items() if name.startswith(_LIBRARIES)}


def open_device(kind: str, local_rank: int, workers: int, variables: Mapping[str, str] | None) -> str:
    """Create the context of the worker's GPU and load its libraries, as far as memory is known to be free for them.

    They take memory that the worker which still trains may need.

    Args:
        kind: Type of the device that the last workers trained on, which is not the CPU.
        workers: Workers of the node: they have GPUs if there is one for each.
        variables: The worker's, as `library_variables` gave them after its first step; None: not known, and libraries
            are left to the worker.

    Returns:
        Why the GPU was not opened; empty if it was, or if the worker will have none.

    Raises:
        RuntimeError: the GPU has failed; this process must not become a worker.
    """
    if torch.accelerator.device_count() < workers:
        return ""
    memory = _memory_of(local_rank)
    if memory is None:
        return "its driver does not report its free memory"
    if memory.is_exclusive:
        return "its compute mode allows one process, which is the worker"
    if memory.free < 2 * _CONTEXT_BYTES:
        return f"{memory.free >> 20} MiB of its memory are free"
    devices.fix_workspace()
    device = torch.device(kind, local_rank)
    try:
        torch.zeros(1, device=device)
    except RuntimeError as error:  # no context was made: the worker tries again
        return str(error).partition("\n")[0]
    is_as_ever = variables is not None and library_variables(os.environ) == dict(variables)
    if is_as_ever and torch.version.hip is None and memory.free >= 2 * (_CONTEXT_BYTES + _LIBRARIES_BYTES):
        load_libraries(device)
    return ""


def load_libraries(device: torch.device) -> None:
    """Have cuBLAS and cuDNN load what the first step would wait for.

    NCCL is loaded with torch, and begins with the group: it would keep variables that a job's code may set until then.

    Raises:
        RuntimeError: the GPU has failed. An operation that it cannot do, or has no memory for, is no failure.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            _compute(device, dtype)
        except RuntimeError:
            # After a failure of the GPU every call fails; else this standby is as good as one without the operation.
            torch.zeros(1, device=device).item()
    torch.accelerator.synchronize(device)
    torch.accelerator.memory.empty_cache()
    torch.accelerator.memory.reset_peak_memory_stats(device)


@torch.no_grad()
def _compute(device: torch.device, dtype: torch.dtype) -> None:
    """Compute a convolution, a linear layer and a product of matrices, and their gradients by their own kernels."""
    images, weights = (torch.ones(size, device=device, dtype=dtype) for size in (_IMAGES, _WEIGHTS))
    output = functional.conv2d(images, weights, padding=1)
    grad.conv2d_input(images.shape, weights, output, padding=1)  # type: ignore[no-untyped-call]
    grad.conv2d_weight(images, weights.shape, output, padding=1)  # type: ignore[no-untyped-call]
    rows = torch.ones(_ROWS, device=device, dtype=dtype)
    functional.linear(rows, rows, rows[:, 0])
    _ = rows @ rows.t(), rows.t() @ rows


class _Memory(NamedTuple):
    free: int
    is_exclusive: bool


def _memory_of(number: int) -> _Memory | None:
    """Return a GPU's memory, as its driver reports it without a context there; None if it does not.

    The call of torch that reports free memory, `torch.accelerator.get_memory_info`, makes a context.
    """
    if torch.version.hip is not None:
        # AMD's library raises classes of its own, which cannot be named where it is not installed.
        with contextlib.suppress(Exception):
            total = torch.cuda.get_device_properties(number).total_memory
            return _Memory(total - torch.cuda.device_memory_used(number), is_exclusive=False)
    elif torch.version.cuda is not None:
        uuid = nvidia_smi.uuid_of(torch.cuda.get_device_properties(number))
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            [(free, mode)] = nvidia_smi.query(("memory.free", "compute_mode"), _QUERY_LIMIT_S, uuid=uuid)
            return _Memory(int(free) << 20, mode not in {"Default", "[N/A]"})
    return None
