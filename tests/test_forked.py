"""Programs that tests fork from one process are like programs started in fresh interpreters."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from elasticflow.snapshots.client.writer_process import WriterStart, start_writer
from tests.command_line import forks, variables_put_back
from tests.end_to_end.harness import Project, project_at

if TYPE_CHECKING:
    from tests.forked import ForkedPrograms

pytestmark = pytest.mark.e2e

PROGRAM = """
    import json, os, random, signal, sys
    import beside
    facts = {"argv": sys.argv, "environment": dict(os.environ), "cwd": os.getcwd(), "drawn": random.random()}
    facts["finders"] = [type(each).__module__ for each in sys.meta_path if "elasticflow" in type(each).__module__]
    facts["torch"] = "torch" in sys.modules
    facts["blocked"] = list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    print(json.dumps(facts))
    match sys.argv[1]:
        case "raise": raise ValueError("no such layer")
        case "exit": sys.exit(3)
        case "wait": signal.pause()
"""


def test_a_fork_is_like_a_fresh_interpreter(forked: ForkedPrograms, tmp_path: Path) -> None:
    """Arguments, variables, folder, modules beside it, exit codes, signals and tracebacks; its random numbers are its own."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    (tmp_path / "beside.py").write_text("")
    hows = ("end", "raise", "exit", "wait")
    started = [forked.start(program, how, environment={"A": "b"}, cwd=tmp_path) for how in hows]
    assert started[3].poll() is None
    with pytest.raises(TimeoutError):
        started[3].wait(0.01)
    started[3].kill()

    assert [0, 1, 3, -signal.SIGKILL] == [each.wait(60) for each in started]
    told = [json.loads(each.stdout.read_text()) for each in started[:3]]
    assert [[str(program), how] for how in hows[:3]] == [facts["argv"] for facts in told]
    assert 3 == len({facts["drawn"] for facts in told})
    for facts in told:
        assert {"A": "b"} == facts["environment"]
        assert (str(tmp_path), True) == (facts["cwd"], facts["torch"])
        assert [] == facts["blocked"] == facts["finders"]
    errors = [each.stderr.read_text() for each in started]
    assert ["", "", ""] == [errors[0], *errors[2:]]
    assert errors[1].endswith("ValueError: no such layer\n")


def test_a_forked_writer_is_like_a_fresh_one(tmp_path: Path) -> None:
    """A child of this process, with the command line, variables, folder, open files, signals and session of a fresh one."""
    told = []
    for how in (nullcontext, forks):
        with how():
            writer = start_writer(WriterStart(str(tmp_path), "run"))
        process = psutil.Process(writer.process.pid)
        folder = Path(f"/proc/{process.pid}")
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        told.append(
            {
                "command": process.cmdline(),
                "environment": process.environ(),
                "cwd": process.cwd(),
                "parent": process.ppid(),
                "session": os.getsid(process.pid),
                "opened": sorted(
                    re.sub(r"\d+", "#", str(link.readlink())) for link in (folder / "fd").iterdir()
                ),
                **{name: lines[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask")},
            }
        )
        writer.process.kill()
        assert -signal.SIGKILL == writer.process.wait(60)
        writer.close()
    assert told[0] == told[1]


SCRIPT = """
    import gc, json, os, random, signal, sys, threading
    from contextlib import suppress
    from pathlib import Path
    import numpy, psutil, torch

    def is_of_tests(process):
        return "tests.command_line" in process.cmdline()

    def told(process):
        folder = Path(f"/proc/{process.pid}")
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        opened = []
        for link in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):  # the one that lists the folder
                opened.append(str(link.readlink()))
        # Connections and files of the run come and go.
        opened = sorted(each for each in opened if not each.startswith("socket") and "/runs/" not in each)
        return {
            "command": process.cmdline(), "environment": process.environ(), "cwd": process.cwd(),
            "children": sorted(child.cmdline() for child in process.children() if not is_of_tests(child)),
            "opened": opened,
            "leads": os.getsid(process.pid) == process.pid,
            **{name: lines[name] for name in ("SigBlk", "SigIgn", "SigCgt", "Umask")},
        }

    worker = psutil.Process()
    above = worker.parents()
    command = [each.cmdline()[1:3] for each in above].index(["-m", "elasticflow"])
    streams = [
        (type(each.buffer).__name__, each.encoding, each.errors, each.write_through, each.line_buffering)
        for each in (sys.stdout, sys.stderr)
    ]
    own = {
        "argv": sys.argv, "path": sys.path, "environment": dict(os.environ), "streams": streams,
        "finders": [str(each).partition(" at ")[0] for each in sys.meta_path], "hook": str(sys.excepthook),
        "handlers": [str(signal.getsignal(each)) for each in sorted(signal.valid_signals())],
        "threads": [each.name for each in threading.enumerate()], "collects": gc.isenabled(),
    }
    print(json.dumps([random.random(), numpy.random.rand(), torch.rand(()).item()]))
    agent = above[command - 1]
    (writer,) = [each for each in agent.children() if "elasticflow.snapshots.writer.main" in each.cmdline()]
    print(json.dumps([own, *map(told, (worker, *above[:command + 1], writer))]))
"""
JOB = """
[job]
name = "told"
[script]
entry = "told.py"
[nodes]
nproc_per_node = 1
"""


def test_variables_that_libraries_set_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are new, changed or gone."""
    monkeypatch.setenv("OMP_SCHEDULE", "static")
    monkeypatch.setenv("OMP_NESTED", "false")
    before = dict(os.environ)
    with variables_put_back():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "/tmp/here"
        os.environ["OMP_SCHEDULE"] = "dynamic"
        del os.environ["OMP_NESTED"]
    assert before == dict(os.environ)


def test_a_launch_of_forks_is_like_one_of_fresh_interpreters(tmp_path: Path) -> None:
    """Command, agent, fork server, writer and worker: command lines, variables, open files, signals, sessions, streams and paths.

    Each launch draws random numbers of its own. A program that reaches a bucket, for which more is imported, came before.
    """
    drawn, told = [], []
    with project_at(tmp_path / "before") as project:
        project.start("--version", run_id="none", AWS_ENDPOINT_URL="http://127.0.0.1:9").end()
    for fresh in (True, False, False):
        with project_at(tmp_path / "project") as project:
            numbers, facts = _told_by_a_worker(project, fresh=fresh)
            drawn += numbers
            told.append(facts)
    assert len(set(drawn)) == 9
    expected, found, again = told
    # The worker twice, the fork server and its parent, the agent, the command, and the writer.
    assert len(expected) == 7
    assert found == expected
    assert again == expected


def _told_by_a_worker(project: Project, *, fresh: bool) -> tuple[list[float], list[dict[str, Any]]]:
    """Return random numbers of a worker, and what it tells of itself and the processes above it."""
    project.fresh = fresh
    project.write("told.py", textwrap.dedent(SCRIPT))
    project.write("told.toml", JOB)
    running = project.run("told.toml", "told", job="told")
    assert ("libtorch" in Path(f"/proc/{running.process.pid}/maps").read_text()) is not fresh
    assert running.end() == 0, running.told()
    drawn, facts = running.run.rank_log(1, 0, "stdout").read_text().splitlines()
    shutil.rmtree(project.root)
    # Ids of processes and launches, and ports, differ from launch to launch.
    return json.loads(drawn), json.loads(re.sub(r"[0-9a-f]{16}|\d{3,}", "#", facts))
