"""How the agent's process ends, and what it must not import."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow.launcher.agent import main
from elasticflow.launcher.fork_server.client import ForkServer
from elasticflow.launcher.fork_server.protocol import TorchrunRefusedError
from elasticflow.launcher.fork_server.server_process import HELPER_KILLED, STORE_LOST, HelperLostError
from elasticflow.protocol.store_address import StoreLostError
from tests.launcher.agent.test_agent_process import CONFIG

if TYPE_CHECKING:
    from elasticflow.launcher.fork_server.protocol import Setup

# All that an agent ever imports, its helpers' modules too: they are started while it imports, and import torch by name.
_IMPORTS = """
import importlib, pathlib, sys
import elasticflow.launcher.agent, elasticflow.snapshots.client.writer_process
for path in pathlib.Path(elasticflow.launcher.agent.__file__).parent.glob("*.py"):
    importlib.import_module(f"elasticflow.launcher.agent.{path.stem}")
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")))
"""


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (HelperLostError("fork server", -9), HELPER_KILLED, "its fork server was killed by SIGKILL"),
        (HelperLostError("fork server", 1), 1, "its fork server ended with exit code 1"),
        (TorchrunRefusedError("why"), 1, "torchrun refuses the launch's arguments: why"),
        (StoreLostError("the store does not answer"), STORE_LOST, "the store does not answer"),
        (None, 0, ""),
    ],
)
def test_last_line_says_why_it_ends(
    error: Exception | None, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor repeats it, and takes from the code whether somebody else is to blame."""

    def serve() -> None:
        if error is not None:
            raise error

    assert code == main._end_of(serve)
    assert told == capsys.readouterr().err.strip()


def test_server_started_anew_leaves_the_log_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the agent's output from its start: to move lines out of the log, which is open for appending, is an error."""
    started: list[Setup] = []
    monkeypatch.setattr(ForkServer, "start", lambda setup, _: started.append(setup))
    ahead: Any = SimpleNamespace(end=lambda: None)
    main._fork_server(ahead, replace(CONFIG, imports_anew=True), 3, {"NAME": "value"})
    assert [("", "value")] == [(setup.log, setup.environment["NAME"]) for setup in started]


@pytest.mark.usefixtures("real_processes")
def test_agent_imports_no_torch() -> None:
    """It would be there two seconds later, with 100 MB more; the fork server has it for the workers."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS],
        cwd=Path(main.__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "[]\n" == done.stdout
