"""Workers that stand still on all nodes: their stacks, and who is to blame.

Each agent tells when all workers of its node have stood still for too long. Once those of all nodes have, every agent
is asked for stacks; when they are there, the rank that the others wait for is named, and the group is killed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticflow import events
from elasticflow.launcher.supervisor.hang_culprit import find_culprit, own_frames, phase_of, stack_text

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.generations import Generation
    from elasticflow.launcher.supervisor.formation import Agents
    from elasticflow.protocol.messages import Stacks, Standstill

_ANSWER_S = 5.0


class Hangs:
    """The hangs of a launch."""

    def __init__(self, journal: Journal, agents: Agents) -> None:
        self._journal, self._agents = journal, agents

    def standstill(self, message: Standstill, generation: Generation | None) -> None:
        """Take in whether the workers of a node make progress."""
        if generation is not None and generation.number == message.generation:
            if message.is_so:
                generation.stalled.add(message.node)
            else:
                generation.stalled.discard(message.node)

    def stacks(self, message: Stacks, generation: Generation | None) -> None:
        """Take in where the workers of a node stand."""
        if generation is not None and generation.number == message.generation:
            generation.stacks[message.node] = message.workers

    def is_found(self, generation: Generation) -> bool:
        """Return whether *generation* hangs and is to be killed: then the rank that is to blame has been told.

        Stacks are asked for first; a node that does not answer in time is not waited for.
        """
        running = [node for node in generation.nodes if node not in generation.ended]
        now = time.monotonic()
        if generation.stacks_asked is None:
            if running and generation.stalled.issuperset(running):
                generation.stacks_asked = now
                self._agents.request("stacks", generation.number)
            return False
        if not generation.stacks.keys() >= set(running) and now < generation.stacks_asked + _ANSWER_S:
            return False
        self._tell(generation)
        return True

    def _tell(self, generation: Generation) -> None:
        stalled = [worker for workers in generation.stacks.values() for worker in workers]
        if not stalled:  # killed all the same
            error = "no progress, and no node told where its workers stand"
            generation.hung[0] = {"class": "hang", "error": error}
            return
        worker, reason = find_culprit(stalled)
        phase = phase_of(worker)
        self._journal.event(
            events.HANG_DETECTED,
            rank=worker.rank,
            node=worker.node,
            phase=phase,
            step=worker.step,
            seconds=worker.seconds,
            limit_s=worker.limit_s,
            reason=reason,
            frames=[str(frame) for frame in own_frames(worker)],
            stacks=worker.log,
        )
        error = f"no progress for {worker.seconds:.0f} s in phase {phase}: {reason}"
        generation.hung[worker.rank] = {"class": "hang", "error": error, "traceback": stack_text(worker)}
