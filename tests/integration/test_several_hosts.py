"""Two hosts for real, each in a network namespace of its own: one joins, its link is cut, it comes back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end.harness import Project, named, steps_of
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

    With the same job it joins; its link is cut and mended: no step is lost or repeated in the metrics.
    """
    head, other = projects("head"), projects("other")
    for project, name in zip((head, other), hosts.names, strict=True):
        project.prefix = ("ip", "netns", "exec", name)
        write_jobs(project)
    address = f"{hosts.addresses[0]}:{PORT}"
    sets = (
        f"nodes.endpoint={address}",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=5000",
        "snapshots.every=50 steps",
        "snapshots.keep.last=3",
        f"snapshots.uri={tmp_path / 'shared'}",
    )
    running = head.run("jobs/counting.toml", "hosts", *sets, job="counting", ELASTICFLOW_TOKEN=TOKEN)
    options = [f"--set={text}" for text in sets]
    join = ("run", "jobs/counting.toml", f"--join={address}", *options)
    running.wait_for_step(1)
    for wrong, says in (({}, "this machine has none"), ({"ELASTICFLOW_TOKEN": "x" * 32}, "another token")):
        stranger = other.start(*join, run_id="hosts", **wrong)
        assert 2 == stranger.end(), stranger.told()
        assert says in stranger.output.read_text()
    refused = other.start(*join, "--set=job.seed=7", run_id="hosts", ELASTICFLOW_TOKEN=TOKEN)
    assert 2 == refused.end(), refused.told()
    assert f"job.seed is {SEED} there, 7 here" in refused.output.read_text()
    assert [] == named(running.events(), events.NODE_LOST)
    assert 1 == len(named(running.events(), events.GENERATION_STARTED))
    joined = other.start(*join, run_id="hosts", job="counting", ELASTICFLOW_TOKEN=TOKEN)
    both = running.wait_for_group(2, 0)
    hosts.link("down")
    alone = running.wait_for_group(1, both)
    hosts.link("up")
    running.wait_for_group(2, alone)
    os.kill(joined.process.pid, signal.SIGTERM)
    assert 75 == joined.end(), joined.told()
    os.kill(running.process.pid, signal.SIGTERM)
    assert 75 == running.end(), running.told()

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


@pytest.mark.parametrize("hosts", ["IPv6"], indirect=True)
def test_hosts_that_speak_ipv6_only_and_have_another_interface(
    projects: Callable[[str], Project], hosts: Hosts, tmp_path: Path
) -> None:
    """The interface is named by its network. Another one comes first, and leads nowhere; no host has a route to others."""
    head, other = projects("head"), projects("other")
    address = f"[{hosts.addresses[0]}]:{PORT}"
    sets = (
        f"nodes.endpoint={address}",
        "nodes.interface=fd77::/64",
        "nodes.min=2",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=2",
        f"snapshots.uri={tmp_path / 'shared'}",
    )
    started = []
    for project, name, join in zip((head, other), hosts.names, ((), (f"--join={address}",)), strict=True):
        project.prefix = ("ip", "netns", "exec", name)
        write_jobs(project)
        options = [f"--set={text}" for text in sets]
        command = ("run", "jobs/counting.toml", *join, *options)
        # The head's run has this id; the one that joins is told it.
        own = () if join else ("--run-id=six",)
        started.append(project.start(*command, *own, run_id="six", job="counting", ELASTICFLOW_TOKEN=TOKEN))
    assert [0, 0] == [running.end() for running in started], started[0].told() + started[1].told()
    assert 2 == named(started[0].events(), events.GENERATION_STARTED)[-1]["world_size"]
