"""NCCL's flight recorder: each worker's record of its last collectives, dumped when workers stand still.

torch keeps the record in memory, and dumps it by itself only once a collective's own time limit is over. A thread of its process
group also dumps it when something is written to a named pipe, though the main thread waits in a collective.

Source: torch 2.13 and 2.14, `DumpPipe` in torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp (the pipe is the variable's value, the
rank, `.pipe`; its reader looks once a second) and `DebugInfoWriter` in FlightRecorder.hpp (the file is the variable's value and
the rank). The record's length is torch's own default, 2000 collectives.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.system.polling import attempts

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

# Drivers of NVIDIA and AMD, and the driver of both below WSL.
DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
PIPE, DUMP = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE", "TORCH_FR_DUMP_TEMP_FILE"
_OLD_DUMP = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
_BUFFERS = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
# The reader looks once a second; the supervisor waits 5 s for stacks and dumps together.
_ANSWER_S = 2.5
_QUIET_S = 0.1
_POLL_S = 0.02


@cache
def has_nccl() -> bool:
    """Return whether the installed torch has NCCL, or RCCL; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    places = () if spec is None else spec.submodule_search_locations or ()
    return any(
        Path(place, "lib", f"libtorch_{kind}.so").exists() for place in places for kind in ("cuda", "hip")
    )


def may_use_devices(environment: Mapping[str, str]) -> bool:
    """Return whether workers with these variables may train on devices: the machine has a driver, and the job is not for the CPU."""
    return environment.get(worker_environment.DEVICE) != "cpu" and any(
        Path(path).exists() for path in DRIVERS
    )


class FlightRecorder:
    """The flight recorders of a node's workers; none where torch has no NCCL, or the launch's variables arrange for dumps."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        is_left_to_us = not any(name in environment for name in (PIPE, DUMP, _OLD_DUMP))
        is_on = all(environment.get(name) != "0" for name in _BUFFERS)
        self._is_used = is_left_to_us and is_on and may_use_devices(environment) and has_nccl()
        # Pipes cannot be made on every file system that run folders lie on.
        self._pipes: Path | None = None
        self._folder: Path | None = None

    def variables(self, logs: Path) -> dict[str, str]:
        """Return the variables of the workers of a generation whose logs lie in *logs*."""
        if not self._is_used:
            return {}
        self.end()
        try:
            self._pipes = Path(tempfile.mkdtemp(prefix="ef-"))
        except OSError:  # no room, or no folder that may be written: workers train without it
            return {}
        # torch also dumps unasked, once a collective's own time limit is over, and makes no folder.
        self._folder = logs / "flight_recorder"
        self._folder.mkdir(parents=True, exist_ok=True)
        return {PIPE: str(self._pipes / "rank"), DUMP: str(self._folder / "rank_")}

    def ask(self, ranks: Iterable[int]) -> dict[int, Path]:
        """Have the workers of *ranks* dump what they have recorded; return the file that each will write, by rank.

        A worker that has no process group of NCCL's has no pipe, and is left out.
        """
        if self._pipes is None or self._folder is None:
            return {}
        files = {}
        for rank in ranks:
            with contextlib.suppress(OSError):  # no pipe, or no reader
                pipe = os.open(self._pipes / f"rank{rank}.pipe", os.O_WRONLY | os.O_NONBLOCK)
                try:
                    os.write(pipe, b"1\n")
                finally:
                    os.close(pipe)
                files[rank] = self._folder / f"rank_{rank}"
        return files

    @staticmethod
    def await_dumps(files: Iterable[Path], asked: float) -> None:
        """Wait until all *files* are there and grow no more, until `_ANSWER_S` after the monotonic time *asked* at most.

        A worker whose main thread holds Python's lock may not answer: its dump holds Python's stacks.
        """
        if not (wanted := list(files)):
            return
        before: list[int] = []
        quiet_since = time.monotonic()
        for _ in attempts(max(0.0, asked + _ANSWER_S - time.monotonic()), _POLL_S):
            sizes = [path.stat().st_size if path.exists() else 0 for path in wanted]
            if sizes != before:
                before, quiet_since = sizes, time.monotonic()
            elif all(sizes) and time.monotonic() - quiet_since >= _QUIET_S:
                return

    def end(self) -> None:
        """Remove the pipes."""
        if self._pipes is not None:
            shutil.rmtree(self._pipes, ignore_errors=True)
            self._pipes = None
