"""What the tests of torch's own elastic agent and of Ray Train have their workers do, done by workers of a `[script]` job.

Ray's are `test_trainer` of test_persistence.py, `test_error` and `test_sigint_abort` of test_data_parallel_trainer.py, and
`test_elastic_training` of test_elastic_e2e.py, in python/ray/train/v2/tests.
"""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from tests.end_to_end.harness import Project, Running, named, wait_gone

if TYPE_CHECKING:
    import psutil

pytestmark = pytest.mark.nightly  # tests of own scripts, kills and drains show the same one by one

SCRIPT = """
import os, signal, sys, time
from pathlib import Path

rank, scenario = int(os.environ["RANK"]), sys.argv[1]
print(f"{scenario}: rank {rank} of {os.environ['WORLD_SIZE']}", flush=True)
print(f"{scenario}: error of rank {rank}", file=sys.stderr, flush=True)
if scenario == "fail" and rank % 2:
    raise RuntimeError(f"rank {rank} fails")
if scenario == "hang":
    if rank:
        sys.exit(7)
    time.sleep(3600)
if scenario == "zombie":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"deaf-{rank}").touch()
    time.sleep(3600)
"""
CHECKPOINTING = """
import json, os, sys, time
from pathlib import Path
import torch.distributed as dist

rank, length, fails_at = int(os.environ["RANK"]), int(sys.argv[1]), json.loads(sys.argv[2])
dist.init_process_group("gloo")
done = sorted(Path().glob("checkpoint-*.json"))
state = json.loads(done[-1].read_text()) if done else {"iteration": -1, "sizes": []}
dist.barrier()  # nobody writes the next one while another rank still looks
for iteration in range(state["iteration"] + 1, length):
    time.sleep(0.1)
    sizes = [*state["sizes"], dist.get_world_size()]
    state = {"iteration": iteration, "sizes": sizes}
    if rank == dist.get_world_size() - 1:
        part = Path(f"part-{rank}.json")
        part.write_text(json.dumps(state))
        part.rename(f"checkpoint-{iteration:03}.json")
    dist.barrier()
    if iteration in fails_at:
        raise RuntimeError(f"fails in iteration {iteration}")
dist.destroy_process_group()
"""
JOB = """
[job]
name = "scenario"
[script]
entry = "scenario.py"
args = ["%s"]
[nodes]
nproc_per_node = 2
device = "cpu"
[restarts]
budget = 0
"""


def start(project: Project, scenario: str) -> Running:
    """Start a job of two workers that do what the scenario says."""
    project.write("scenario.py", SCRIPT)
    project.write("scenario.toml", JOB % scenario)
    return project.run("scenario.toml", scenario, job="scenario")


def printed(running: Running, rank: int, stream: str) -> str:
    """Return what a rank has printed on a stream."""
    log = running.run.rank_log(1, rank, stream)
    return log.read_text() if log.exists() else ""


def test_fail(project: Project) -> None:
    """Odd ranks raise and even ones succeed: the run ends, its budget spent, and names who was first, and what it said."""
    running = start(project, "fail")
    assert running.end() == 3, running.told()
    (failed,) = named(running.events(), events.WORKER_FAILED)
    assert failed["rank"] == 1
    assert "rank 1 fails" in failed["error"]


def test_hang(project: Project) -> None:
    """A rank that sleeps while another has failed is ended with it."""
    running = start(project, "hang")
    assert running.end() == 3, running.told()
    (failed,) = named(running.events(), events.WORKER_FAILED)
    assert (failed["rank"], failed["exit_code"]) == (1, 7)
    assert [] == wait_gone("hang")


def test_redirect(project: Project) -> None:
    """Each rank's two streams are files of their own."""
    running = start(project, "redirect")
    assert running.end() == 0, running.told()
    for rank in range(2):
        assert printed(running, rank, "stdout") == f"redirect: rank {rank} of 2\n"
        assert f"redirect: error of rank {rank}\n" in printed(running, rank, "stderr")


def test_zombie(project: Project) -> None:
    """If the launcher is killed, no worker stays, not even one that is deaf to SIGTERM."""
    running = start(project, "zombie")
    deaf = [project.root / f"deaf-{rank}" for rank in range(2)]
    running.wait_for("the workers", lambda: all(path.exists() for path in deaf))
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    assert [] == wait_gone("zombie")


def start_checkpointing(project: Project, length: int, fails_at: list[int], *options: str) -> Running:
    """Start a job whose last rank writes a checkpoint after each of so many iterations, and which goes on from the newest."""
    project.write("scenario.py", CHECKPOINTING)
    job = (JOB % "").replace('[""]', f'["{length}", "{fails_at}"]').replace("budget = 0", "budget = 2")
    project.write("scenario.toml", job)
    return project.start(
        "run", "scenario.toml", "--run-id=checkpointing", *options, run_id="checkpointing", job="scenario"
    )


def checkpoints(project: Project) -> list[dict[str, Any]]:
    """Return what the job has written, in the order of iterations."""
    return [json.loads(path.read_text()) for path in sorted(project.root.glob("checkpoint-*.json"))]


def test_ray_persistence(project: Project) -> None:
    """It fails twice and goes on from the checkpoint; the same command afterwards finds the run finished."""
    for _ in range(2):
        running = start_checkpointing(project, 6, [2, 4], "--set=nodes.nproc_per_node=3")
        assert running.end() == 0, running.told()
        happened = running.events()
        assert len(named(happened, events.GENERATION_STARTED)) == 3
        failed = [event["error"] for event in named(happened, events.WORKER_FAILED)]
        assert ["fails in iteration 2", "fails in iteration 4"] == [e.split(": ")[-1] for e in failed]
        assert [{"iteration": i, "sizes": [3] * (i + 1)} for i in range(6)] == checkpoints(project)


def test_ray_sigint(project: Project) -> None:
    """Ctrl-C ends workers that compute without end, once their grace is over; nothing is left."""
    project.write("scenario.py", "print('begun', flush=True)\nwhile True:\n    pass\n")
    project.write("scenario.toml", JOB % "" + '[snapshots]\ngrace = "1 s"\n')
    running = project.run("scenario.toml", "sigint", job="scenario")
    running.wait_for(
        "the workers", lambda: all("begun" in printed(running, rank, "stdout") for rank in (0, 1))
    )
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 75, running.told()
    assert [] == wait_gone("sigint")


def test_ray_elastic(project: Project) -> None:
    """A node is lost, then all nodes at once; others come each time, and the job ends with its last iteration."""
    length = 200
    running = start_checkpointing(
        project, length, [], "--simulate-nodes=2", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1"
    )

    def agents() -> list[psutil.Process]:
        return [p for p in running.tree() if "elasticflow.launcher.agent.main" in p.cmdline()]

    def is_done_by_two(after: int) -> bool:
        return any([2] == state["sizes"][-1:] for state in checkpoints(project)[after:])

    for lost in (1, 2):
        running.wait_for(
            "an iteration of two workers", partial(is_done_by_two, len(checkpoints(project)) + 2)
        )
        for agent in agents()[:lost]:
            agent.kill()
    assert running.end() == 0, running.told()
    last = checkpoints(project)[-1]
    assert last["iteration"] == length - 1
    assert {1, 2} >= {*last["sizes"]}
    assert len(named(running.events(), events.NODE_LOST)) == 3
