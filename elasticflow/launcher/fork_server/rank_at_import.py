"""Modules that read a worker's rank when they are imported, in a process that has none yet.

The job's own are forgotten and imported again by each worker. Libraries stay imported: what they have read would be every
worker's.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from elasticflow.protocol.worker_environment import RANK_VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType

# Modules that keep the rank as `rank_zero_only.rank`, and the variable that they read.
# Source: lightning_utilities 0.15 (Lightning and Fabric set its attribute at import), torchmetrics 1.8.
_HOLDERS = {
    "lightning_utilities.core.rank_zero": "RANK",
    "torchmetrics.utilities.prints": "LOCAL_RANK",
}
# They set the attribute of a holder when they are imported.
_SETTERS = (
    "lightning.fabric.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "torchmetrics.utilities.prints",
)
# Torch keeps nothing of what it reads at a call: a process group without its variables raises an error.
_KEEP_NOTHING = ("torch",)
_kept: dict[str, set[str]] = {}


@contextlib.contextmanager
def watched(path: Sequence[str]) -> Iterator[set[str]]:
    """Yield the set of the rank variables that the job's own modules read in the block; reads by libraries are noted."""
    by_job: set[str] = set()
    get = type(os.environ).__getitem__

    def getitem(self: Any, key: str) -> str:
        if key in RANK_VARIABLES:
            _note(key, sys._getframe(1), path, by_job)  # noqa: SLF001  # of CPython, as `inspect.currentframe`
        return get(self, key)

    type(os.environ).__getitem__ = getitem  # type: ignore[method-assign]
    try:
        yield by_job
    finally:
        type(os.environ).__getitem__ = get  # type: ignore[method-assign]


def kept_by_library() -> str | None:
    """Return which library keeps a rank variable that it has read in this process; None if none does."""
    for library, variables in _kept.items():
        return f"{library} reads {', '.join(sorted(variables))} at import"
    return None


def tell_libraries() -> None:
    """Give this process' rank, which its environment has by now, to the libraries that keep it since their import."""
    for name, variable in _HOLDERS.items():
        function = getattr(sys.modules.get(name), "rank_zero_only", None)
        if hasattr(function, "rank") and variable in os.environ:
            function.rank = int(os.environ[variable])  # type: ignore[union-attr]


def is_own(file: str, path: Sequence[str]) -> bool:
    """Return whether a module's file is the job's own code."""
    return "site-packages" not in file and file.startswith(tuple(path))


def _note(variable: str, frame: FrameType, path: Sequence[str], by_job: set[str]) -> None:
    """Take note that *frame* reads a rank variable, for the job or for the library that it belongs to."""
    reader = frame
    while reader.f_back is not None and _is_standard(reader):
        reader = reader.f_back
    name = str(reader.f_globals.get("__name__", ""))
    library = name.partition(".")[0]
    if is_own(reader.f_code.co_filename, path) or library in _KEEP_NOTHING:
        by_job.add(variable)
    elif _imported_by(reader) not in _SETTERS:
        _kept.setdefault(library, set()).add(variable)


def _is_standard(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in sys.stdlib_module_names


def _imported_by(frame: FrameType | None) -> str:
    """Return the module whose import has led to *frame*."""
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__", ""))
