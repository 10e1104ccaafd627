"""A machine that takes part in a launch which another one leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from elasticflow.errors import ANSWER_IS_NO
from elasticflow.launcher import joined_node
from elasticflow.launcher.joined_node import JoinedNode

if TYPE_CHECKING:
    import pytest

    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.protocol.control_store import ControlStore


class _Store:
    """Keys of a launch that goes on."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def add(self, _: str, number: int) -> int:
        return number

    def set(self, _: str, value: str) -> None:
        self.told.append(value)

    def check(self, _: list[str]) -> bool:
        return False


class _Agent:
    """It ends as soon as it is started."""

    def __init__(self) -> None:
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def exit_code(self) -> int:
        return 1

    def last_words(self) -> str:
        return "ModuleNotFoundError: No module named 'torch'"

    def end(self) -> None:
        pass


def test_agent_that_keeps_ending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last words say why; the machine that leads has heard of each end."""
    monkeypatch.setattr(joined_node, "_POLL_S", 0.001)
    store, agent, said = _Store(), _Agent(), list[str]()
    code = JoinedNode("n", cast("AgentProcess", agent), cast("ControlStore", store), said.append).run()

    assert ANSWER_IS_NO == code
    assert (5, 5) == (agent.starts, len(store.told))
    assert agent.last_words() == said[-1]
