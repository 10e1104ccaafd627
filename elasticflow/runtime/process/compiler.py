"""torch.compile in this process: made ready beforehand, its cache, how long it takes."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import Any

from elasticflow.protocol import worker_environment
from elasticflow.runtime import torch_private


def warm_up() -> None:
    """Make the compiler ready, for this process and those that are forked from it; no rank need be known.

    What fails is shown and left to the workers, where its traceback belongs to a rank.
    """
    try:
        torch_private.warm_up_compiler()
    except Exception:  # noqa: BLE001  whatever a compiler's import raises; a job on another device may not need it
        traceback.print_exc()


def use_cache() -> None:
    """Have torch use the node's compiler cache, where the agent keeps one, in the way that is fastest."""
    folder = os.environ.get(worker_environment.COMPILER_CACHE)
    if not folder:
        return
    # Sealed: what generations before have compiled is there.
    is_warm = Path(f"{folder}.json").exists()
    torch_private.precompile_headers_if(lambda: not is_warm or torch_private.compiled_graphs()[1] > 0)


class _Rehearsed:
    """As whom this process has traced the model before it was called; one per process."""

    place: tuple[int, int] | None = None
    is_in_vain = False


def note_rehearsal(rank: int, world_size: int) -> None:
    """Remember that this process has traced what that worker would."""
    _Rehearsed.place, _Rehearsed.is_in_vain = (rank, world_size), False


def has_rehearsed_in_vain() -> bool:
    """Whether this process has traced again what it had traced before it was called."""
    return _Rehearsed.is_in_vain


def forget() -> None:
    """Have nothing traced."""
    _Rehearsed.place = None
    torch_private.forget_traces()


def forget_if_other(rank: int, world_size: int) -> None:
    """Keep what was traced beforehand for the worker of that place alone.

    Another one's micro-batches have other sizes: the compiler would take that for shapes that change from step to step, and
    make other kernels than without a rehearsal.
    """
    if _Rehearsed.place not in (None, (rank, world_size)):
        forget()


class Compilation:
    """How long this process has compiled, and what."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._began = 0.0

    @property
    def has_happened(self) -> bool:
        """Whether anything was compiled, or taken from the cache."""
        return self._seconds > 0 or _Rehearsed.place is not None

    def begin(self) -> None:
        """A compilation begins."""
        self._began = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._seconds += time.monotonic() - self._began
        _Rehearsed.is_in_vain = _Rehearsed.place is not None

    def facts(self) -> dict[str, Any]:
        """Return the fields of `training.compiled`."""
        from_cache, compiled = torch_private.compiled_graphs()
        return {
            "seconds": round(self._seconds, 3),
            "from_cache": from_cache,
            "compiled": compiled,
            "rehearsed": _Rehearsed.place is not None and not _Rehearsed.is_in_vain,
        }
