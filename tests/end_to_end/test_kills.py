"""Workers, helpers, agents and the supervisor killed for real; the job continues, and its bits are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elasticflow import events
from elasticflow.observe.incidents import incidents
from tests.end_to_end import starting, tiny_job
from tests.end_to_end.census import agents_of, sessions
from tests.end_to_end.course import Course, Expected
from tests.end_to_end.harness import named, processes_of, steps_of, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project
    from tests.end_to_end.tiny_job import Reference

# What the job's own code does to rank 1, the class it is counted under, the exit code and the error that is told.
ACTS = (
    ("raise", "user_error", 1, "ValueError: label 7 is none of the 4 classes"),
    ("segfault", "crash", -11, "killed by SIGSEGV"),
    ("exit", "user_error", 7, "exit code 7, without an exception"),
    ("leave", "crash", 0, "left with exit code 0 in the middle of training"),
    ("allocate", "oom", 1, "DefaultCPUAllocator: can't allocate memory"),
)
FRAMES = {"raise": "in _raise", "segfault": "in step", "allocate": "in step"}


def strike_restart(course: Course, victim: str) -> None:
    """Kill a worker, and then *victim* while the group restarts; return once training continues."""
    psutil.Process(course.series.running.pid_of(1)).kill()
    starting.strike(course.series, victim, within_s=starting.RESTART_S)
    course.generation = course.series.trains(0)


def require_told(course: Course) -> None:
    """A killed worker is told with its class and cause, resumes from the newest snapshot or a newer held state, and alone is charged."""
    happened = course.series.look()
    failed = [
        (e["rank"], e["exit_code"], e["class"], e["error"]) for e in named(happened, events.WORKER_FAILED)
    ]
    assert [(rank, -9, "crash", "killed by SIGKILL") for rank in (1, 0)] == failed
    assert ["crash", "crash"] == [e["class"] for e in named(happened, events.BUDGET_CHARGED)]
    committed = named(happened, events.SNAPSHOT_COMMITTED)
    after_crash = [
        e["generation"] for e in named(happened, events.GENERATION_STARTED) if e["reason"] == "crash"
    ]
    steps = []
    for started in named(happened, events.TRAINING_STARTED):
        if started["generation"] in after_crash:
            before = [e["step"] for e in committed if e["generation"] < started["generation"]]
            assert max(before, default=0) <= started["step"]
            steps.append(started["step"])
    assert max(steps) >= tiny_job.EVERY
    assert 3 == len(named(happened, events.AGENT_RESTARTED))
    assert 5 == course.series.running.state()["restarts"]


def fail_in_every_way(course: Course) -> None:
    """Have rank 1 fail in each way that is its own code's; each is told by its cause."""
    series = course.series
    for act, kind, code, error in ACTS:
        series.settle(course.generation - 1)  # progress: neither back-off nor the same error twice
        tiny_job.cue(course.project, act, 1)
        course.settle(course.generation)
        failed = series.named(events.WORKER_FAILED)[-1]
        assert (1, kind, code) == (failed["rank"], failed["class"], failed["exit_code"])
        assert error in failed["error"]
        assert FRAMES.get(act, "") in (failed["traceback"] or "")
        assert failed["others"] in (None, "1 other rank: connection closed by peer")


def test_whoever_is_killed_and_however_a_worker_fails_no_bit_is_lost(
    project: Project, tiny_reference: Reference
) -> None:
    """Workers and agent: one generation each at the stated cost, no orphan. The supervisor: nothing lives then.

    A writer and an agent are killed while the launch begins, a writer while it restarts. The next launch names the dead
    supervisor and resumes, though an agent and a fork server die while it begins, and a fork server while it restarts.
    There rank 1 fails in five ways of its own: each is told by the rank that failed first, with its class, its error and
    its frames. A process that a worker left behind and that nothing but a kill ends is gone by then, and named.
    The end is, step by step and bit for bit, that of the undisturbed run.
    """
    project.fresh = True
    tiny_job.write_standard(project)
    start_s = tiny_reference.start_s
    begins = lambda series: starting.strike(series, "writer", "agent", within_s=start_s)  # noqa: E731
    course = Course(project, "kills", 0, 0.02, at_start=begins)
    running = course.series.running
    for rank in (1, 0):
        if rank == 0:  # the first may be before any snapshot, this one is after
            course.series.settle(course.generation - 1)
        kill = psutil.Process(running.pid_of(rank)).kill
        course.blow(f"worker {rank}", kill, Expected("crash", 1, 2))
    (agent,) = agents_of(running).values()
    course.blow("agent", agent.kill, Expected("agent_lost", 0, 2))
    require_told(course)
    strike_restart(course, "writer")

    course.series.settle(course.generation - 1)
    reached = course.series.step()
    # A worker is ahead of what it has told: the supervisor that is killed below is to know of this step.
    running.wait_for_step(reached)
    tree = running.tree()
    assert len(tree) >= 4  # agent, fork server, writer, workers
    for name, module in starting.VICTIMS.items():
        (first, *_) = [process for process in tree if module in process.cmdline()]
        has_torch = "libtorch" in Path(f"/proc/{first.pid}/maps").read_text()
        assert has_torch == (name == "fork server"), name
    running.process.kill()
    running.process.wait()
    assert [] == wait_gone(running.run.run_id)
    now = incidents(running.run)

    course.series.resume()
    starting.strike(course.series, "agent", "fork server", within_s=start_s)
    strike_restart(course, "fork server")
    course.sessions |= sessions(course.series.running)
    [lost] = named(course.series.look(), events.SUPERVISOR_LOST)
    assert ("killed", 1) == (lost["kind"], lost["launch"])
    assert lost["step"] >= reached
    afterwards = incidents(running.run)[: len(now)]
    assert [(i.error, i.likely) for i in now] == [(i.error, i.likely) for i in afterwards]

    fail_in_every_way(course)
    tiny_job.cue(project, "daemonize", 1)
    course.series.wait("the cue", (project.root / "taken-daemonize@1").exists)
    assert [] == [problem for done in course.end(tiny_reference.found) for problem in done.problems]
    assert "finished" == course.series.running.state()["status"]
    assert [] == named(course.series.look(), events.RUN_FAILED)
    # Those that were dying with a fork server when they were asked to end are named as well.
    [left] = [e for e in course.series.named(events.PROCESS_LEFT_BEHIND) if e["was_killed"]]
    assert "n0" == left["node"]
    assert [] == processes_of("kills-0")
    assert list(range(1, tiny_job.STEPS + 1)) == steps_of(running.run)
