"""Modules that the fork server imports once for all workers, and modules it must not import."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.launcher.fork_server import native_threads, rank_at_import
from elasticflow.protocol.messages import RefusedModule
from elasticflow.protocol.worker_environment import COMPILER_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Modules that every worker needs.
WARM = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "elasticflow.runtime.worker",
    "elasticflow.runtime.data.index_loader",
    "elasticflow.runtime.training.evaluation",
    "elasticflow.runtime.data.index_schedule",
    "elasticflow.runtime.training.ddp",
    "elasticflow.runtime.process.seeded_imports",
    "elasticflow.runtime.snapshot.snapshots",
    "elasticflow.runtime.state.state",
)

# A process that uses an accelerator opens CUDA's memory manager, which NVML does without, or AMD's compute driver.
_OPENED = ("/dev/nvidia-uvm", "/dev/kfd")


def warm_up() -> Iterator[str]:
    """Import the modules that every job's workers need; yield each name once it is imported."""
    for name in WARM:
        importlib.import_module(name)
        if name == "torch":
            importlib.import_module("elasticflow.runtime.process.deferred_compiler").defer()
        yield name


def seed_imports(seed: int) -> None:
    """Have the random numbers that the job's modules draw at import follow from *seed*; after `warm_up`."""
    sys.modules["elasticflow.runtime.process.seeded_imports"].install(seed)


def warm_up_compiler(*, has_gpu: bool) -> None:
    """Have torch's compiler ready, if workers compile; after `warm_up`, once the variables of the launch are known.

    No accelerator is touched.
    """
    if COMPILER_CACHE in os.environ:
        importlib.import_module("elasticflow.runtime.process.compiler").warm_up(has_gpu=has_gpu)


def preload(
    modules: Sequence[str],
    path: Sequence[str],
    tell: Callable[[str], None] = lambda _: None,
    *,
    has_gpu: bool = False,
) -> list[RefusedModule]:
    """Import the job's modules that workers share; return those that each worker has to import for itself.

    A module that fails here fails again in the worker, where its traceback belongs to a rank. After a module that makes
    this process unsafe to fork nothing more is imported: every worker is started anew then.

    Args:
        tell: Called with each name before it is imported.
    """
    refused = []
    for name in modules:
        tell(name)
        known = set(sys.modules)
        reason = _import(name, path)
        if (unsafe := unsafe_to_fork(has_gpu=has_gpu)) is not None:
            reason = started_anew(unsafe)
        if reason:
            refused.append(RefusedModule(name, reason))
            _forget(set(sys.modules) - known, path)
        if unsafe:
            break
    return refused


def import_all(modules: Sequence[str], path: Sequence[str]) -> None:
    """Import a worker's modules, as far as they import without knowing the rank; a failing module is left to the worker.

    Args:
        modules: Names, in the order in which workers have imported them.

    Raises:
        SystemExit: a library has read the rank, and keeps it: this process must not become a worker.
    """
    for name in modules:
        known = set(sys.modules)
        if name not in known and _import(name, path) is not None:
            _forget(set(sys.modules) - known, path)
    if (kept := rank_at_import.kept_by_library()) is not None:
        raise SystemExit(f"no worker can stand by: {kept}")


def _import(name: str, path: Sequence[str]) -> str | None:
    """Import a module; return why it must not be shared by workers, if so."""
    try:
        with rank_at_import.watched(path) as read:
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001  whatever user code raises at import, even SystemExit
        return f"{type(error).__name__}: {error}"
    return f"reads {', '.join(sorted(read))} at import" if read else None


def started_anew(unsafe: str) -> str:
    """Return *unsafe*, a reason not to fork workers, with its consequence."""
    return f"{unsafe}: every worker is started anew instead of forked"


def unsafe_to_fork(*, has_gpu: bool) -> str | None:
    """Return why this process must not fork workers after what it has imported; None if it may."""
    if (unsafe := open_accelerator(has_gpu=has_gpu)) is not None:
        return unsafe
    if (kept := rank_at_import.kept_by_library()) is not None:
        return kept
    missed = native_threads.missed_in_a_child()
    return None if missed is None else f"starts {missed} at import"


def open_accelerator(*, has_gpu: bool) -> str | None:
    """Return the reason if this process has opened the driver of an accelerator, which its children then cannot use.

    Counting GPUs by NVML does not count: it opens `/dev/nvidiactl` and the devices, and children work.

    Args:
        has_gpu: Torch can use an accelerator on this machine. Where it cannot, no worker will miss what torch refuses
            to a child of a process that looked for one.
    """
    is_open = any(target.startswith(_OPENED) for target in _open_files())
    return "touches the accelerator at import" if is_open or (has_gpu and _is_refused_to_children()) else None


def _is_refused_to_children() -> bool:
    """Return whether torch refuses the accelerator to a child of this process: only a child knows.

    Source: torch marks a child by `pthread_atfork` (`_cuda_isInBadFork` of its C++ side), also after no more than a count
    of the devices by the driver, of which the parent's `torch.cuda.is_initialized()` knows nothing.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            torch_private = importlib.import_module("elasticflow.runtime.process.torch_private")
            os.write(write, b"1" if torch_private.is_accelerator_refused() else b"0")
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read()
    with contextlib.suppress(
        ChildProcessError
    ):  # a module of the job may have its children reaped by the kernel
        os.waitpid(pid, 0)
    return answer != b"0"


def _open_files() -> list[str]:
    """Return the open files of this process; psutil leaves devices out."""
    folder = Path("/proc/self/fd")
    targets = []
    for descriptor in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            targets.append(str(descriptor.readlink()))
    return targets


def _forget(modules: set[str], path: Sequence[str]) -> None:
    """Forget those of *modules* that lie in *path*: the job's own, any of which may hold a frozen value.

    Libraries stay: many, torch's extensions among them, cannot be loaded twice.
    """
    for name in modules:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if rank_at_import.is_own(file, path):
            del sys.modules[name]
