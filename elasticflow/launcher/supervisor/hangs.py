"""Handles a standstill that the agents of all nodes report: collects stacks, names the rank that the others wait for.

Each agent reports when all workers of its node have stood still for too long, or a signal has stopped one (`agent/worker_heartbeats.py` has the limits). Once those of
all nodes stand still, or one is stopped, every agent is asked for stacks; when they are there, the rank that the others wait for is named, and the group is killed.
"""

from __future__ import annotations

import linecache
import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from elasticflow import events
from elasticflow.launcher.supervisor.commands import AskWorkers, RecordEvent
from elasticflow.system.processes import IN_KERNEL, STOPPED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.launcher.supervisor.commands import Command
    from elasticflow.launcher.supervisor.generations import Generation
    from elasticflow.protocol.messages import Frame, StalledWorker

ANSWER_S = 5.0
"""A node that does not answer in time is not waited for."""
_READS_DATA = re.compile(r"/elasticflow/runtime/data/(?:sample_reader|shard_reader|loader_processes)\.py$")
_NOT_THE_JOBS = re.compile(
    r"^<|/elasticflow/(?:runtime|launcher|snapshots)/|/site-packages/|/lib/python3[^/]*/"
)
_LIBRARY = re.compile(r"^<|/site-packages/|/lib/python3[^/]*/")
_IS_STOPPED = (STOPPED, "t")  # the second by a debugger


class Culprit(NamedTuple):
    """The worker that the others wait for, and the reason."""

    worker: StalledWorker
    reason: str


def end_hang(generation: Generation, now: float) -> list[Command]:
    """Ask for stacks once all workers of *generation* stand still; kill the group once they are there.

    Stacks that are not there at the monotonic time *now*, `ANSWER_S` after they were asked for, are not waited for.
    """
    if generation.stacks_asked is None:
        if not _stands_still(generation):
            return []
        generation.stacks_asked = now
        return [AskWorkers("stacks", generation.number)]
    has_answered = generation.stacks.keys() >= set(generation.running)
    if not has_answered and now < generation.stacks_asked + ANSWER_S:
        return []
    return [*_name_culprit(generation), *generation.stop(also_alone=True)]


def _stands_still(generation: Generation) -> bool:
    """Return whether all workers of all nodes that have not ended stand still."""
    if not generation.stalled_nodes:  # asked a hundred times a second
        return False
    running = generation.running
    return bool(running) and generation.stalled_nodes.issuperset(running)


def _name_culprit(generation: Generation) -> list[Command]:
    """Have the rank that the others wait for fail as a hang, by the stacks that are there; rank 0 if there are none."""
    workers = [worker for of_node in generation.stacks.values() for worker in of_node]
    if not workers:
        error = "no progress, and no node told where its workers stand"
        generation.hung[0] = {"class": "hang", "error": error}
        return []
    started = sum(map(len, generation.workers.values()))
    worker, reason = find_culprit(workers)
    if len(workers) < started and all(each.waits_for_others for each in workers):
        reason = f"it waits for others at {_location(worker)}, and {_ended(started - len(workers))}"
    phase = phase_of(worker)
    error = f"no progress for {worker.seconds:.0f} s in phase {phase}: {reason}"
    generation.hung[worker.rank] = {"class": "hang", "error": error, "traceback": stack_text(worker)}
    fields = {
        "rank": worker.rank,
        "node": worker.node,
        "phase": phase,
        "step": worker.step,
        "seconds": worker.seconds,
        "limit_s": worker.limit_s,
        "reason": reason,
        "frames": [str(frame) for frame in own_frames(worker)],
        "stacks": worker.log,
        "dumps": [other.dump for other in workers if other.dump],
    }
    return [RecordEvent(events.HANG_DETECTED, fields)]


def find_culprit(workers: Sequence[StalledWorker]) -> Culprit:
    """Return which of *workers*, all of a generation and at least one, the others wait for."""
    for worker in workers:
        if worker.state in _IS_STOPPED:
            return Culprit(worker, "its process was stopped (SIGSTOP)")
    for worker in workers:
        if not worker.frames:
            is_in_kernel = worker.state == IN_KERNEL
            why = "is in a call of the kernel that does not return" if is_in_kernel else "does not answer"
            return Culprit(worker, f"its process {why}")
    if busy := [worker for worker in workers if not worker.waits_for_others]:
        culprit = min(busy, key=lambda w: (w.step, -w.seconds, w.rank))
        return Culprit(culprit, f"it is at {_location(culprit)}{_others(len(workers) - len(busy))}")
    return _in_another_collective(workers)


def phase_of(worker: StalledWorker) -> str:
    """Return the worker's phase; reading data within a step is `data`."""
    reads_data = any(_READS_DATA.search(frame.file) for frame in worker.frames)
    return "data" if worker.phase == "step" and reads_data else worker.phase


def own_frames(worker: StalledWorker) -> tuple[Frame, ...]:
    """Return the frames of the job's own code, innermost first: of a loader process where the worker waits for one."""
    return tuple(frame for frame in _all_frames(worker) if not _NOT_THE_JOBS.search(frame.file))


def _location(worker: StalledWorker) -> Frame:
    """Return the innermost frame outside of torch and Python, in a loader process where the worker waits for one."""
    outside = (frame for frame in _all_frames(worker) if not _LIBRARY.search(frame.file))
    return next(outside, worker.frames[0])


def stack_text(worker: StalledWorker) -> str:
    """Return the worker's stack, and those of its loader processes, as Python writes them."""
    stacks = [("Stack", worker.frames)]
    stacks += [(f"Loader process {loader.pid}", loader.frames) for loader in worker.loaders]
    return "\n".join(_as_traceback(title, frames) for title, frames in stacks if frames)


def _in_another_collective(workers: Sequence[StalledWorker]) -> Culprit:
    """Return the worker that waits in another collective than most; where no more wait here than there, in the job's own."""

    def collective(worker: StalledWorker) -> tuple[int, Frame]:
        return worker.step, _location(worker)

    counts = Counter(map(collective, workers))
    culprit = min(workers, key=lambda w: (counts[collective(w)], -len(own_frames(w)), w.rank))
    if len(counts) == 1:
        reason = f"all ranks wait for each other at {_location(culprit)}: is the network between them cut?"
        return Culprit(culprit, reason)
    other = next(worker for worker in workers if collective(worker) != collective(culprit))
    reason = f"it waits for others at {_location(culprit)}, and rank {other.rank} at {_location(other)}"
    return Culprit(culprit, reason)


def _others(waiting: int) -> str:
    if waiting == 0:
        return ""
    return ", and the other rank waits for it" if waiting == 1 else f", and {waiting} other ranks wait for it"


def _ended(gone: int) -> str:
    return "the other rank has ended" if gone == 1 else f"{gone} other ranks have ended"


def _all_frames(worker: StalledWorker) -> list[Frame]:
    """Return the frames of the loader processes, then those of the worker itself."""
    return [
        frame for frames in (*(loader.frames for loader in worker.loaders), worker.frames) for frame in frames
    ]


def _as_traceback(title: str, frames: Sequence[Frame]) -> str:
    lines = [f"{title} (most recent call last):"]
    for file, line, function in reversed(frames):
        lines.append(f'  File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)
