"""The agents that a supervisor starts on its own machine: one, or several that play a cluster's nodes."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from elasticflow.launcher.agent.agent_process import AgentEnd, build_agent_process
from elasticflow.launcher.agent.orphans import Orphans, unclaimed
from elasticflow.launcher.supervisor.commands import AgentEnded, NodeLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.launcher.journal.journal import Journal
    from elasticflow.launcher.supervisor.commands import LifecycleEvent
    from elasticflow.launcher.supervisor.launch_record import Launch
    from elasticflow.launcher.supervisor.lifecycle import Lifecycle
    from elasticflow.launcher.supervisor.scale_schedule import ScaleChange


class LocalAgents:
    """Starts agents, starts them again when they die, and has nodes come and go on cue.

    Args:
        journal: Records processes that workers of a killed agent, or of a killed launch, left behind.
    """

    def __init__(self, launch: Launch, journal: Journal) -> None:
        self._launch = launch
        self._changes = list(launch.request.scale)
        self._agents: dict[str, AgentProcess] = {}
        self._leaving: set[str] = set()
        self._orphans = Orphans(lambda: unclaimed(launch.request.folder), journal.report)
        self._count = 0
        self._began = 0.0

    def begin(self) -> list[str]:
        """Start the first nodes' agents and return their ids; they import for seconds."""
        self._began = time.monotonic()
        self._orphans.look(self._began)
        first = self._changes.pop(0)
        return [self._add() for _ in range(first.nodes)]

    def turn(self, lifecycle: Lifecycle, tell: Callable[[LifecycleEvent], None]) -> None:
        """Handle agents that have ended, and nodes that are due to come or go.

        Args:
            tell: Called with each event that *lifecycle* is to know, before anything else is done.
        """
        for agent in self._agents.values():
            agent.end_if_stopped()  # one that is not ready yet gives no signs of life that could be missed
        for node in [node for node, agent in self._agents.items() if agent.exit_code() is not None]:
            self._see_to_end(node, lifecycle, tell)
            self._orphans.look(time.monotonic())
        self._orphans.pursue(time.monotonic())
        while (
            self._changes
            and lifecycle.verdict is None
            and self._changes[0].is_due(time.monotonic() - self._began)
        ):
            self._follow(self._changes.pop(0), lifecycle, tell)

    def kill(self, node: str) -> bool:
        """Kill the agent of *node* with all below it; return whether it is an agent of this machine."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.end()
        return agent is not None

    @property
    def nodes(self) -> set[str]:
        """The nodes of this machine."""
        return set(self._agents)

    @property
    def are_gone(self) -> bool:
        """True if every agent has ended."""
        return all(agent.exit_code() is not None for agent in self._agents.values())

    @property
    def not_reached(self) -> list[ScaleChange]:
        """Changes whose time has not come."""
        return [change for change in self._changes if change.cue is None]

    def end(self) -> None:
        """Kill the agents that are left, with everything below them, and end what their workers have left behind."""
        for agent in self._agents.values():
            agent.end()
        self._orphans.end()

    def _add(self) -> str:
        launch = self._launch
        # No other node of the launch ever had this id.
        node = f"n{self._count}"
        rank = (launch.request.node_rank or 0) + self._count if launch.plan.rdzv_backend == "static" else None
        self._count += 1
        self._agents[node] = build_agent_process(
            launch.plan,
            launch.request.folder,
            launch.launch_folder,
            node,
            launch.store.address,
            launch.request.project_root,
            launch.writer,
            launch.origins.launch_id,
            rank,
            accept_drift=launch.request.accept_drift,
        )
        self._agents[node].start()
        return node

    def start_again(self, node: str) -> None:
        """Start the agent of *node*, which has ended, again."""
        self._agents[node].start()

    def forget(self, node: str) -> None:
        """Forget *node*, whose agent has ended."""
        del self._agents[node]
        self._leaving.discard(node)

    def _see_to_end(self, node: str, lifecycle: Lifecycle, tell: Callable[[LifecycleEvent], None]) -> None:
        agent = self._agents[node]
        code = agent.exit_code()
        assert code is not None
        if node in self._leaving:
            tell(NodeLost(node, "preempted", "it ended before its workers had left"))
            self.forget(node)
        elif lifecycle.verdict is None:
            end = AgentEnd(code, agent.last_words(), is_for_memory=agent.is_killed_for_memory())
            tell(AgentEnded(node, end))

    def _follow(
        self, change: ScaleChange, lifecycle: Lifecycle, tell: Callable[[LifecycleEvent], None]
    ) -> None:
        present = [node for node in self._agents if node not in self._leaving]
        for _ in range(change.nodes - len(present)):
            self._add()
        for node in reversed(present[change.nodes :]):
            if change.by_force or not lifecycle.has_node(node):
                self.kill(node)
                tell(NodeLost(node, "node_lost", "killed on cue"))
                self.forget(node)
            else:
                self._leaving.add(node)
                self._agents[node].send(signal.SIGUSR1)
