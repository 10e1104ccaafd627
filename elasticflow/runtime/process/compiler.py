"""torch.compile in this process: its warm-up, its cache and its duration."""

from __future__ import annotations

import os
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow.protocol import worker_environment
from elasticflow.runtime.process import deferred_compiler, torch_private

if TYPE_CHECKING:
    from elasticflow.runtime.process.step_log import Heartbeat


def warm_up(*, has_gpu: bool) -> None:
    """Make the compiler ready for this process and its forks, before any rank is known; no accelerator is touched.

    An error is printed and not raised: a worker that needs the compiler meets it again, and its traceback has a rank.
    """
    try:
        torch_private.warm_up_compiler(has_gpu=has_gpu)
    except Exception:  # noqa: BLE001  importing a compiler may raise anything; a job on another device may not need it
        traceback.print_exc()


class Compilation:
    """Counts and times the compilations of this process.

    Args:
        heartbeat: This rank's heartbeat; its phase is compile during a compilation.
    """

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._phase_before = "compile"
        self._seconds = 0.0
        self._began = 0.0

    def watch(self) -> None:
        """Begin to watch torch's compiler, which may take minutes and compiles again for new shapes; it uses the node's cache, if the agent keeps one."""
        deferred_compiler.once_imported(lambda: torch_private.on_compile(self._begin, self._end))
        if folder := os.environ.get(worker_environment.COMPILER_CACHE):
            # This file exists once earlier generations have compiled and the cache is sealed.
            is_warm = Path(f"{folder}.json").exists()
            torch_private.precompile_headers_if(lambda: not is_warm or torch_private.compiled_graphs()[1] > 0)

    @property
    def has_happened(self) -> bool:
        """True if a graph was compiled or taken from the cache."""
        return self._seconds > 0

    def _begin(self, _: object) -> None:
        self._phase_before = self._heartbeat.phase("compile")
        self._began = time.monotonic()

    def _end(self, _: object) -> None:
        self._seconds += time.monotonic() - self._began
        self._heartbeat.phase(self._phase_before)

    def facts(self) -> dict[str, Any]:
        """Return the fields of `training.compiled`."""
        from_cache, compiled = torch_private.compiled_graphs()
        return {"seconds": round(self._seconds, 3), "from_cache": from_cache, "compiled": compiled}
