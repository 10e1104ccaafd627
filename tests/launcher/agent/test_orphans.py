"""Processes that workers leave behind, as real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow.launcher.agent import orphans
from elasticflow.launcher.agent.orphans import Orphans, adopted, unclaimed
from elasticflow.run_folder import RunFolder
from tests.launcher.conftest import is_alive, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.events import EventRecord

pytestmark = [
    pytest.mark.usefixtures("real_processes"),
    pytest.mark.skipif(sys.platform != "linux", reason="Linux alone tells of them"),
]

# A worker that forks a daemon: a session of its own, and no ear for what ends others.
WORKER = """
import os, pathlib, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if sys.argv[2] == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(sys.argv[1] + ".partial").write_text(str(os.getpid()))
    os.rename(sys.argv[1] + ".partial", sys.argv[1])
    time.sleep(120)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
os._exit(0)
"""


def daemon(folder: Path, kind: str, run: RunFolder | None, launch: str | None = None) -> int:
    """Return the process that a worker of *run*, or of a launch, has left behind, which has ended."""
    place = folder / f"{kind}-{hash(run)}-{launch}"
    marks = {"ELASTICFLOW_RUN_ID": run.run_id, "ELASTICFLOW_RUN_FOLDER": str(run.path)} if run else {}
    marks |= {"ELASTICFLOW_LAUNCH_ID": launch} if launch else {}
    variables = {**os.environ, **marks}
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WORKER), str(place), kind], env=variables, check=True
    )
    return int(place.read_text())


def test_what_outlived_its_worker_is_asked_then_killed_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that listens is asked, one that does not is killed; another run's, and one without the mark, are left alone."""
    monkeypatch.setattr(orphans, "GRACE_S", 1.0)
    run, same_id = RunFolder(tmp_path / "jobs" / "run"), RunFolder(tmp_path / "other" / "run")
    ours = {kind: daemon(tmp_path, kind, run) for kind in ("listening", "stubborn")}
    others = [daemon(tmp_path, "listening", same_id), daemon(tmp_path, "listening", None)]
    told: list[EventRecord] = []
    try:
        assert set(ours.values()) == set(unclaimed(run))
        Orphans(lambda: unclaimed(run), told.append).end()

        assert {ours["listening"]: False, ours["stubborn"]: True} == {
            each["pid"]: each["was_killed"] for each in told
        }
        assert all("os.setsid()" in each["command"] or "-c" in each["command"] for each in told)
        assert not any(is_alive(pid) for pid in ours.values())
        assert all(is_alive(pid) for pid in others)
    finally:
        for pid in (*others, *ours.values()):
            if is_alive(pid):
                os.kill(pid, 9)


def test_agent_whose_python_has_a_long_path_is_no_orphan(tmp_path: Path) -> None:
    """A command is told cut short: by that an agent would be ended at once, and each one after it."""
    run = RunFolder(tmp_path / "jobs" / "run")
    marks = {"ELASTICFLOW_RUN_ID": run.run_id, "ELASTICFLOW_RUN_FOLDER": str(run.path)}
    words = ["/deep" * 40 + "/python", "-c", "read", "-m", "elasticflow.launcher.agent.main", "1"]
    agent = subprocess.Popen(
        words, executable="/bin/bash", stdin=subprocess.PIPE, env={**os.environ, **marks}
    )
    try:
        wait_until(lambda: psutil.Process(agent.pid).cmdline() == words)
        assert [] == unclaimed(run)
    finally:
        agent.kill()
        agent.communicate()


def test_what_was_forked_is_known_by_its_launch(tmp_path: Path) -> None:
    """Its environment is the fork server's, which was started before its run was known; a damaged record hides no other."""
    run = RunFolder(tmp_path / "jobs" / "run")
    for number, text in ((1, '{"launch_id": "aaaa"}'), (2, "{"), (3, '{"launch_id": "cccc"}')):
        run.launch(number).mkdir(parents=True)
        (run.launch(number) / "job.json").write_text(text)
    pids = [daemon(tmp_path, "listening", None, launch) for launch in ("aaaa", "bbbb", "cccc", None)]
    try:
        assert {pids[0], pids[2]} == set(unclaimed(run))
    finally:
        for pid in pids:
            os.kill(pid, 9)


def test_child_without_a_mark_is_no_orphan_where_the_agent_has_none_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was started without a launch's id; with one, the launch's own child is found."""
    monkeypatch.delenv("ELASTICFLOW_LAUNCH_ID", raising=False)
    run, sleep = RunFolder(tmp_path / "jobs" / "run"), [sys.executable, "-c", "import time; time.sleep(60)"]
    plain = subprocess.Popen(sleep)
    marked = subprocess.Popen(sleep, env={**os.environ, "ELASTICFLOW_LAUNCH_ID": "aaaa"})
    try:
        assert not {plain.pid, marked.pid} & set(adopted(run, ()))
        monkeypatch.setenv("ELASTICFLOW_LAUNCH_ID", "aaaa")
        assert {plain.pid, marked.pid} & set(adopted(run, ())) == {marked.pid}
    finally:
        for child in (plain, marked):
            child.kill()
            child.wait()


# The fork server, or a worker of it: it forks a child that is named as a worker's, and waits.
SERVER = """
import os, sys, time
from elasticflow.system import forked_children
os.setsid()
if sys.argv[1] == "forks":
    forked_children.name_children()
    if os.fork():
        os._exit(0)
os.write(1, b"%d" % os.getpid())
os.close(1)
time.sleep(120)
"""


def _alive(pid: int) -> list[int]:
    return [pid] if is_alive(pid) else []


def test_only_what_workers_have_started_is_told_of() -> None:
    """Processes of elasticflow's own are ended without a word; a worker's child is told of, though its command line is theirs."""
    # `-m elasticflow.` is what they are known by.
    run = [sys.executable, "-c", SERVER]
    for kind, said in (("is", []), ("forks", ["worker-child, forked by a worker"])):
        started = subprocess.Popen([*run, kind, "-m", "elasticflow.launcher"], stdout=subprocess.PIPE)
        assert started.stdout is not None
        with started.stdout:
            pid = int(started.stdout.read())
        told: list[EventRecord] = []
        Orphans(partial(_alive, pid), told.append).end()
        started.wait(60)

        assert said == [each["command"] for each in told]
        assert not is_alive(pid)


def test_what_dies_by_itself_is_not_told_of() -> None:
    """Loader processes die a moment after their worker; nobody has to be told."""
    told: list[EventRecord] = []
    dying = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    orphans = Orphans(lambda: [dying.pid], told.append)
    orphans.look(time.monotonic())
    dying.kill()
    dying.wait()
    wait_until(lambda: not orphans.pursue(time.monotonic()))

    assert [] == told
