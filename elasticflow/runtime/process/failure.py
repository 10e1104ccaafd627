"""Failure class and text of the exception that ends a worker."""

from __future__ import annotations

import errno
import os
import resource
import traceback

import torch
import torch.distributed as dist

from elasticflow.errors import COLLECTIVE_MISMATCH, ElasticflowError, StopTraining, StorageError, WorkerError
from elasticflow.protocol.store_address import StoreLostError
from elasticflow.runtime.process import torch_private
from elasticflow.system.device_errors import class_of_device_error, is_shared_device

# Characters. The message of an exception may contain a whole batch.
_LONGEST = 20_000
_NO_FILES = os.strerror(errno.EMFILE)

# torch's messages name arguments of its constructor, where a user of ours sets keys in a job file.
_IN_OUR_WORDS = {
    # Before the next one, which its text contains, too.
    torch_private.STILL_NO_GRADIENT: (
        "a backward left out a parameter that the forward used, or a forward had no backward",
        "add up the losses of a step's forwards and call backward once; where no gradient is needed, call the model itself, not DDP",
    ),
    torch_private.NO_GRADIENT: (
        "a parameter of the model got no gradient in the step before",
        "if steps leave parameters out, set ddp.find_unused_parameters = true, in a script run.wrap(model, find_unused_parameters=True)",
    ),
    torch_private.GRADIENT_TWICE: (
        "a parameter of the model got its gradient twice in one backward",
        "where blocks that share it are recomputed, use checkpoint(..., use_reentrant=False)",
    ),
    torch_private.SHARDED_PART: (
        "code computes with parameters of a sharded model that are not gathered",
        "call the whole model, as in model(x), not a part of it, as in model.head(x); or name the part's class in parallel.wrap",
    ),
}

_SHARED_DEVICE = (
    "two workers of a machine use the same GPU, and each needs a GPU of its own\n"
    "  help: set nodes.nproc_per_node to at most the number of GPUs of a node; code that sets the device by itself takes "
    "number LOCAL_RANK; nodes that --simulate-nodes or --scale simulate share the machine's GPUs: --set nodes.device=cpu"
)


def classify(error: BaseException) -> str:
    """Return the failure class that the restart budget counts *error* under."""
    if isinstance(error, WorkerError):
        return error.failure_class
    if isinstance(error, StorageError):
        return "storage"
    if _is_out_of_memory(error):
        return "oom"
    # The next process has the same limit of files.
    if _is_out_of_files(error) or any(mark in _own_words(error) for mark in COLLECTIVE_MISMATCH):
        return "user_error"
    if isinstance(error, OSError) and _is_of_snapshots(error):
        return "storage"
    if (
        isinstance(error, RuntimeError)
        and (of_device := class_of_device_error(_own_words(error))) is not None
    ):
        return of_device
    if isinstance(error, torch.AcceleratorError):
        return "device"
    if _is_of_killed_loader(error):
        return "crash"
    return "peer" if _is_of_lost_peer(error) else "user_error"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    is_of_torch = type(error) is RuntimeError and torch_private.NO_MEMORY in _own_words(error)
    return is_of_torch or isinstance(error, torch.OutOfMemoryError | MemoryError)


def _is_out_of_files(error: BaseException) -> bool:
    """True if this process may open no more files; gloo says so in words. The machine's own limit is another matter."""
    if isinstance(error, OSError):
        return error.errno == errno.EMFILE
    words = _own_words(error) if isinstance(error, RuntimeError) else ""
    return _NO_FILES in words and f"{_NO_FILES} in system" not in words


def _is_of_killed_loader(error: BaseException | None) -> bool:
    """True if a signal ended a process of the script's own DataLoader: the kernel's, when memory runs out."""
    while isinstance(error, RuntimeError):
        if torch_private.LOADER_KILLED in _own_words(error):
            return True
        error = error.__cause__
    return False


def _is_of_lost_peer(error: BaseException) -> bool:
    is_of_gloo = isinstance(error, RuntimeError) and any(
        mark in _own_words(error) for mark in torch_private.PEER_LOST
    )
    return is_of_gloo or isinstance(error, dist.DistError | StoreLostError)


def _is_of_snapshots(error: OSError) -> bool:
    """True if *error* comes from the snapshots' storage, which may work next time, and not from the job's own files."""
    names = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(name.startswith("elasticflow.storage") for name in names)


def describe(error: BaseException) -> str:
    """Return the error in one line or two, without a traceback."""
    if isinstance(error, ElasticflowError):
        return str(error)
    if isinstance(error, StopTraining):
        return (
            f"StopTraining was raised where the ranks cannot agree on it: {error}\n"
            "  help: raise it from the training step, the dataset, the evaluation, a metric or the schedule"
        )
    if isinstance(error, RuntimeError) and is_shared_device(_own_words(error)):
        return f"{type(error).__name__}: {_SHARED_DEVICE}"
    for mark, (meaning, remedy) in _IN_OUR_WORDS.items():
        if mark in _own_words(error):
            return f"{type(error).__name__}: {meaning}\n  help: {remedy}"
    described = shortened("".join(traceback.format_exception_only(error)).strip())
    if _is_out_of_files(error):
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        described += f"\n  help: this process may have {limit} files open: close those that are not needed, or raise `ulimit -n` before the command"
    return described


def text(error: BaseException) -> str:
    """Return the traceback, the innermost frame last."""
    return "".join(traceback.format_exception(error))


def shown(error: BaseException) -> str:
    """Return the text for standard error: the traceback, unless *error* names a remedy and does not come from the job's code."""
    if isinstance(error, ElasticflowError) and not isinstance(error, WorkerError):
        return f"error: {error}\n"
    return text(error)


def shortened(text: str) -> str:
    """Return *text*, with its middle left out if it is too long to read."""
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters left out ...\n{text[-half:]}"


def _own_words(error: BaseException) -> str:
    """Return the text of *error*; empty if its own `__str__` fails, which must not hide the error."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001  whatever the job's own code raises
        return ""
