"""What follows from what happens to a launch: generations, drains, verdict.

Knows no process, no store and no signal: it is told, and asks its `Agents` to form or drain. So it can be
tested as a table.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticflow import errors, events
from elasticflow.launcher.restarts.restart_policy import unready_end, would_end_again
from elasticflow.launcher.supervisor.drains import TOO_LATE, UNTRAINED_S, Drains
from elasticflow.launcher.supervisor.formation import TakenOver
from elasticflow.launcher.supervisor.hangs import Hangs
from elasticflow.launcher.supervisor.outcomes import GenerationEnds, Verdicts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.launcher.agent.agent_process import AgentEnd
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.restarts.generations import Generation
    from elasticflow.launcher.restarts.restarts import Restarts
    from elasticflow.launcher.supervisor.drains import Drain
    from elasticflow.launcher.supervisor.formation import Agents, Formation
    from elasticflow.launcher.supervisor.nodes import Node, Nodes
    from elasticflow.launcher.supervisor.outcomes import Verdict
    from elasticflow.protocol.messages import RefusedModule, StartedWorker, WorkersEnded, WorkersStarted


class Lifecycle:
    """Decides what comes next, until there is a verdict.

    Attributes:
        hangs: Told where workers stand still.
        generation: The generation that runs, or None between two.
        verdict: How the launch ended, or None while it goes on.
    """

    def __init__(
        self,
        journal: Journal,
        restarts: Restarts,
        agents: Agents,
        nodes: Nodes,
        formation: Formation,
        grace_s: float,
        untrained_s: float = UNTRAINED_S,
    ) -> None:
        self._journal = journal
        self._agents = agents
        self._nodes = nodes
        self._formation = formation
        self._verdicts = Verdicts(journal)
        self._drains = Drains(journal, grace_s, untrained_s)
        self._ends = GenerationEnds(journal, restarts, nodes, formation, self._drains, self._verdicts)
        self._unready_ends: dict[str, tuple[str, ...]] = {}
        self.hangs = Hangs(journal, agents)
        self.generation: Generation | None = None
        self.verdict: Verdict | None = None

    @property
    def is_idle(self) -> bool:
        """Whether agents are ready and run no generation."""
        return self.generation is None and len(self._nodes) > 0

    @property
    def is_leaving(self) -> bool:
        """Whether a drain was asked for with which the launch ends."""
        return self._drains.now is not None and self._drains.now.ends

    def has_node(self, node: str) -> bool:
        """Return whether the agent of *node* is ready."""
        return node in self._nodes

    # --- what happens -----------------------------------------------------------------------------------

    def node_joined(self, node: Node, refused: Sequence[RefusedModule] = ()) -> None:
        """A node's agent is ready; its fork server has *refused* to import some modules beforehand."""
        generation = self.generation
        if generation is not None and node.name in generation.running:
            # The agent that was to run its workers died before anybody noticed; this one knows nothing of them.
            generation.lost[node.name] = ("agent_lost", f"the agent of {node.name} was started again")
            self._stop(generation, also_alone=True)
            self._conclude(generation)
        self._unready_ends.pop(node.name, None)
        self._nodes.join(node, time.monotonic())
        self._journal.event(events.NODE_JOINED, node=node.name, host=node.host, nproc=node.nproc)
        for module in refused:
            self._journal.event(events.PRELOAD_REFUSED, module=module.module, reason=module.reason)

    def node_leaving(self, node: str) -> None:
        """A node is about to be taken away: its workers, and with them all others, leave after a step."""
        if node not in self._nodes:
            return
        self._nodes.leave(node)
        if self.generation is None or node not in self.generation.nodes:
            self._release()
        elif self._drains.now is None:
            self._ask_to_drain("preempted", f"node {node} is leaving", ends=False)

    def node_lost(self, node: str, kind: str, error: str) -> None:
        """A node's agent is gone, and its workers with it."""
        if self._nodes.lose(node):
            self._journal.event(events.NODE_LOST, node=node, reason=error)
            self._agents.release(node)  # should it live after all, it must not go on
        generation = self.generation
        if generation is None or node not in generation.nodes or node in generation.ended:
            return
        generation.lost[node] = (kind, error)
        self._stop(generation)
        self._conclude(generation)

    def agent_died(self, node: str, end: AgentEnd) -> bool:
        """Return whether to start the agent again; its workers have died with it."""
        error = f"the agent of {node} {end.cause}"
        was_ready = node in self._nodes
        was_needed = self.generation is not None and node in self.generation.nodes
        self.node_lost(node, "agent_lost", error)
        if not was_ready:
            described = unready_end(end.cause, is_its_own_doing=end.is_its_own_doing)
            self._unready_ends[node] = (*self._unready_ends.get(node, ()), described)
        if self.verdict is not None or was_needed:
            return self.verdict is None
        if self._nodes.are_enough:  # a spare that keeps dying is let go
            return self._nodes.may_come_back(node)
        unready_ends = self._unready_ends.get(node, ())
        if would_end_again(unready_ends):
            error = f"the agent of {node} does not get ready, it {end.cause}\n{end.last_words}".rstrip()
        self._settle(self._ends.restart_or_fail(None, "agent_lost", error, unready_ends=unready_ends))
        self._nodes.expect(node)
        return self.verdict is None

    def workers_started(self, message: WorkersStarted) -> list[StartedWorker]:
        """Return all workers of the generation that runs, now that those of one more node have started."""
        generation = self.generation
        if generation is None or generation.number != message.generation:
            return []
        generation.workers[message.node] = message.workers
        return [worker for node in generation.nodes for worker in generation.workers.get(node, ())]

    def group_ended(self, message: WorkersEnded) -> None:
        """The workers of a generation have ended on one node, as its agent's message says."""
        generation = self.generation
        if generation is None or generation.number != message.generation:
            return
        generation.ended[message.node] = message.workers
        if message.failed:
            self._stop(generation)
        self._conclude(generation)

    def time_passed(self) -> None:
        """Form the next generation if it is time, take in nodes that came, end a drain that takes too long."""
        now = time.monotonic()
        if self.verdict is not None:
            return
        generation = self.generation
        if generation is None:
            self._form(now)
        elif not generation.is_stopping and self.hangs.is_found(generation):
            self._stop(generation, also_alone=True)
        elif self._drains.now is None and not generation.is_stopping:
            if generation.step is not None:
                self._nodes.clear_blame()
            if self._nodes.has_room_for_more(generation.nodes, now):
                self._ask_to_drain("resized", f"{len(self._nodes)} nodes are ready", ends=False)
        if (late := self._drains.late(now)) is not None:
            self._drain_took_too_long(late)

    def asked_to_leave(self, reason: str) -> None:
        """Drain and end: all workers leave after the same step, with a snapshot."""
        self._ask_to_drain("drained", reason, ends=True)
        if self.generation is None:
            self.interrupt(reason)

    def fenced(self, generation: int) -> None:
        """A snapshot of *generation* was refused, since a later one exists."""
        is_ours = self.generation is not None and self.generation.number == generation
        if is_ours:  # else this launch itself has gone on to a later one
            self._settle(self._ends.taken_over())

    def interrupt(self, reason: str, code: int = errors.INTERRUPTED) -> None:
        """End the launch now; the same command goes on. A run that has finished or failed stays so."""
        if self.verdict is None or (code == errors.KILLED_BY_USER and self.verdict.status == "interrupted"):
            self.verdict = self._verdicts.interrupted(reason, code)

    # --- what follows -----------------------------------------------------------------------------------

    def _form(self, now: float) -> None:
        try:
            self.generation = self._formation.form(now)
        except OSError as error:  # the store does not answer: it may at the next try
            why = f"no generation can be claimed: {error}"
            self._settle(self._ends.restart_or_fail(None, "storage", why))
        except TakenOver:
            self._settle(self._ends.taken_over())

    def _ask_to_drain(self, kind: str, reason: str, *, ends: bool) -> None:
        was_asked = self._drains.now is not None
        self._drains.ask(kind, reason, ends=ends)
        if self.generation is not None and not was_asked:
            self._agents.request("drain", self.generation.number)

    def _drain_took_too_long(self, drain: Drain) -> None:
        if drain.ends or self.generation is None:
            self.interrupt(TOO_LATE)
        else:
            self._stop(self.generation, also_alone=True)

    def _stop(self, generation: Generation, *, also_alone: bool = False) -> None:
        """Have the workers of all nodes killed: they would wait for the one that failed."""
        if not generation.is_stopping:
            generation.is_stopping = True
            if also_alone or len(generation.nodes) > 1:
                self._agents.request("stop", generation.number)

    def _conclude(self, generation: Generation) -> None:
        """Once no worker is left anywhere: what ended the generation, and what comes next."""
        if not generation.is_over:
            return
        self.generation = None
        self._settle(self._ends.of(generation))
        self._release()

    def _settle(self, verdict: Verdict | None) -> None:
        """End the launch with *verdict*, if it is one and the first."""
        self.verdict = self.verdict or verdict

    def _release(self) -> None:
        """Let the nodes go that asked to, once they run nothing."""
        for node in self._nodes.leaving():
            if self.generation is None or node not in self.generation.nodes:
                self._nodes.lose(node)
                self._journal.event(events.NODE_LEFT, node=node)
                self._agents.release(node)
