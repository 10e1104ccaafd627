"""Two hosts for real, each in a network namespace of its own: one joins, its link is cut, it comes back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end.harness import ROOT, Project, named, steps_of
from tests.end_to_end.trajectory_jobs import SEED, write_jobs
from tests.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

PORT = 29400
TOKEN = "a-token-of-these-tests"


@pytest.fixture
def hosts(request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """Yield two hosts; skips where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    made = Hosts(is_v6=getattr(request, "param", "") == "IPv6")
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield made
    made.remove()


def test_host_is_refused_with_another_job_then_joins_is_cut_off_and_comes_back(
    projects: Callable[[str], Project], hosts: Hosts, tmp_path: Path
) -> None:
    """One host begins; others, with no token, a wrong one, or another job, are refused, and the run does not notice.

    So is one whose snapshots lie in a folder of its own. With the same job it joins; its link is cut and mended: no step is
    lost or repeated in the metrics. The head has the logs of the other host, which lie in a folder of that one.
    """
    head, other, apart = projects("head"), projects("other"), projects("apart")
    (tmp_path / "shared").mkdir()
    for project in (head, other):
        (project.root / "snapshots").symlink_to(tmp_path / "shared")
    apart.prefix = ("ip", "netns", "exec", hosts.names[1])
    write_jobs(apart)
    for project, name in zip((head, other), hosts.names, strict=True):
        project.prefix = ("ip", "netns", "exec", name)
        write_jobs(project)
    address = f"{hosts.addresses[0]}:{PORT}"
    sets = (
        f"nodes.endpoint={address}",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=1000000",
        "snapshots.every=50 steps",
        "snapshots.keep.last=3",
        "snapshots.uri=snapshots",
    )
    running = head.run("jobs/counting.toml", "hosts", *sets, job="counting", ELASTICFLOW_TOKEN=TOKEN)
    options = [f"--set={text}" for text in sets]
    join = ("run", "jobs/counting.toml", f"--join={address}", *options)
    running.wait_for_step(1)
    unshared = apart.start(*join, run_id="hosts", ELASTICFLOW_TOKEN=TOKEN)
    for wrong, says in (({}, "this machine has none"), ({"ELASTICFLOW_TOKEN": "x" * 32}, "another token")):
        stranger = other.start(*join, run_id="hosts", **wrong)
        assert 2 == stranger.end(), stranger.told()
        assert says in stranger.output.read_text()
    refused = other.start(*join, "--set=job.seed=7", run_id="hosts", ELASTICFLOW_TOKEN=TOKEN)
    assert 2 == refused.end(), refused.told()
    assert f"job.seed is {SEED} there, 7 here" in refused.output.read_text()
    assert 2 == unshared.end(), unshared.told()
    assert f"nothing of it lies in {apart.root / 'snapshots'}" in unshared.output.read_text()
    assert [] == named(running.events(), events.NODE_LOST)
    assert 1 == len(named(running.events(), events.GENERATION_STARTED))
    joined = other.start(*join, run_id="hosts", job="counting", ELASTICFLOW_TOKEN=TOKEN)
    both = running.wait_for_group(2, 0)
    logs = head.start("logs", "hosts", "--rank=1", "--format=json", run_id="hosts")
    assert 0 == logs.end(), logs.told()
    lies_there = "".join(path.read_text() for path in joined.run.generation_logs(both).glob("rank1.*"))
    shown = [json.loads(line) for line in logs.output.read_text().splitlines()]
    assert shown
    assert all(line.get("text", line.get("timestamp")) in lies_there for line in shown), shown
    hosts.link("down")
    alone = running.wait_for_group(1, both)
    hosts.link("up")
    again = running.wait_for_group(2, alone)
    os.kill(joined.process.pid, signal.SIGTERM)
    assert 75 == joined.end(), joined.told()
    os.kill(running.process.pid, signal.SIGTERM)
    assert 75 == running.end(), running.told()

    logs = head.start("logs", "hosts", f"--generation={again}", run_id="hosts")
    assert 0 == logs.end(), logs.told()
    # It left, and sent its logs before.
    assert "not to be had" not in logs.output.read_text()
    assert any(running.run.generation_logs(again).glob("rank1.*"))
    happened = running.events()
    assert "it has given no sign of life" in [lost["reason"] for lost in named(happened, events.NODE_LOST)]
    assert {"resized", "node_lost", "preempted"} <= {
        formed["reason"] for formed in named(happened, events.GENERATION_STARTED)
    }
    assert [hosts.addresses[1]] == [event["address"] for event in named(happened, events.CONNECTION_REFUSED)]
    written = [path for project in (head, other) for path in project.root.rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    steps = steps_of(running.run)
    assert list(range(1, len(steps) + 1)) == steps


# Read by Python when it starts: this host's clock is an hour late.
LATE_CLOCK = """
import time
_now = time.time
time.time = lambda: _now() - 3600
"""


@pytest.mark.parametrize("hosts", ["IPv6"], indirect=True)
def test_hosts_that_speak_ipv6_only_with_clocks_that_differ(
    projects: Callable[[str], Project], hosts: Hosts, tmp_path: Path
) -> None:
    """A case of a matrix. The interface is named by its network; another one comes first, and leads nowhere.

    The clock of the machine that joins is an hour late: a worker is killed there, and the times that are told are true.
    """
    head, other = projects("head"), projects("other")
    address = f"[{hosts.addresses[0]}]:{PORT}"
    sets = (
        f"nodes.endpoint={address}",
        "nodes.interface=fd77::/64",
        "nodes.min=2",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=1000000",
        "snapshots.every=50 steps",
        f"snapshots.uri={tmp_path / 'shared'}",
    )
    started = []
    for project, name, join in zip((head, other), hosts.names, ((), (f"--join={address}",)), strict=True):
        project.prefix = ("ip", "netns", "exec", name)
        write_jobs(project)
        job = project.root / "jobs" / "counting.toml"
        job.write_text(
            job.read_text().replace(f"seed = {SEED}\n", "") + "\n[matrix.axes]\njob.seed = [1, 2]\n"
        )
        project.write("clock/sitecustomize.py", LATE_CLOCK)
        options = [f"--set={text}" for text in sets]
        # The head's run has this id; the one that joins is told it.
        more = join or ("--run-id=six",)
        variables = {"ELASTICFLOW_TOKEN": TOKEN}
        if join:
            variables["PYTHONPATH"] = f"{project.root / 'clock'}{os.pathsep}{ROOT}"
        command = ("run", "jobs/counting.toml", "--case=seed2", *more, *options)
        started.append(project.start(*command, run_id="six-seed2", job="counting-seed2", **variables))
    running, joined = started
    both = running.wait_for_group(2, 0)
    there = next(worker for worker in running.state()["workers"] if worker["node"] != "n0")
    os.kill(there["pid"], signal.SIGKILL)
    running.wait_for_group(2, both)
    os.kill(running.process.pid, signal.SIGTERM)
    assert [75, 75] == [running.end(), joined.end()], running.told() + joined.told()
    generation = running.state()["generation"]
    logs = {each.run.rank_log(generation, there["rank"]).read_text() for each in started}
    assert 1 == len(logs), logs
    happened = running.events()
    assert "SIGKILL" in named(happened, events.WORKER_FAILED)[0]["error"]
    ended = named(happened, events.GENERATION_ENDED)[0]
    begun = named(happened, events.TRAINING_FIRST_STEP)[-1]
    for told in (ended, begun):
        assert 0 <= told["seconds_since_failure"] < 600, told
