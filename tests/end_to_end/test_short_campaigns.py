"""Short forms of the campaigns of launching and of failures: each blow for real, the end as if there had been none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil
import pytest

from elasticflow import events
from tests.campaign import starts, tiny_job
from tests.campaign.census import agents_of
from tests.campaign.disturbed import Outcome, Series
from tests.campaign.launching import Course, Expected
from tests.end_to_end.harness import Project, processes_of, project_at

if TYPE_CHECKING:
    from collections.abc import Iterator

STEPS = 120
# What the job's own code does to rank 1, the class it is counted under, the exit code and the error that is told.
ACTS = (
    ("raise", "user_error", 1, "ValueError: label 7 is none of the 4 classes"),
    ("segfault", "crash", -11, "killed by SIGSEGV"),
    ("exit", "user_error", 7, "exit code 7, without an exception"),
    ("leave", "crash", 0, "left with exit code 0 in the middle of training"),
    ("allocate", "oom", 1, "DefaultCPUAllocator: can't allocate memory"),
)
FRAMES = {"raise": "in _raise", "segfault": "in step", "allocate": "in step"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Project, dict[str, Any]]]:
    """Yield a project with a tiny job, and what it comes to undisturbed."""
    with project_at(tmp_path_factory.mktemp("tiny") / "project") as project:
        tiny_job.write(project, STEPS, 5, 100)
        yield project, tiny_job.undisturbed(project, STEPS)


def test_each_kill_costs_one_generation_and_no_bit(tiny: tuple[Project, dict[str, Any]]) -> None:
    """A worker twice, then the agent: one generation each at the stated cost, no orphan, nothing left, the same bits."""
    project, expected = tiny
    course = Course(project, "short", 0, 0.01)
    for rank in (1, 0):
        kill = psutil.Process(course.series.running.pid_of(rank)).kill
        course.blow(f"worker {rank}", kill, Expected("crash", 1, 2))
    (agent,) = agents_of(course.series.running).values()
    course.blow("agent", agent.kill, Expected("agent_lost", 0, 2))

    assert [] == [problem for done in course.end(expected) for problem in done.problems]


@pytest.mark.timeout(300)  # three starts, beside whatever else runs
@pytest.mark.parametrize("run", [0, 1])
def test_no_kill_while_a_launch_starts_ends_the_run(tiny: tuple[Project, dict[str, Any]], run: int) -> None:
    """Agent, writer and fork server, one each at start, restart and resumption: the run goes on, and no bit changes."""
    project, expected = tiny
    kills = starts.plan(2, starts.start_seconds(project.started[0].run))[run]
    starts.strike(project, kills, expected)

    assert {"agent", "writer", "fork server"} == {kill.victim for kill in kills}
    assert [] == [problem for kill in kills for problem in kill.problems]


def test_each_failure_is_told_by_its_cause_and_costs_no_bit(tiny: tuple[Project, dict[str, Any]]) -> None:
    """The rank that failed first, its class, its error and its frames; then the job goes on and ends with the same bits.

    A process that a worker left behind and that nothing but a kill ends is gone by then, and named.
    """
    project, expected = tiny
    tiny_job.reset(project)
    series = Series(project, "failures", job="tiny", TINY_PAUSE_S="0.01")
    generation = series.trains(0)
    for act, kind, code, error in ACTS:
        series.settle(generation - 1)  # progress: neither back-off nor the same error twice
        tiny_job.cue(project, act, 1)
        generation = series.trains(generation)
        failed = series.named(events.WORKER_FAILED)[-1]
        assert (1, kind, code) == (failed["rank"], failed["class"], failed["exit_code"])
        assert error in failed["error"]
        assert FRAMES.get(act, "") in (failed["traceback"] or "")
        assert failed["others"] in (None, "1 other rank: connection closed by peer")
    tiny_job.cue(project, "daemonize", 1)
    series.wait("the cue", (project.root / "taken-daemonize@1").exists)
    tiny_job.hurry(project)
    outcome = Outcome("", "")
    series.finish(expected, outcome)
    assert [] == outcome.problems
    [left] = series.named(events.PROCESS_LEFT_BEHIND)
    assert (True, "n0") == (left["was_killed"], left["node"])
    assert [] == processes_of("failures")
