"""The pods of a rendered manifest as processes, each with a network, a process tree and files of its own (`tests/pods.py`)."""

from __future__ import annotations

import shutil
import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import named, project_at, tensors
from tests.pods import Cluster, Pod

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.tiny_job import Reference

pytestmark = pytest.mark.integration

TABLE = """
[kubernetes]
image = "registry.example.org/tiny:1"
workdir = "{workdir}"
env = {{ TINY_PAUSE_S = "0.05", OMP_NUM_THREADS = "1" }}
volumes = {{ snapshots = {{ claim = "snapshots", path = "{shared}" }} }}
"""


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Yield hosts for the pods of the tiny job, whose manifest was made by the command; skips where they cannot be made."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("iproute2 or util-linux is not installed")
    workdir, shared = tmp_path / "workspace", tmp_path / "shared"
    workdir.mkdir()
    shared.mkdir()
    with project_at(tmp_path / "project") as project:
        tiny_job.write_standard(project)
        job = project.root / "jobs" / "tiny.toml"
        job.write_text(job.read_text() + TABLE.format(workdir=workdir, shared=shared))
        sets = [f"snapshots.uri={shared}", "nodes.max=3", "nodes.nproc_per_node=1", "snapshots.keep.last=3"]
        sets += getattr(request, "param", [])
        rendered = project.start(
            *("submit", "kubernetes", "jobs/tiny.toml", "--print", "-o", "tiny.yaml"),
            *(f"--set={text}" for text in sets),
            run_id="-",
        )
        assert 0 == rendered.end(), rendered.told()
        text = (project.root / "tiny.yaml").read_text()
        # The image has the project, but not the job file: that comes with the manifest.
        image = tmp_path / "image"
        ignored = shutil.ignore_patterns("jobs", "runs", "*.yaml", "output-*")
        shutil.copytree(project.root, image, ignore=ignored)
    made = Cluster.of(tmp_path, image, text)
    made.secrets["tiny-token", "token"] = "0123456789abcdef" * 4
    try:
        made.make()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
    yield made
    made.remove()


@pytest.mark.nightly
def test_run_goes_on_whatever_becomes_of_its_pods(
    cluster: Cluster, tiny_reference: Reference, tmp_path: Path
) -> None:
    """A pod comes before the one that leads, is drained and replaced; the one that leads is lost, and is another one then.

    The job grows meanwhile. The weights are those of a run that nobody disturbed, to the bit.
    """
    one = cluster.pod(1)
    one.running.wait_for(
        "its waiting", lambda: "waiting for tiny-0.tiny:29400" in one.running.output.read_text()
    )
    head = cluster.pod(0)
    head.running.wait_for_group(2, 0)

    # Drained, as by an autoscaler: its workers leave with a snapshot.
    one.signal(signal.SIGTERM)
    assert 75 == one.exit_code(), one.running.told()
    assert "Ignore" == cluster.follows(75)
    assert ["preempted"] == [g["reason"] for g in named(head.running.events(), events.GENERATION_STARTED)][
        -1:
    ]
    one = cluster.pod(1)
    # Completions and parallelism become 3.
    two = cluster.pod(2)
    head.running.wait_for_group(3, 0)

    # The machine of the pod that leads is gone; the others stay, and find the new one at another address.
    head.kill()
    assert "Ignore" == cluster.follows(137, is_disrupted=True)
    head = cluster.pod(0)
    head.running.wait_for_group(3, 0)
    for pod in (head, one, two):
        (pod.running.run.path.parents[2] / "hurry").touch()
    codes = [pod.exit_code() for pod in (head, one, two)]
    assert [0, 0, 0] == codes, "".join(pod.running.told() for pod in cluster.pods)

    found = tensors(Catalog(Storage(str(tmp_path / "shared")), f"{head.running.run.run_id}/"))
    assert tiny_reference.found["bits"] == found


@pytest.mark.campaign
@pytest.mark.parametrize("cluster", [["kubernetes.rendezvous_pod=true"]], indirect=True)
def test_any_pod_leads_where_the_store_has_a_pod_of_its_own(
    cluster: Cluster, tiny_reference: Reference, tmp_path: Path
) -> None:
    """The pod that leads is lost, then another one that leads is drained: those that are left lead on, without waiting.

    The store's container is killed and started again meanwhile: it resumes from its volume. The weights are those of a run that nobody disturbed, to the bit.
    """
    pods = [cluster.pod(index) for index in range(3)]
    pods[0].running.wait_for(
        "its waiting", lambda: "waiting for tiny-rendezvous:29400" in pods[0].running.output.read_text()
    )
    store = cluster.rendezvous()
    leader = _leader(pods, 3)
    store.kill()
    store = cluster.rendezvous(store)
    leader.kill()
    pods.remove(leader)
    leader = _leader(pods, 2)
    leader.signal(signal.SIGTERM)
    assert 75 == leader.exit_code(), leader.running.told()
    pods.remove(leader)
    last = _leader(pods, 1)
    assert [last] == pods
    new = cluster.pod(0)
    last.running.wait_for_group(2, 0)
    for pod in (last, new):
        (pod.running.run.path.parents[2] / "hurry").touch()
    assert [0, 0] == [pod.exit_code() for pod in (last, new)], last.running.told()
    found = tensors(Catalog(Storage(str(tmp_path / "shared")), f"{last.running.run.run_id}/"))
    assert tiny_reference.found["bits"] == found


def _leader(pods: list[Pod], size: int) -> Pod:
    """Return the pod that leads a group of *size*, once there is one: it writes the run's state."""

    def leading() -> Pod | None:
        states = {pod.name: pod.running.state() for pod in pods}
        fits = [
            pod
            for pod in pods
            if states[pod.name].get("status") == "running"
            and len(states[pod.name].get("workers", ())) == size
        ]
        return fits[0] if fits else None

    leader: Pod = pods[0].running.wait_for(f"a leader of {size}", leading)
    leader.running.wait_for_group(size, 0)
    return leader


def test_refused_job_fails_at_once(cluster: Cluster) -> None:
    """Code that does not fit the job file ends the pod with a code for which the Job fails."""
    (cluster.image / "obedient.py").write_text("# nothing\n")
    pod = cluster.pod(0)
    assert 2 == pod.exit_code(), pod.running.told()
    assert "FailJob" == cluster.follows(2)
