"""Deterministic kernels: switched on and kept on; an error names an operation that has no such kernel."""

from __future__ import annotations

import ctypes
import re
import sys
from contextlib import suppress

import torch

from elasticflow.errors import StateError
from elasticflow.runtime.process import torch_private

_ERRORS = 2  # torch.get_deterministic_debug_mode: 0 is off, 1 only warns
# Deterministic replacements, by the beginning of the name of an operation that has no deterministic form.
_ALTERNATIVES = {"put_": "index_put_", "median": "sort", "kthvalue": "sort"}
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _MOST = -3, -1, 2**30  # of mallopt


def be_deterministic() -> None:
    """Have torch refuse, for this process, every operation whose result may differ from run to run."""
    torch.use_deterministic_algorithms(mode=True)
    torch.backends.cudnn.benchmark = False
    # Else every new tensor is filled first, in case somebody reads it before it is written.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if "torch._dynamo" in sys.modules:  # a compiled model
        torch_private.compile_deterministically()


def require_deterministic() -> None:
    """Make sure that torch still refuses operations that are not deterministic.

    Raises:
        StateError: the job's own code has switched that off.
    """
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
        other = next(
            (o for name, o in _ALTERNATIVES.items() if operation.startswith(name)), "another operation"
        )
        return StateError(
            f'train.consistency = "exact" cannot use {operation}: it may give other bits each time',
            f'use {other}, or consistency = "batch"',
        )
    if "CUBLAS_WORKSPACE_CONFIG" in text:
        return StateError(
            'train.consistency = "exact" cannot use cuBLAS without a fixed workspace: it may give other bits each time',
            "set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the process starts",
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
