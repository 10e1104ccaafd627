"""One story under a real Slurm; the others are in `tests/measured/campaign/clusters.py`."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.clusters.slurm import stories
from tests.clusters.slurm.cluster import cluster
from tests.clusters.slurm.stories import Login
from tests.clusters.slurm.test_render import CASES, GOLDEN
from tests.end_to_end.harness import project_at
from tests.servers import MissingServerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.tiny_job import Reference

pytestmark = pytest.mark.nightly


@pytest.fixture
def login(tmp_path: Path) -> Iterator[Login]:
    """Yield the login node of a cluster of three nodes; skips where Slurm is not installed."""
    try:
        with cluster(tmp_path / "slurm", 3) as made, project_at(tmp_path / "project") as project:
            yield Login(made, project)
    except MissingServerError as error:
        pytest.skip(str(error))


def test_gang_loses_a_worker_and_a_node_leaves_at_its_limit_and_goes_on(
    login: Login, tiny_reference: Reference
) -> None:
    """Submitted; scripts are taken by sbatch itself; a worker is killed; a node goes down; notice of the limit: queued again.

    The same run continues to the same bits, and the job's exit code is that of the run.
    """
    _sbatch_takes_every_script(login)
    login.write_job("gang", 2, 3, 'time = "30 min"')
    (login.root / "jobs" / "none.toml").write_text('extends = "gang.toml"\n[slurm]\npartition = "none"\n')
    refused = login.refused("submit", "slurm", "jobs/none.toml")
    assert "invalid partition specified: none" in refused
    assert "jobs/none.toml:3:13" in refused
    job = login.submit("gang")
    stories.reach(job, 10)
    stories.kill_worker(job, 1)
    stories.reach(job, 20)
    login.cluster.call("scontrol", "update", "nodename=n3", "state=DOWN", "reason=test")
    stories.wait("the others continue", lambda: len(stories.workers(job)) == 2)
    seen = stories.step(job)
    stories.reach(job, seen + 5)
    # What Slurm sends before the limit; to the script alone.
    login.cluster.call("scancel", "--batch", "--signal=USR1", str(job.number))
    stories.requeued(login, job)
    assert stories.events(job, events.RUN_INTERRUPTED), "it was killed, not asked to leave"
    (login.root / "hurry").touch()
    stories.finish(login, job, tiny_reference)
    assert "COMPLETED" == login.cluster.state(job.number)
    assert 2 == stories.state(job)["launch"]


def test_gang_loses_its_first_node_where_jobs_make_their_own_environment(
    tmp_path: Path, tiny_reference: Reference
) -> None:
    """With SBATCH_EXPORT=NONE. The next node leads on in the same allocation, and the outage counts as the run's time.

    A job that asks for more than its partition has is queued, as Slurm does, and told.
    """
    try:
        with cluster(tmp_path / "slurm", 3) as made, project_at(tmp_path / "project") as project:
            login = Login(made, project, hands_on=False)
            login.write_job("long", 1, 2, 'time = "30 min"\npartition = "short"')
            told = subprocess.run(
                ["elasticflow", "submit", "slurm", "jobs/long.toml"],
                cwd=login.root, env=login.environment, capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert "does not start: PartitionTimeLimit" in told.stderr
            made.call("scancel", told.stdout.split()[2])
            login.write_job("first", 2, 3, 'time = "30 min"')
            job = login.submit("first")
            stories.wait("three workers", lambda: len(stories.workers(job)) == 3)
            stories.reach(job, 20)
            stories.lose_node(login, job, "n1")
            figures = stories.finish(login, job, tiny_reference)
            assert 2 == figures["launch"]
            assert figures["durations"]["outage"] > 0
            assert "0" == made.field(job.number, "Restarts")
            lines = stories.output(login, job).splitlines()
            assert {"n1", "n2", "n3"} <= {line.partition(" | ")[0] for line in lines}
    except MissingServerError as error:
        pytest.skip(str(error))


def _sbatch_takes_every_script(login: Login) -> None:
    """All that is rendered: as this cluster has no GPUs, accounts and so many nodes, without asking for those."""
    absent = (
        "partition",
        "account",
        "qos",
        "gres",
        "gpus-per-node",
        "constraint",
        "mem",
        "cpus-per-task",
        "nodes",
        "chdir",
    )
    for name in CASES:
        text = (GOLDEN / f"{name}.sbatch").read_text("utf-8").splitlines(keepends=True)
        kept = [
            line for line in text if not line.startswith(tuple(f"#SBATCH --{option}=" for option in absent))
        ]
        (script := login.root / f"{name}.sbatch").write_text("".join(kept))
        done = subprocess.run(
            ["sbatch", "--test-only", script],
            env=login.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert 0 == done.returncode, done.stderr
