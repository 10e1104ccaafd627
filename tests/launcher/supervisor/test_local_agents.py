"""The agents of the supervisor's own machine."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from elasticflow.launcher.supervisor.commands import AgentEnded
from elasticflow.launcher.supervisor.local_agents import LocalAgents


def test_agent_that_was_stopped_before_it_was_ready_is_ended() -> None:
    """Nobody misses its signs of life yet, and the first generation would wait for it for ever."""
    ended: list[int] = []
    agent = SimpleNamespace(
        end_if_stopped=lambda: ended.append(-signal.SIGKILL),
        exit_code=lambda: ended[-1] if ended else None,
        last_words=lambda: "",
        is_killed_for_memory=lambda: False,
    )
    orphans = SimpleNamespace(look=lambda _: None, pursue=lambda _: False)
    agents: Any = SimpleNamespace(_agents={"n0": agent}, _leaving=set(), _orphans=orphans, _changes=[])
    agents._see_to_end = lambda *words: LocalAgents._see_to_end(agents, *words)
    told: list[Any] = []
    LocalAgents.turn(agents, SimpleNamespace(verdict=None), told.append)  # type: ignore[arg-type]

    [event] = told
    assert isinstance(event, AgentEnded)
    assert ("n0", "was killed by SIGKILL") == (event.node, event.end.cause)
