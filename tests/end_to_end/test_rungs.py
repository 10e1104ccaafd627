"""The scripts of examples/rungs on all three rungs: killed, drained and resized."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from tests.end_to_end.harness import named, steps_of, tensors, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running

JOB = "examples/rungs/rungs.toml"
# Epochs, or steps; and how many steps that are.
LENGTHS = {"tutorial": ("1", 63), "mingpt": ("1", 47), "nanogpt": ("60", 60)}
pytestmark = pytest.mark.campaign  # test_own_loop.py and test_own_script.py run at every push


def _start(
    project: Project, run_id: str, script: str, length: str, pause: float, workers: int = 2
) -> Running:
    return project.run(
        JOB, run_id, f'script.entry="examples/rungs/{script}.py"',
        f'script.args=["{length}", "--pause={pause}"]', f"nodes.nproc_per_node={workers}", job="rungs",
    )  # fmt: skip


def _resume(project: Project, run_id: str, *sets: str) -> Running:
    options = [f"--set={text}" for text in sets]
    return project.start("resume", run_id, *options, run_id=run_id, job="rungs")


def _printed(running: Running, generation: int) -> str:
    path = running.run.rank_log(generation, 0, "stdout")
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("name", LENGTHS)
def test_rung_0_goes_on_from_the_script_s_own_checkpoint(project: Project, name: str) -> None:
    """Killed, drained, and on one worker to its end; who failed first is told, and nothing is left."""
    length = {"tutorial": 500, "mingpt": 500, "nanogpt": 20_000}[name]
    script, checkpoint = f"{name}_0", project.root / f"{name}.pt"
    run = _start(project, "own", script, str(length), 0.002)
    run.wait_for("a checkpoint", checkpoint.exists)
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.wait_for("the second group", lambda: "resuming after" in _printed(run, 2))
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.told()
    [failed] = named(run.events(), events.WORKER_FAILED)
    assert (failed["rank"], failed["error"]) == (1, "killed by SIGKILL")
    last = _resume(project, "own", 'script.args=["1"]', "nodes.nproc_per_node=1")
    assert last.end() == 0, last.told()
    assert "resuming after" in _printed(last, 3)
    assert [] == wait_gone("own")


def _disturbed(project: Project, script: str, length: str, *sets: str) -> Running:
    """Return the end of a run that was killed, drained, and resumed with *sets*."""
    run = _start(project, "disturbed", script, length, 0.1)
    run.wait_for("a snapshot", lambda: named(run.events(), events.SNAPSHOT_COMMITTED))
    os.kill(run.pid_of(1), signal.SIGKILL)
    run.wait_for_step(14, generation=1)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75, run.told()
    last = _resume(project, "disturbed", f'script.args=["{length}"]', *sets)
    assert last.end() == 0, last.told()
    assert ["crash", "drained"] == [e["class"] for e in named(last.events(), events.GENERATION_ENDED)][:2]
    assert [] == wait_gone("disturbed")
    return last


def _assert_same(expected: Running, got: Running, steps: int) -> None:
    assert steps_of(got.run) == steps_of(expected.run) == list(range(1, steps + 1))
    theirs, ours = tensors(expected.run), tensors(got.run)
    assert theirs.keys() == ours.keys()
    assert [key for key in theirs if theirs[key] != ours[key]] == []


@pytest.mark.parametrize("name", LENGTHS)
def test_rung_1_repeats_and_loses_no_step(project: Project, name: str) -> None:
    """With as many workers throughout even the bits are those of an undisturbed run."""
    length, steps = LENGTHS[name]
    alone = _start(project, "alone", f"{name}_1", length, 0)
    last = _disturbed(project, f"{name}_1", length)
    assert alone.end() == 0, alone.told()
    _assert_same(alone, last, steps)


@pytest.mark.parametrize("name", LENGTHS)
def test_rung_1_goes_on_with_other_numbers_of_workers(project: Project, name: str) -> None:
    """Two, then three, then one."""
    length, steps = LENGTHS[name]
    run = _start(project, "resized", f"{name}_1", length, 0.1)
    for count, step in ((3, 14), (1, 28)):
        run.wait_for_step(step)
        run.process.send_signal(signal.SIGTERM)
        assert run.end() == 75, run.told()
        run = _resume(project, "resized", f"nodes.nproc_per_node={count}")
    assert run.end() == 0, run.told()
    assert steps_of(run.run) == list(range(1, steps + 1))


@pytest.mark.parametrize("name", LENGTHS)
def test_rung_2_ends_with_the_same_bits_on_another_number_of_workers(project: Project, name: str) -> None:
    """The undisturbed run has one worker from the beginning; the other one two, killed and drained, and then one."""
    length, steps = LENGTHS[name]
    alone = _start(project, "alone", f"{name}_2", length, 0, workers=1)
    last = _disturbed(project, f"{name}_2", length, "nodes.nproc_per_node=1")
    assert alone.end() == 0, alone.told()
    _assert_same(alone, last, steps)
