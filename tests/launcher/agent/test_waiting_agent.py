"""An agent that is started before its launch is known."""

from __future__ import annotations

import sys
from functools import partial
from importlib import util
from typing import TYPE_CHECKING

import pytest

from elasticflow.launcher.agent import waiting_agent
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from elasticflow.launcher.agent.waiting_agent import WaitingAgent


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_processes: None) -> Iterator[Path]:
    """Yield a program that takes Python's place, and tells its launch; no agent is ahead before or after."""
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho launch $ELASTICFLOW_LAUNCH_ID\ncat\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(waiting_agent, "_ahead", None)
    yield program
    if waiting_agent._ahead is not None:
        waiting_agent._ahead.end()


def _text(agent: WaitingAgent) -> str:
    agent.output.seek(0)
    return agent.output.read().decode()


def test_the_first_launch_takes_the_agent_that_was_started_ahead() -> None:
    """Its id is the launch's; whoever comes next has a new agent, and so has a launch of another id."""
    waiting_agent.start_ahead(["run", "job.toml"], {})
    ahead = waiting_agent._ahead
    assert ahead is not None
    launch_id = waiting_agent.next_launch_id()
    assert launch_id == ahead.launch_id
    other = waiting_agent.waiting_agent("other")
    first, again = waiting_agent.waiting_agent(launch_id), waiting_agent.waiting_agent(launch_id)
    try:
        assert first is ahead
        assert first.process.pid not in (other.process.pid, again.process.pid)
        assert waiting_agent.next_launch_id() != launch_id
        for agent, told in ((first, launch_id), (other, "other"), (again, launch_id)):
            wait_until(partial(_text, agent))
            assert f"launch {told}\n" == _text(agent)
    finally:
        for agent in (first, other, again):
            agent.end()
    assert first.process.returncode is not None


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        ([], {}),
        (["validate", "job.toml"], {}),
        (["run", "--help"], {}),
        (["run", "job.toml", "--dry-run"], {}),
        (["run", "jo"], {"_ELASTICFLOW_COMPLETE": "bash"}),
    ],
)
def test_a_command_that_launches_nothing_starts_no_agent(
    words: list[str], environment: dict[str, str]
) -> None:
    """It would be for nothing."""
    waiting_agent.start_ahead(words, environment)
    assert waiting_agent._ahead is None


def test_without_torch_no_agent_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch says what is missing."""
    monkeypatch.setattr(util, "find_spec", lambda _: None)
    waiting_agent.start_ahead(["run", "job.toml"], {})
    assert waiting_agent._ahead is None
