"""Runs on a real local Ray cluster that is disturbed: `python -m tests.measured.campaign.ray` writes `ray.md`.

Each ends with the same weights and losses as an undisturbed run without Ray, bit for bit (exact mode), or the program fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticflow import events
from tests.end_to_end import tiny_job
from tests.end_to_end.disturbed import Outcome, Series
from tests.end_to_end.harness import project_at, wait_gone
from tests.launcher.machines.clusters import LocalCluster, cluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.harness import Project

TABLE = Path(__file__).with_suffix(".md")
_DRAIN_S = 60
# Unhurried, long enough for a node of Ray to start on a loaded machine.
_STEPS = 1200


def node_added(ray: LocalCluster, series: Series) -> None:
    """A node is added to two."""
    series.running.wait_for_step(10)
    ray.add_a_node()
    series.running.wait_for("three nodes", lambda: _largest(series) == 3)


def node_removed(ray: LocalCluster, series: Series) -> None:
    """A node is removed by force: its raylet is killed."""
    series.running.wait_for_step(10)
    series.running.wait_for("all nodes", lambda: _largest(series) == ray.size)
    ray.lose_a_node()
    series.running.wait_for("fewer nodes", lambda: _last(series) == ray.size)


def node_drained(ray: LocalCluster, series: Series) -> None:
    """Ray announces that a node goes in 60 s; it has left long before."""
    series.running.wait_for_step(10)
    series.running.wait_for("all nodes", lambda: _largest(series) == ray.size)
    ray.drain_a_node(_DRAIN_S)
    series.running.wait_for("fewer nodes", lambda: _last(series) == ray.size)


def worker_killed(ray: LocalCluster, series: Series) -> None:
    """A worker is killed."""
    del ray
    series.running.wait_for_step(10)
    os.kill(series.running.pid_of(0), signal.SIGKILL)
    series.running.wait_for("a restart", lambda: len(_groups(series)) > 1)


def command_killed(ray: LocalCluster, series: Series) -> None:
    """The command is killed with -9, its nodes leave, and the same command resumes the run."""
    del ray
    series.running.wait_for("a snapshot", lambda: series.named(events.SNAPSHOT_COMMITTED))
    os.kill(series.running.process.pid, signal.SIGKILL)
    series.running.process.wait()
    assert [] == wait_gone(series.running.run.run_id, 60)
    series.again()
    series.running.wait_for("training", lambda: len(_groups(series)) > 1)


def cancelled(ray: LocalCluster, series: Series) -> None:
    """`elasticflow cancel`: all leave with a snapshot, no actor is left, and the same command resumes the run."""
    series.running.wait_for_step(10)
    run = series.running
    told = subprocess.run(
        [sys.executable, "-m", "elasticflow", "cancel", str(run.run.path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (75, []) == (run.end(), ray.actors()), (told.stdout, run.told())
    assert [] == wait_gone(run.run.run_id)
    series.again()
    series.running.wait_for("training", lambda: len(_groups(series)) > 1)


def head_restarted(ray: LocalCluster, series: Series) -> None:
    """Ray's head dies, with all that it knows, and is begun anew: the command ends, and the same command resumes the run."""
    series.running.wait_for("a snapshot", lambda: series.named(events.SNAPSHOT_COMMITTED))
    ray.restart()
    code = series.running.end()
    assert code not in {0, 2}, series.running.told()
    assert [] == wait_gone(series.running.run.run_id, 60)
    series.again(RAY_ADDRESS=ray.address)
    series.running.wait_for("training", lambda: len(_groups(series)) > 1)


STORIES: tuple[Callable[[LocalCluster, Series], None], ...] = (
    worker_killed,
    node_added,
    node_removed,
    node_drained,
    command_killed,
    cancelled,
    head_restarted,
)


def _groups(series: Series) -> list[int]:
    return [event["world_size"] for event in series.named(events.TRAINING_STARTED)]


def _largest(series: Series) -> int:
    return max(_groups(series), default=0)


def _last(series: Series) -> int:
    return (_groups(series) or [0])[-1]


def tell(
    story: Callable[[LocalCluster, Series], None],
    ray: LocalCluster,
    project: Project,
    expected: dict[str, Any],
) -> str:
    """Run one story; return its row."""
    tiny_job.reset(project)
    series = Series(
        project,
        story.__name__,
        "nodes.max=3",
        "nodes.nproc_per_node=1",
        job="tiny",
        options=("--on", "ray"),
        RAY_ADDRESS=ray.address,
        RAY_gcs_rpc_server_reconnect_timeout_s="10",  # a minute, unless it is told otherwise
    )
    story(ray, series)
    tiny_job.hurry(project)
    outcome = Outcome("", "")
    series.finish(expected, outcome)
    assert not outcome.problems, outcome.problems
    return f"| {story.__doc__} | {' -> '.join(map(str, _groups(series)))} | the same weights |"


def main() -> int:
    """Run all stories, or those that are named, and write the table if it was all."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with project_at(root / "reference") as project:
            tiny_job.write(project, _STEPS, tiny_job.EVERY, tiny_job.BUDGET)
            expected = tiny_job.undisturbed(project, _STEPS)
        rows = []
        stories = [story for story in STORIES if not sys.argv[1:] or story.__name__ in sys.argv[1:]]
        with cluster(nodes=2) as ray, project_at(root / "project") as project:
            tiny_job.write(project, _STEPS, tiny_job.EVERY, tiny_job.BUDGET)
            for story in stories:
                rows.append(tell(story, ray, project, expected))
                print(rows[-1], flush=True)
    head = (
        f"# A real local Ray cluster\n\nMade by `python -m tests.measured.campaign.ray` on {datetime.now(UTC):%Y-%m-%d}: Ray {version('ray')}, "
        f"torch {version('torch')}, Python {sys.version.split()[0]}; nodes of one CPU on one machine, a head without any.\n\n"
    )
    table = "\n".join(["| what happens | workers of each start | at the end |", "|---|---|---|", *rows, ""])
    if len(stories) == len(STORIES):
        TABLE.write_text(head + table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
