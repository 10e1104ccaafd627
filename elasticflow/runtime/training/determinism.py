"""Deterministic kernels: switched on and kept on; an error names an operation that has no such kernel."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress

import torch

from elasticflow.errors import StateError
from elasticflow.protocol import worker_environment
from elasticflow.runtime.process import deferred_compiler, torch_private

_ERRORS = 2  # torch.get_deterministic_debug_mode: 0 is off, 1 only warns
_ON_CPU = "the same operation on the CPU: x.cpu() before it, .to(x.device) after it"
# Deterministic replacements that compute the same, by the beginning of the name by which torch refuses an operation that has no
# deterministic form. Names of CUDA's operations: `alertNotDeterministic` in aten/src/ATen/native/cuda (torch 2.13, 2.14).
_ALTERNATIVES = {
    "put_": "index_put_",
    "median": "sort",
    "kthvalue": "sort",
    "cumsum": "cumsum on the CPU: x.cpu().cumsum(dim).to(x.device)",
    "nll_loss2d": "the loss of flat scores: cross_entropy(scores.movedim(1, -1).flatten(0, -2), target.flatten())",
    "upsample_bilinear2d": "torch.nn.functional.interpolate without antialias, which torch can repeat, or interpolate on the CPU",
    "upsample_": "interpolate on the CPU: interpolate(x.cpu(), ...).to(x.device)",
    "adaptive_avg_pool2d": "avg_pool2d with kernel_size = input size // output size, where that divides without rest, or else the "
    "pooling on the CPU",
    "adaptive_max_pool2d": "max_pool2d with kernel_size = input size // output size, where that divides without rest, or else the "
    "pooling on the CPU",
    "ctc_loss": "ctc_loss on the CPU: ctc_loss(log_probs.cpu(), targets.cpu(), input_lengths, target_lengths)",
    "reflection_pad": "an index that mirrors, such as x[..., [2, 1, 0, 1, 2]], or pad on the CPU",
}
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MOST = -3, -1, 2**30  # of mallopt


def be_deterministic() -> None:
    """Have torch refuse, for this process, every operation whose result may differ from run to run."""
    # As `torch.use_deterministic_algorithms(True)`, which imports the compiler to tell it: here it is told once it is imported.
    torch.set_deterministic_debug_mode(_ERRORS)
    torch.backends.cudnn.benchmark = False
    # Deterministic torch would fill every new tensor, in case code reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    deferred_compiler.once_imported(torch_private.compile_deterministically)


def require_deterministic() -> None:
    """Make sure that torch still refuses operations that are not deterministic, and chooses no kernels by their speed.

    Raises:
        StateError: the job's own code has switched that off, or the choice on.
    """
    if torch.backends.cudnn.benchmark:
        raise StateError(
            'the job\'s own code has switched on torch.backends.cudnn.benchmark, and train.consistency = "exact" needs the same kernels '
            "each time",
            'take it out, or use consistency = "batch"',
        )
    if torch.get_deterministic_debug_mode() != _ERRORS:
        raise StateError(
            'the job\'s own code has switched off what train.consistency = "exact" needs: torch.use_deterministic_algorithms(True)',
            'take the call of use_deterministic_algorithms or set_deterministic_debug_mode out, or use consistency = "batch"',
        )


def named(error: RuntimeError) -> Exception:
    """Return the exception to raise for *error*: if torch refused an operation, it names the operation and the remedy."""
    text = str(error)
    refused = re.search(torch_private.NOT_DETERMINISTIC, text)
    if refused is not None:
        operation = refused[1]
        usual = _ON_CPU if re.search("cuda|gpu", operation, re.IGNORECASE) else "another operation"
        other = next((o for name, o in _ALTERNATIVES.items() if operation.startswith(name)), usual)
        return StateError(
            f'train.consistency = "exact" cannot use {operation}: it may give other bits each time',
            f'use {other}, or consistency = "batch"',
        )
    if worker_environment.CUBLAS_WORKSPACE_CONFIG in text:
        return StateError(
            'train.consistency = "exact" cannot use cuBLAS without a fixed workspace: it may give other bits each time',
            f"set {worker_environment.CUBLAS_WORKSPACE_CONFIG}={worker_environment.CUBLAS_WORKSPACE} before the process starts",
        )
    if "deterministic" in text:
        return StateError(
            f'train.consistency = "exact" cannot use an operation: {text.splitlines()[0]}',
            'use another operation, or consistency = "batch"',
        )
    return error


def keep_freed_memory() -> None:
    """Have the C library keep freed memory for the next tensors of this process.

    Each shard's gradients are new tensors. Without this, large ones are new pages each time, which the kernel has to fill
    with zeros: with 19 million parameters that takes 40 ms for each shard.
    """
    with suppress(AttributeError, OSError):  # not glibc
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _MOST)
        mallopt(_TRIM_THRESHOLD, _MOST)
