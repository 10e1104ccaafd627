"""Starting and ending the agent's process; what it runs is a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.errors import PortTakenError
from elasticflow.jobfile.tables.job import Job
from elasticflow.launcher.agent.agent_process import (
    AgentConfig,
    AgentEnd,
    AgentProcess,
    build_agent_process,
)
from elasticflow.launcher.fork_server.protocol import Setup
from elasticflow.launcher.fork_server.server_process import HELPER_KILLED, STORE_LOST, HelperLostError
from elasticflow.launcher.rendezvous.network import listen
from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.protocol.store_address import StoreAddress
from elasticflow.run_folder import RunFolder
from elasticflow.snapshots.client.writer_process import WriterStart
from tests.compiler.jobs import make_job
from tests.launcher.conftest import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = AgentConfig(
    setup=Setup(
        "/launch/train.py",
        ("/project",),
        ("model",),
        environment={"ELASTICFLOW_RUN_ID": "run"},
        log="/run/logs/agent.log",
    ),
    run_folder="/run",
    node="n0",
    rendezvous="c10d://127.0.0.1:1/elasticflow",
    hang_timeout_s=1.5,
    grace_s=30.0,
    writer=WriterStart("s3://bucket", "run", SnapshotSettings(options={"secret": "s3cr3t"})),
)


def _config(folder: Path) -> AgentConfig:
    return replace(CONFIG, setup=replace(CONFIG.setup, log=str(folder / "logs" / "agent.log")))


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, real_processes: None) -> Iterator[AgentProcess]:
    """Yield an agent whose program is the test's script `program`, in place of Python."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "program"))
    made = AgentProcess(_config(tmp_path), "launch-1")
    yield made
    made.end()


def _program(folder: Path, text: str) -> None:
    (folder / "program").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "program").chmod(0o755)


def test_agent_whose_log_was_removed_has_ended_all_the_same(agent: AgentProcess, tmp_path: Path) -> None:
    """Someone made room: the agent is started again, and the launch goes on."""
    _program(tmp_path, "cat > /dev/null; echo words; exit 4")
    agent.start()
    shutil.rmtree(tmp_path / "logs")
    wait_until(lambda: agent.exit_code() is not None)
    assert (4, "") == (agent.exit_code(), agent.last_words())


def test_configuration_comes_back_as_it_was() -> None:
    """What the agent reads is what the supervisor wrote."""
    assert from_json(AgentConfig, json.loads(to_json(CONFIG))) == CONFIG


@pytest.mark.parametrize("is_script", [True, False])
def test_worker_that_runs_a_script_has_no_standby(tmp_path: Path, *, is_script: bool) -> None:
    """A standby runs train.py, which such a launch does not have, whatever a restart would gain."""
    tables = {"job": {"name": "own"}, "script": {"entry": "own.py"}}
    plan = plan_job(
        Job.model_validate(tables) if is_script else make_job(), project_root=tmp_path, job_files=()
    )
    run = RunFolder.of(tmp_path, "own", "run")
    address = StoreAddress("127.0.0.1", 1)
    agent = build_agent_process(plan, run, run.launch(1), "n0", address, tmp_path, CONFIG.writer, "launch-1")
    assert agent._config.warm == ("fork" if is_script else "auto")


def test_agent_gets_its_configuration_where_nobody_else_reads_it(agent: AgentProcess, tmp_path: Path) -> None:
    """On standard input: command lines are public, and options may hold keys. Its parent is named on argv."""
    _program(tmp_path, f'echo "$@" > {tmp_path}/argv; echo $ELASTICFLOW_LAUNCH_ID; cat; exit 4')
    agent.start()
    wait_until(lambda: agent.exit_code() is not None)

    assert 4 == agent.exit_code()
    assert f"-P -m elasticflow.launcher.agent.main {os.getpid()}\n" == (tmp_path / "argv").read_text()
    config = _config(tmp_path)
    assert f"launch-1\n{to_json(config)}" == agent.last_words()


def test_agent_leads_a_session_of_its_own(agent: AgentProcess, tmp_path: Path) -> None:
    """Ctrl-C in a terminal goes to the foreground group: the supervisor alone."""
    _program(
        tmp_path, f"echo $$ > {tmp_path}/pid.partial; mv {tmp_path}/pid.partial {tmp_path}/pid; sleep 60"
    )
    agent.start()
    wait_until((tmp_path / "pid").exists)

    pid = int((tmp_path / "pid").read_text())
    assert pid == os.getsid(pid)
    assert agent.exit_code() is None


def test_ended_agent_is_gone(agent: AgentProcess, tmp_path: Path) -> None:
    """It is killed, not asked; ending it again, or before it was started, does nothing."""
    agent.end()
    _program(tmp_path, f'trap "" TERM; touch {tmp_path}/ready; exec sleep 60')
    agent.start()
    wait_until((tmp_path / "ready").exists)
    began = time.monotonic()
    agent.end()
    agent.end()

    assert -9 == agent.exit_code()
    assert time.monotonic() - began < 1


def test_what_an_agent_said_before_it_knew_its_log_is_kept(agent: AgentProcess, tmp_path: Path) -> None:
    """Also where nobody has asked how it ended."""
    _program(tmp_path, f"echo early; touch {tmp_path}/said; exit 1")
    agent.start()
    wait_until((tmp_path / "said").exists)
    agent.end()

    assert "early\n" == (tmp_path / "logs" / "agent.log").read_text()


def test_agent_that_dies_before_it_reads_is_no_error(agent: AgentProcess, tmp_path: Path) -> None:
    """Its exit code says so; the supervisor decides."""
    _program(tmp_path, "exec 0<&-; exit 1")
    agent.start()
    wait_until(lambda: agent.exit_code() is not None)

    assert 1 == agent.exit_code()


def test_last_words_are_the_end_of_all_agents_output(agent: AgentProcess, tmp_path: Path) -> None:
    """The log is appended to, by both streams; a long one is shown from its end, and nothing of the start before."""
    _program(tmp_path, "printf '%03000d' 7; echo no luck >&2; exit 1")
    for _ in range(2):
        agent.start()
        wait_until(lambda: agent.exit_code() is not None)

    assert agent.last_words().endswith("7no luck\n")
    assert 2000 == len(agent.last_words())
    _program(tmp_path, "echo more")
    agent.start()
    wait_until(lambda: agent.exit_code() is not None)
    assert "more\n" == agent.last_words()
    assert len("more\n") + 2 * len("no luck\n") + 6000 == (tmp_path / "logs" / "agent.log").stat().st_size


@pytest.mark.parametrize(
    ("end", "cause", "is_its_own_doing"),
    [
        (AgentEnd(-9), "was killed by SIGKILL", False),
        (AgentEnd(-9, is_for_memory=True), "was killed by SIGKILL (memory ran out)", True),
        (AgentEnd(-11), "was killed by SIGSEGV", True),
        (AgentEnd(STORE_LOST, "x\n"), "ended, since the launch's store does not answer", False),
        (
            AgentEnd(HELPER_KILLED, "a warning\nits fork server was killed by SIGKILL\n"),
            "ended, since its fork server was killed by SIGKILL",
            False,
        ),
        (
            AgentEnd(1, "Traceback\nOSError: no memory\n\nits snapshot writer ended with exit code 1\n"),
            "ended, since its snapshot writer ended with exit code 1",
            True,
        ),
        (AgentEnd(1, "Traceback\nImportError: libgomp.so.1\n"), "ended: ImportError: libgomp.so.1", True),
        (AgentEnd(3), "ended with exit code 3", True),
        (AgentEnd(0, "said something"), "ended with exit code 0", True),
    ],
)
def test_how_an_agent_ended_is_said_by_its_cause(
    end: AgentEnd, cause: str, *, is_its_own_doing: bool
) -> None:
    """A helper's end is the agent's reason; whoever was killed from outside may fare better next time, unless memory ran out."""
    assert (cause, is_its_own_doing) == (end.cause, end.is_its_own_doing)


@pytest.mark.parametrize(
    ("code", "said", "agent_code"),
    [
        (-9, "its fork server was killed by SIGKILL", HELPER_KILLED),
        (-11, "its fork server was killed by SIGSEGV", 1),
        (7, "its fork server ended with exit code 7", 1),
    ],
)
def test_lost_helper_decides_how_the_agent_ends(code: int, said: str, agent_code: int) -> None:
    """Only what was killed from outside has the agent's own exit code for that."""
    lost = HelperLostError("fork server", code)
    assert (said, agent_code) == (str(lost), lost.agent_exit_code)


def test_free_port_is_found_and_held() -> None:
    """Port 0 takes one that is free."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[1] > 0


def test_taken_port_is_refused_by_name() -> None:
    """The key, the port and the cause, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTakenError) as refused:
            listen("127.0.0.1", port)

    expected = f"nodes.endpoint: cannot listen on 127.0.0.1:{port}: Address already in use"
    assert expected == refused.value.message
    assert str(refused.value.remedy).startswith(
        "end the process that uses the port, or name another one in nodes.e"
    )
    assert str(refused.value.remedy).endswith("to take part in a run that is led there: --join")
