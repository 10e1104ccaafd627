"""Runs under a real Slurm that are disturbed as clusters disturb them: `python -m tests.measured.campaign.clusters` writes its part of `clusters.md`.

Each ends with the same weights and losses as an undisturbed run, bit for bit (exact mode), or the program fails.
"""

from __future__ import annotations

import itertools
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from elasticflow import events
from tests.clusters.slurm import stories
from tests.clusters.slurm.cluster import cluster, missing
from tests.clusters.slurm.stories import Login
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import project_at
from tests.servers import free_port

if TYPE_CHECKING:
    from tests.clusters.slurm.stories import SlurmJob
    from tests.end_to_end.tiny_job import Reference

TABLE = Path(__file__).with_suffix(".md")
_HEADING = "## A site's Slurm\n"  # to the end of the table's file
Figures = dict[str, Any]
Story = Callable[["Login", "Reference"], Figures]


def to_the_end(login: Login, reference: Reference) -> Figures:
    """Four nodes, nothing happens."""
    login.write_job("plain", 2, 4, 'time = "30 min"')
    job = login.submit("plain")
    stories.wait("four workers", lambda: len(stories.workers(job)) == 4)
    return stories.finish(login, job, reference)


def worker_killed(login: Login, reference: Reference) -> Figures:
    """A worker is killed with -9, on a node that does not lead."""
    login.write_job("killed", 2, 4, 'time = "30 min"')
    job = login.submit("killed")
    stories.reach(job, 20)
    stories.kill_worker(job, 2)
    return stories.finish(login, job, reference)


def node_down(login: Login, reference: Reference) -> Figures:
    """A node is set DOWN: four nodes become three, in the same allocation."""
    login.write_job("down", 2, 4, 'time = "30 min"')
    job = login.submit("down")
    stories.wait("four workers", lambda: len(stories.workers(job)) == 4)
    stories.reach(job, 20)
    login.cluster.call("scontrol", "update", "nodename=n4", "state=DOWN", "reason=test")
    stories.wait("three workers", lambda: len(stories.workers(job)) == 3)
    return stories.finish(login, job, reference)


def preempted(login: Login, reference: Reference) -> Figures:
    """A job in a partition of higher priority takes all nodes; its end lets the first one begin again."""
    login.write_job("preempted", 2, 4, 'time = "30 min"\npartition = "low"')
    job = login.submit("preempted")
    stories.reach(job, 20)
    other = login.occupy("--partition=high", "--nodes=4")
    stories.wait("the other one runs", lambda: login.cluster.state(other) == "RUNNING")
    assert stories.events(job, events.RUN_INTERRUPTED), "it was killed, not asked to leave"
    login.cluster.call("scancel", str(other))
    stories.requeued(login, job)
    return stories.finish(login, job, reference)


def limit_twice(login: Login, reference: Reference) -> Figures:
    """A time limit of a minute, reached twice: Slurm's own notice, half a minute before it."""
    login.environment["TINY_PAUSE_S"] = "0.25"  # too slow for the limit; without it once "hurry" is there
    login.write_job("limit", 2, 3, 'time = "1 min"\nnotice = "30 s"')
    job = login.submit("limit")
    for times in (1, 2):
        stories.requeued(login, job, times)
        left = stories.events(job, events.RUN_INTERRUPTED)
        assert len(left) == times, "it was killed, not asked to leave"
        if times == 2:
            (login.root / "hurry").touch()
    figures = stories.finish(login, job, reference)
    (login.root / "hurry").unlink()
    return figures


def array_grows(login: Login, reference: Reference) -> Figures:
    """An array of four, two nodes being busy at first: two elements train, then four."""
    port = free_port()
    more = f'endpoint = "127.0.0.1:{port}"\n[torchrun]\nrdzv_conf = {{ is_host = false }}'
    login.write_job("array", 1, 4, 'form = "array"\ntime = "30 min"\npartition = "low"', more)
    store = login.start("rendezvous", "serve", "--port", str(port))
    try:
        other = login.occupy("--partition=high", "--nodes=2")
        stories.wait("the other one runs", lambda: login.cluster.state(other) == "RUNNING")
        job = login.submit("array")
        stories.wait("two workers", lambda: len(stories.workers(job)) == 2)
        stories.reach(job, 20)
        login.cluster.call("scancel", str(other))
        stories.wait("four workers", lambda: len(stories.workers(job)) == 4)
        return stories.finish(login, job, reference)
    finally:
        store.send_signal(signal.SIGTERM)
        store.wait(timeout=60)


def array_leader_requeued(login: Login, reference: Reference) -> Figures:
    """The element of an array that leads is queued again: another one leads on, and it comes back as one more node."""
    port = free_port()
    more = f'endpoint = "127.0.0.1:{port}"\n[torchrun]\nrdzv_conf = {{ is_host = false }}'
    login.write_job("leader", 1, 3, 'form = "array"\ntime = "30 min"\npartition = "low"', more)
    store = login.start("rendezvous", "serve", "--port", str(port))
    try:
        job = login.submit("leader")
        stories.wait("three workers", lambda: len(stories.workers(job)) == 3)
        stories.reach(job, 20)
        # By the array's name: an element's own number may be that of the array, which means all of them.
        leader = f"{job.number}_{_of_leader(job, 'SLURM_ARRAY_TASK_ID')}"
        login.cluster.call("scontrol", "requeue", leader)
        stories.wait("another one leads", lambda: stories.state(job).get("launch") == 2)
        login.cluster.call("scontrol", "update", f"JobId={leader}", "StartTime=now")
        return stories.finish(login, job, reference)
    finally:
        store.send_signal(signal.SIGTERM)
        store.wait(timeout=60)


def head_node_lost(login: Login, reference: Reference) -> Figures:
    """The first node is lost, and the batch script with it: the store is outside, the others continue and end the job."""
    port = free_port()
    more = f'endpoint = "127.0.0.1:{port}"\n[torchrun]\nrdzv_conf = {{ is_host = false }}'
    login.write_job("head", 2, 4, 'time = "30 min"', more)
    store = login.start("rendezvous", "serve", "--port", str(port))
    try:
        job = login.submit("head")
        stories.wait("four workers", lambda: len(stories.workers(job)) == 4)
        stories.reach(job, 20)
        stories.lose_node(login, job, "n1")
        stories.wait("the others continue", lambda: len(stories.workers(job)) == 3)
        return stories.finish(login, job, reference)
    finally:
        store.send_signal(signal.SIGTERM)
        store.wait(timeout=60)


def leaders_lost(login: Login, reference: Reference) -> Figures:
    """The node of the batch script is lost together with the node whose process leads the run: another one leads on."""
    port = free_port()
    more = f'endpoint = "127.0.0.1:{port}"\n[torchrun]\nrdzv_conf = {{ is_host = false }}'
    login.write_job("leaders", 1, 4, 'time = "30 min"', more)
    store = login.start("rendezvous", "serve", "--port", str(port))
    try:
        job = login.submit("leaders")
        stories.wait("four workers", lambda: len(stories.workers(job)) == 4)
        stories.reach(job, 20)
        for node in {"n1", _of_leader(job, "SLURMD_NODENAME")}:
            stories.lose_node(login, job, node)
        stories.wait("another one leads", lambda: stories.state(job).get("launch") == 2)
        return stories.finish(login, job, reference)
    finally:
        store.send_signal(signal.SIGTERM)
        store.wait(timeout=60)


def leading_node_lost(login: Login, reference: Reference) -> Figures:
    """The first node is lost, whose process leads and serves the store: the next one leads on, in the same allocation."""
    login.write_job("first", 2, 4, 'time = "30 min"')
    job = login.submit("first")
    stories.wait("four workers", lambda: len(stories.workers(job)) == 4)
    stories.reach(job, 20)
    stories.lose_node(login, job, "n1")
    figures = stories.finish(login, job, reference)
    assert figures["launch"] == 2
    assert figures["durations"]["outage"] > 1, "the outage is not counted"
    return figures


def leader_killed(login: Login, reference: Reference) -> Figures:
    """The process that leads is killed, on a node that stays: its node starts it again."""
    login.write_job("killed", 2, 3, 'time = "30 min"')
    job = login.submit("killed")
    stories.reach(job, 20)
    os.kill(stories.state(job)["pid"], signal.SIGKILL)
    figures = stories.finish(login, job, reference)
    assert "0" == login.cluster.field(job.number, "Restarts"), "Slurm had to start the job again"
    return figures


def cancelled(login: Login, reference: Reference) -> Figures:
    """`elasticflow cancel` on the login node: not queued again; submitted again with its run id, it continues."""
    login.write_job("cancelled", 2, 3, 'time = "30 min"\nexit_codes = { "75" = 7 }')
    job = login.submit("cancelled")
    stories.reach(job, 20)
    for command in ("status", "logs", "why", "report", "metrics"):
        login.call(command, job.run.run_id)
    login.call("cancel", job.run.run_id)
    stories.wait("the job is over", lambda: stories.is_over(login, job))
    assert "FAILED" == login.cluster.state(job.number)
    assert "7:0" == login.cluster.field(job.number, "ExitCode")
    assert "0" == login.cluster.field(job.number, "Restarts")
    return stories.finish(login, login.submit("cancelled", f"--run-id={job.run.run_id}"), reference)


def scancelled(login: Login, reference: Reference) -> Figures:
    """`scancel`: ends the job, with a snapshot within Slurm's KillWait, and does not queue it again."""
    login.write_job("scancelled", 2, 3, 'time = "30 min"')
    job = login.submit("scancelled")
    stories.reach(job, 20)
    login.cluster.call("scancel", str(job.number))
    stories.wait("the job is over", lambda: stories.is_over(login, job))
    assert "CANCELLED" == login.cluster.state(job.number)
    stories.wait("the run has left", lambda: stories.state(job)["status"] == "interrupted", 60)
    return stories.finish(login, login.submit("scancelled", f"--run-id={job.run.run_id}"), reference)


STORIES: tuple[Story, ...] = (
    to_the_end, worker_killed, node_down, preempted, limit_twice, array_grows, array_leader_requeued,
    head_node_lost, leaders_lost, leading_node_lost, leader_killed, cancelled, scancelled,
)  # fmt: skip


def _of_leader(job: SlurmJob, variable: str) -> str:
    """Return what Slurm has told the process that leads, in a variable of its environment."""
    return psutil.Process(stories.events(job, events.RUN_STARTED)[-1]["pid"]).environ()[variable]


def _row(story: Story, accounting: str, seconds: float, job: Figures) -> str:
    parts = ", ".join(f"{part} {value:.1f}" for part, value in job["durations"].items() if value >= 0.05)
    what = (story.__doc__ or "").splitlines()[0].rstrip(".")
    name = story.__name__.replace("_", " ")
    return f"| {name} | {what} | {accounting} | {job['launch']} | {job['generation']} | {seconds:.0f} | {parts} |"


def main(names: list[str]) -> int:
    """Play the stories, or those named, and write the table if all were played and ended well."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the daemons end with this program
    rows, failed = [], []
    settings = [setting for setting in (True, False) if missing(has_accounting=setting) is None]
    with tempfile.TemporaryDirectory(prefix="elasticflow-clusters-") as folder:
        reference = tiny_job.reference(Path(folder) / "reference")
        for has_accounting, story in itertools.product(settings, STORIES):
            if names and story.__name__ not in names:
                continue
            name = f"{story.__name__}{'_charged' if has_accounting else ''}"
            place, began = Path(folder) / name, time.monotonic()
            try:
                with (
                    cluster(place / "slurm", has_accounting=has_accounting) as made,
                    project_at(place / "project") as project,
                ):
                    figures = story(Login(made, project, hands_on=False), reference)
            except (AssertionError, subprocess.SubprocessError) as error:
                failed.append(name)
                print(f"{name}: FAILED: {error}", flush=True)
                continue
            rows.append(_row(story, "on" if has_accounting else "off", time.monotonic() - began, figures))
            print(rows[-1], flush=True)
    if not names and not failed:
        before, _, _ = TABLE.read_text().partition(_HEADING)
        TABLE.write_text(f"{before.rstrip()}\n\n{_page(rows)}")
    return 1 if failed else 0


def _page(rows: list[str]) -> str:
    slurm = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True).stdout.strip()
    load = max(os.getloadavg())
    head = f"""\
{_HEADING}
`python -m tests.measured.campaign.clusters`, {datetime.now(UTC):%Y-%m-%d}: {slurm}, four nodes on one machine of 2 cores that did other work as well (load {load:.0f}); set up as a
site would: EnforcePartLimits=NO, SBATCH_EXPORT=NONE on the login node, accounting off, and on (slurmdbd with associations and limits enforced);
torch {version("torch")}, Python {platform.python_version()}, gloo. The tiny job in exact mode, 200 steps, one worker on each node. Each run ended with the
losses and tensors of an undisturbed one, bit for bit.

Launches: how often the run was started. Generations: worker groups. Seconds are those of the whole story, the making of the cluster
and its end counted; a job that is queued again is started at once by the test, not after the two minutes that Slurm takes. Parts: where
the run's own time went, in seconds; outage: from the last sign of life of a lost leader to the next launch.

| story | what | accounting | launches | generations | seconds | parts |
|---|---|---|---|---|---|---|
"""
    return head + "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
