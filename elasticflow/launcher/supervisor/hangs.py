"""Workers that stand still on all nodes: whether that is a hang, and which rank the others wait for; pure.

Each agent tells when all workers of its node have stood still for too long. Once those of all nodes have, every agent
is asked for stacks; when they are there, the rank that the others wait for is named, and the group is killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.launcher.supervisor.hang_culprit import find_culprit, own_frames, phase_of, stack_text

if TYPE_CHECKING:
    from elasticflow.events import EventRecord
    from elasticflow.launcher.supervisor.generations import Generation

ANSWER_S = 5.0
"""A node that does not answer in time is not waited for."""


class Hang(NamedTuple):
    """A hang.

    Attributes:
        rank: The rank that the others wait for; 0 if no node told where its workers stand.
        raised: What it was doing, in the form of a `worker.raised` line.
        fields: Those of the event `hang.detected`; None if no node told.
    """

    rank: int
    raised: EventRecord
    fields: dict[str, Any] | None


def stands_still(generation: Generation) -> bool:
    """Return whether all workers of all nodes that have not ended stand still."""
    running = generation.running
    return bool(running) and generation.stalled_nodes.issuperset(running)


def has_answered(generation: Generation, now: float) -> bool:
    """Return whether the stacks of all nodes are there, or have been waited for long enough, at the monotonic time *now*."""
    assert generation.stacks_asked is not None, "stacks are asked for first"
    return generation.stacks.keys() >= set(generation.running) or now >= generation.stacks_asked + ANSWER_S


def find_hang(generation: Generation) -> Hang:
    """Return which rank of *generation* the others wait for, by the stacks that are there."""
    workers = [worker for of_node in generation.stacks.values() for worker in of_node]
    if not workers:
        error = "no progress, and no node told where its workers stand"
        return Hang(0, {"class": "hang", "error": error}, None)
    worker, reason = find_culprit(workers)
    phase = phase_of(worker)
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
    }
    error = f"no progress for {worker.seconds:.0f} s in phase {phase}: {reason}"
    return Hang(worker.rank, {"class": "hang", "error": error, "traceback": stack_text(worker)}, fields)
