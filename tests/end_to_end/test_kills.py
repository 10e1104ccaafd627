"""Workers, agents and supervisors killed for real; the job goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from elasticflow import events
from elasticflow.observe.why import incidents
from tests.end_to_end.harness import Project, named, processes_of, read_lines, steps_of

QUICK = ("train.epochs=3", "snapshots.every=20 steps")


@pytest.mark.parametrize(("rank", "step"), [(0, 25), (1, 41), (1, 5)])
def test_killed_worker_costs_one_restart_and_the_steps_since_the_snapshot(
    project: Project, rank: int, step: int
) -> None:
    """Kill -9 of a worker: the run finishes, with one restart, no gap and no repeat in its metrics."""
    running = project.run("jobs/mnist.toml", f"kill-{rank}-{step}", *QUICK)
    reached = running.wait_for_step(step)
    os.kill(running.pid_of(rank), signal.SIGKILL)

    assert running.end() == 0, running.told()
    happened = running.events()
    failed = named(happened, events.WORKER_FAILED)
    assert [(rank, -9, "crash", "killed by SIGKILL")] == [
        (f["rank"], f["exit_code"], f["class"], f["error"]) for f in failed
    ]
    assert 2 == len(named(happened, events.GENERATION_STARTED))
    assert 1 == running.state()["restarts"]
    steps = steps_of(running.run)
    assert list(range(1, steps[-1] + 1)) == steps
    again = named(happened, events.TRAINING_STARTED)[1]
    committed = [s["step"] for s in named(happened, events.SNAPSHOT_COMMITTED) if s["generation"] == 1]
    assert max(committed, default=0) == again["step"]
    redone = [r["step"] for r in read_lines(running.run.metrics_redone) if "eval" not in r]
    assert len(redone) <= max(reached + 20 - again["step"], 0) + 20


def test_killed_supervisor_leaves_nothing_alive(project: Project) -> None:
    """Kill -9 of the supervisor alone: a second later nothing of the tree is alive; the next launch says so and goes on."""
    running = project.run("jobs/mnist.toml", "headless", *QUICK)
    running.wait_for_step(25)
    assert len(running.tree()) >= 4  # agent, fork server, writer, workers
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    time.sleep(1.0)

    assert [] == processes_of("headless")

    [now] = incidents(running.run)
    again = project.run("jobs/mnist.toml", "headless", *QUICK)
    assert again.end() == 0, again.told()
    steps = steps_of(again.run)
    assert list(range(1, steps[-1] + 1)) == steps
    [lost] = named(again.events(), events.SUPERVISOR_LOST)
    assert ("killed", 1) == (lost["kind"], lost["launch"])
    assert lost["step"] >= 25
    [afterwards] = incidents(running.run)
    assert (now.error, now.likely) == (afterwards.error, afterwards.likely)


@pytest.mark.parametrize("module", ["launcher.agent.node", "launcher.agent.fork_server", "snapshots.writer"])
def test_killed_agent_is_started_again_free_of_charge(project: Project, module: str) -> None:
    """Kill -9 of the agent or a helper without which it cannot go on: another takes over, the budget is untouched.

    Of the three the fork server alone has loaded torch.
    """
    running = project.run("jobs/mnist.toml", "agentless", *QUICK)
    running.wait_for_step(25)
    victim = next(p for p in running.tree() if f"elasticflow.{module}" in p.cmdline())
    has_torch = "libtorch" in Path(f"/proc/{victim.pid}/maps").read_text()
    os.kill(victim.pid, signal.SIGKILL)

    assert running.end() == 0, running.told()
    assert has_torch == (module == "launcher.agent.fork_server")
    happened = running.events()
    assert 1 == len(named(happened, events.AGENT_RESTARTED))
    assert [] == named(happened, events.BUDGET_CHARGED)
    steps = steps_of(running.run)
    assert list(range(1, steps[-1] + 1)) == steps
