"""Stacks of workers that stand still, asked for and read."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.protocol.messages import Frame, LoaderStack
from elasticflow.system.processes import catches, children_of, state_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# A process that runs or sleeps answers within a millisecond.
_ANSWER_S = 1.0
_QUIET_S = 0.03
_LOOK_S = 0.005
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_LOADER_BEGINS, _LOADER_IDLES = "_worker_loop", "/multiprocessing/queues.py"


def parse(dump: str) -> tuple[Frame, ...]:
    """Return the frames of the thread that faulthandler calls the current one, innermost first."""
    frames: list[Frame] = []
    is_current = False
    for line in dump.splitlines():
        if line.endswith("(most recent call first):"):
            is_current = line.startswith("Current thread")
            frames = [] if is_current else frames
        elif is_current and (match := _FRAME.fullmatch(line)):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
        elif not line:
            is_current = False
    return tuple(frames)


class WorkerStacks(NamedTuple):
    """A worker's state, as the kernel has it, and its stacks; see `StalledWorker`."""

    state: str
    frames: tuple[Frame, ...]
    loaders: tuple[LoaderStack, ...]


def collect(pids: Mapping[int, int], logs: Mapping[int, Path]) -> dict[int, WorkerStacks]:
    """Have each worker write its stacks; return them by local rank.

    They are written to its standard error by faulthandler, which `runtime/worker.py` and the fork server register.
    """
    # Before a stopped process is woken up.
    states = {rank: state_of(pid) for rank, pid in pids.items()}
    dumps = _dumps({pid: logs[rank] for rank, pid in pids.items()})
    collected: dict[int, WorkerStacks] = {}
    for rank, pid in pids.items():
        frames = parse(dumps[pid])
        waits_for_loaders = any(
            frame.file.endswith("/elasticflow/runtime/data/loader_processes.py") for frame in frames
        )
        loaders = _loaders(pid, logs[rank]) if waits_for_loaders else ()
        collected[rank] = WorkerStacks(states[rank], frames, loaders)
    return collected


def _loaders(worker: int, log: Path) -> tuple[LoaderStack, ...]:
    """Return the stacks of a worker's loader processes that are not idle; they share its standard error."""
    stacks = []
    deadline = time.monotonic() + _ANSWER_S
    for pid in children_of(worker):
        if time.monotonic() < deadline:
            frames = parse(_dumps({pid: log})[pid])
            names = [frame.function for frame in frames]
            # Without it the child is something else that the job started; below it is the past of the fork.
            if _LOADER_BEGINS in names:
                frames = frames[: names.index(_LOADER_BEGINS)]
                if not any(frame.file.endswith(_LOADER_IDLES) for frame in frames):
                    stacks.append(LoaderStack(pid, frames))
    return tuple(stacks)


def _dumps(logs: Mapping[int, Path]) -> dict[int, str]:
    """Have each process write its stacks; return what each wrote."""
    begins = {pid: log.stat().st_size if log.exists() else 0 for pid, log in logs.items()}
    for pid in logs:
        # Without a handler the signal would end the process.
        if catches(pid, signal.SIGUSR2):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
                # A stopped process could not write.
                os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + _ANSWER_S
    dumps: dict[int, str] = dict.fromkeys(logs, "")
    quiet_since = time.monotonic()
    while (now := time.monotonic()) < deadline:
        before, dumps = dumps, {pid: _read(log, begins[pid]) for pid, log in logs.items()}
        if dumps != before:
            quiet_since = now
        if now - quiet_since >= _QUIET_S and all("Current thread" in text for text in dumps.values()):
            break
        time.sleep(_LOOK_S)
    return dumps


def _read(log: Path, begin: int) -> str:
    # A worker may be stopped before it opens its own.
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(begin)
        return file.read().decode("utf-8", "replace")
    return ""
