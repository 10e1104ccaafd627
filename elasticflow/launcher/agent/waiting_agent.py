"""An agent's process that does not know its launch yet; its fork server imports torch meanwhile.

A command that trains starts one before it reads the job file: it is all that the first step has to wait for. Only what a
bare interpreter has is imported here.
"""

from __future__ import annotations

import contextlib
import os
from importlib import util
from typing import IO, TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.system.installation import module_command
from elasticflow.system.shared_memory import memory_file

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_LAUNCH = frozenset({"-h", "--help", "--dry-run", "--hosts"})
_ahead: WaitingAgent | None = None


class WaitingAgent:
    """An agent's process that waits for its configuration; it dies with the thread that started it.

    It is exec'd, so it inherits none of this process' sockets or locks.

    Attributes:
        output: File for the lines that the agent and its helpers print before they know their log.
    """

    def __init__(self, launch_id: str) -> None:
        # A command that needs no agent does not pay for the import.
        import subprocess

        self.launch_id = launch_id
        self.output: IO[bytes] = os.fdopen(memory_file("agent-output"), "w+b", buffering=0)
        self.process = subprocess.Popen(
            module_command("elasticflow.launcher.agent.main", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=self.output,
            stderr=self.output,
            env={**os.environ, worker_environment.LAUNCH_ID: launch_id},
            start_new_session=True,  # Ctrl-C in a terminal reaches the supervisor only
        )

    def end(self) -> None:
        """Kill it, if it lives; it is gone afterwards."""
        self.process.kill()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.output.close()


def new_launch_id() -> str:
    """Return an id that tells a launch from every other one, on any machine."""
    return os.urandom(8).hex()


def start_ahead(words: list[str], environment: Mapping[str, str]) -> None:
    """Start the agent of this process' first launch, if a command line of these *words* will need one.

    To be called from the main thread, once, before anything else is imported.
    """
    global _ahead  # noqa: PLW0603  # one command per process
    if words[:1] not in (["run"], ["resume"]) or not _NO_LAUNCH.isdisjoint(
        word.partition("=")[0] for word in words
    ):
        return
    if "_ELASTICFLOW_COMPLETE" not in environment and util.find_spec("torch") is not None:
        _ahead = WaitingAgent(new_launch_id())


def next_launch_id() -> str:
    """Return the id for the next launch of this process: that of the agent started ahead, if it waits."""
    return new_launch_id() if _ahead is None else _ahead.launch_id


def waiting_agent(launch_id: str) -> WaitingAgent:
    """Return an agent for the launch *launch_id*: the one that was started ahead for it, or a new one."""
    global _ahead
    if _ahead is not None and _ahead.launch_id == launch_id:
        agent, _ahead = _ahead, None
        return agent
    return WaitingAgent(launch_id)
