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
from tests.hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

PORT = 29400


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Yield two hosts; skips where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    made = Hosts()
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield made
    made.remove()


def test_host_joins_is_cut_off_and_comes_back(
    projects: Callable[[str], Project], hosts: Hosts, tmp_path: Path
) -> None:
    """One host begins; another joins; its link is cut and mended: no step is lost or repeated in the metrics."""
    head, other = projects("head"), projects("other")
    for project, name in zip((head, other), hosts.names, strict=True):
        project.prefix = ("ip", "netns", "exec", name)
    address = f"{hosts.addresses[0]}:{PORT}"
    sets = (
        f"nodes.endpoint={address}",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=5000",
        f"snapshots.uri={tmp_path / 'shared'}",
    )
    running = head.run("jobs/mnist.toml", "hosts", *sets)
    options = [f"--set={text}" for text in sets]
    joined = other.start("run", "jobs/mnist.toml", f"--join={address}", *options, run_id="hosts")
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
    steps = steps_of(running.run)
    assert list(range(1, len(steps) + 1)) == steps


def test_host_with_another_job_is_refused(
    projects: Callable[[str], Project], hosts: Hosts, tmp_path: Path
) -> None:
    """It would train something else: refused before it starts anything, with what differs; the run does not notice."""
    head, other = projects("head"), projects("other")
    for project, name in zip((head, other), hosts.names, strict=True):
        project.prefix = ("ip", "netns", "exec", name)
    address = f"{hosts.addresses[0]}:{PORT}"
    sets = (f"nodes.endpoint={address}", "nodes.max=2", f"snapshots.uri={tmp_path / 'shared'}")
    running = head.run("jobs/mnist.toml", "refused", *sets)
    options = [f"--set={text}" for text in (*sets, "job.seed=7")]
    joined = other.start("run", "jobs/mnist.toml", f"--join={address}", *options, run_id="refused")

    assert 2 == joined.end(), joined.told()
    assert "job.seed is 1234 there, 7 here" in joined.output.read_text()
    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end() in {0, 75}, running.told()
    assert [] == named(running.events(), events.NODE_LOST)
