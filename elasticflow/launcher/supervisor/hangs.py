"""Workers that stand still on all nodes: their stacks, and who is to blame.

Each agent tells when all workers of its node have stood still for too long. Once those of all nodes have, every agent
is asked for stacks; when they are there, the rank that the others wait for is named, and the group is killed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from elasticflow import events
from elasticflow.launcher.agent.hang_culprit import StalledWorker, find_culprit

if TYPE_CHECKING:
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.generations import Generation
    from elasticflow.launcher.supervisor.formation import Agents

_ANSWER_S = 5.0


class Hangs:
    """The hangs of a launch."""

    def __init__(self, journal: Journal, agents: Agents) -> None:
        self._journal, self._agents = journal, agents

    def told(self, message: dict[str, Any], generation: Generation | None) -> None:
        """Take in an agent's message: whether its node stands still, or where its workers stand."""
        if generation is None or generation.number != message["generation"]:
            return
        if message["type"] == "stacks":
            generation.stacks[message["node"]] = message["workers"]
        elif message["is_so"]:
            generation.standing.add(message["node"])
        else:
            generation.standing.discard(message["node"])

    def is_found(self, generation: Generation) -> bool:
        """Return whether *generation* hangs and is to be killed: then the rank that is to blame has been told.

        Stacks are asked for first; a node that does not answer in time is not waited for.
        """
        running = [node for node in generation.nodes if node not in generation.ended]
        now = time.monotonic()
        if generation.stacks_asked is None:
            if running and generation.standing.issuperset(running):
                generation.stacks_asked = now
                self._agents.request("stacks", generation.number)
            return False
        if not generation.stacks.keys() >= set(running) and now < generation.stacks_asked + _ANSWER_S:
            return False
        self._tell(generation)
        return True

    def _tell(self, generation: Generation) -> None:
        found = [StalledWorker.of(each) for of_node in generation.stacks.values() for each in of_node]
        if not found:  # killed all the same
            error = "no progress, and no node told where its workers stand"
            generation.hung[0] = {"class": "hang", "error": error}
            return
        standing, reason = find_culprit(found)
        phase, seconds = standing.doing, standing.seconds
        self._journal.event(
            events.HANG_DETECTED,
            rank=standing.rank,
            node=standing.node,
            phase=phase,
            step=standing.step,
            seconds=seconds,
            limit_s=standing.limit_s,
            reason=reason,
            frames=[str(frame) for frame in standing.own_frames],
            stacks=standing.log,
        )
        error = f"no progress for {seconds:.0f} s in phase {phase}: {reason}"
        generation.hung[standing.rank] = {"class": "hang", "error": error, "traceback": standing.text()}
