"""Several nodes played on one machine: killed workers, lost nodes, joining nodes."""

from __future__ import annotations

import os
import signal
import struct
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow import events
from tests.end_to_end import trajectory_jobs as jobs
from tests.end_to_end import trajectory_models as models
from tests.end_to_end.harness import Project, named, processes_of, steps_of, tensors
from tests.end_to_end.story import require_same_story, require_same_story_in_sinks
from tests.otlp_receiver import otlp_receiver

if TYPE_CHECKING:
    from elasticflow.run_folder import RunFolder

BATCH = 16  # of the job
EPOCHS = 1_000_000  # longer than all that happens; it is drained then


def test_job_outlives_a_worker_and_the_node_of_rank_0(project: Project) -> None:
    """A worker is killed, then the agent of rank 0's node: each costs one generation and no sample.

    Commands and sinks tell that story.
    """
    for module in ("tensorboard", "prometheus_client", "opentelemetry.proto"):
        pytest.importorskip(module, reason=f"{module} is not installed")
    jobs.write_jobs(project)
    with otlp_receiver() as received:
        run = _train(project, received.endpoint)
    require_same_story(project.root, run.path)
    require_same_story_in_sinks(run.path, received)


def _train(project: Project, endpoint: str) -> RunFolder:
    """Do that, and return the run's folder."""
    options = ("--simulate-nodes=2", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1")
    running = project.start(
        "run",
        "jobs/counting.toml",
        "--run-id=nodes",
        f"--set=train.epochs={EPOCHS}",
        '--set=logging.sinks=["tensorboard", "prometheus", "otlp"]',
        f"--set=logging.otlp.endpoint={endpoint}",
        *options,
        run_id="nodes",
        job="counting",
    )
    first = running.wait_for_group(2, 0)
    os.kill(running.pid_of(1), signal.SIGKILL)
    second = running.wait_for_group(2, first)
    above = psutil.Process(running.pid_of(0)).parents()
    agent = next(process for process in above if "elasticflow.launcher.agent.main" in process.cmdline())
    agent.kill()
    alone = running.wait_for_group(1, second)
    running.wait_for_group(2, alone)

    os.kill(running.process.pid, signal.SIGTERM)
    assert running.end() == 75, running.told()
    counts = struct.unpack(f"<{models.COUNTED}f", tensors(running.run)["model/counts"])
    steps = steps_of(running.run)
    assert list(range(1, len(steps) + 1)) == steps
    assert len(steps) * BATCH == sum(counts)
    assert max(counts) - min(counts) <= 1  # the epoch that it was drained in
    happened = running.events()
    reasons = [g["reason"] for g in named(happened, events.GENERATION_STARTED)]
    assert ["start", "crash", "agent_lost", "resized"] == reasons
    assert ["crash"] == [charged["class"] for charged in named(happened, events.BUDGET_CHARGED)]
    assert [] == processes_of("nodes")
    return running.run
