"""A run with the memory tier, traced: a killed worker costs no snapshot interval, and nothing of the tier outlives a launch."""

from __future__ import annotations

import json
import mmap
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from elasticflow import events
from elasticflow.snapshots.memory import Slot
from elasticflow.system import fault_injection
from tests.end_to_end import tiny_job
from tests.end_to_end import trajectory_jobs as jobs
from tests.end_to_end.disturbed import MODULES, Outcome, Series
from tests.end_to_end.harness import named, steps_of, tensors, wait_gone

if TYPE_CHECKING:
    from tests.end_to_end.harness import Project, Running
    from tests.end_to_end.tiny_job import Reference

JOB, SETS = "jobs/tiny.toml", ("snapshots.every=20 steps", "snapshots.memory=1 step")
LOST_STEPS = 120


def test_killed_worker_costs_steps_and_a_killed_launch_leaves_nothing(
    project: Project, tiny_reference: Reference
) -> None:
    """Kill -9 of a worker: from memory, at the step it was in. Kill -9 of all: no process is left, then from storage.

    Both ranks trace three steps before, and the worker is killed while it traces more. The end has the bits of a run that
    nobody looked at or disturbed.
    """
    tiny_job.write_standard(project)
    running = project.run(JOB, "held", *SETS, job="tiny", TINY_PAUSE_S="0.1")
    running.wait_for_step(3)
    trace(project, "held")
    running.wait_for("the second trace", lambda: len(named(running.events(), events.PROFILE_STARTED)) > 2)
    reached = running.wait_for_step(22)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for_step(reached + 1, generation=1)
    require_unfinished_trace(running)
    again = named(running.events(), events.TRAINING_STARTED)[1]
    assert again["from_memory"]
    assert again["step"] >= reached - 1
    assert f"from memory at step {again['step']}" in running.output.read_text()
    assert [] == named(running.events(), events.SNAPSHOT_REJECTED)

    for process in [psutil.Process(running.process.pid), *running.tree()]:
        with suppress(psutil.NoSuchProcess):  # it ends with those before it
            process.kill()
    assert -signal.SIGKILL == running.process.wait()
    assert [] == wait_gone("held")
    assert steps_of(running.run)[-1] < tiny_job.STEPS
    assert [] == list(Path("/dev/shm").glob("*elasticflow*"))

    tiny_job.hurry(project)
    resumed = project.run(JOB, "held", *SETS, job="tiny")
    assert 0 == resumed.end(), resumed.told()
    first = named(resumed.events(), events.TRAINING_STARTED)[-1]
    assert not first["from_memory"]
    assert (
        first["restored_from"] in {e["name"] for e in named(resumed.events(), events.SNAPSHOT_COMMITTED)}
        or first["restored_from"] is None
    )
    steps = steps_of(resumed.run)
    assert list(range(1, tiny_job.STEPS + 1)) == steps
    assert tiny_reference.found["bits"] == tensors(resumed.run)


def test_batch_job_holds_by_itself_unless_the_memory_is_short(project: Project) -> None:
    """By default a killed worker costs fewer steps than since the last snapshot: there is none. With little memory a line says why not."""
    sets = (
        "snapshots.every=100000 steps",
        "train.epochs=1000",
        "lr_scheduler.args.T_max=1000",
        "evaluation.every=1000 epochs",
    )
    running = project.run("jobs/mnist.toml", "default", *sets)
    held = running.wait_for("a held state", lambda: running.state().get("held"))
    running.wait_for_step(int(held) + 10)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for_step(int(held) + 1, generation=1)
    again = named(running.events(), events.TRAINING_STARTED)[1]
    assert again["from_memory"]
    assert again["step"] >= int(held)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 75, running.told()

    short = project.run("jobs/mnist.toml", "short", *sets, "snapshots.staging_limit=1 MiB")
    (off,) = short.wait_for("the reason", lambda: named(short.events(), events.HELD_OFF))
    assert "1048576 are allowed" in off["reason"]
    line = f"a death costs the steps since the last snapshot: {off['reason']}"
    short.wait_for("its line", lambda: line in " ".join(short.told().split()))
    assert short.process.poll() is None
    status = project.call("status", "short").stdout
    assert f"nothing: {off['reason']}" in status
    short.process.send_signal(signal.SIGTERM)
    assert short.end() == 75, short.told()
    assert [] == named(short.events(), events.SNAPSHOT_FAILED)


def test_lost_node_of_rank_0_costs_no_held_step(project: Project) -> None:
    """BatchNorm in batch mode: the other node has rank 0's buffers. All are killed while the state goes to the new node; then it has it.

    Later the new node has no memory for a state: all resume from the newest snapshot, and that is told.
    """
    tiny_job.write(project, LOST_STEPS, 30, tiny_job.BUDGET)
    text = (
        (project.root / "jobs/tiny.toml")
        .read_text()
        .replace("trajectory_models:mlp", "trajectory_models:cnn")
    )
    project.write("jobs/tiny.toml", text.replace(jobs.EXACT, "threads = 1\n"))
    expected = tiny_job.undisturbed(project, LOST_STEPS)
    tiny_job.reset(project)
    faults = "tier.mid_broadcast=kill@1 generation=2, tier.before_receive=raise:ENOMEM cue={}"
    cue = project.root / "no-memory"
    sets = ("nodes.min=2", "nodes.max=2", "nodes.nproc_per_node=1")
    running = project.start(
        "run",
        JOB,
        "--run-id=lost",
        "--simulate-nodes=2",
        *(f"--set={text}" for text in sets),
        run_id="lost",
        job="tiny",
        TINY_PAUSE_S="0.1",
        **{fault_injection.VARIABLE: faults.format(cue)},
    )
    first = running.wait_for_group(2, 0)
    held = int(running.wait_for("a held state", lambda: running.state().get("held")))
    lose_node_of_rank_0(running)
    second = running.wait_for_group(2, first + 1)
    started = named(running.events(), events.TRAINING_STARTED)[-1]
    assert started["from_memory"], running.told()
    assert started["step"] >= held
    received = named(running.events(), events.HELD_RECEIVED)
    assert [(second, started["step"])] == [(event["generation"], event["step"]) for event in received]

    running.wait_for("a snapshot", lambda: named(running.events(), events.SNAPSHOT_COMMITTED))
    running.wait_for_step(35)
    cue.touch()
    lose_node_of_rank_0(running)
    running.wait_for_group(2, second)
    started = named(running.events(), events.TRAINING_STARTED)[-1]
    assert (30, False) == (started["step"], started["from_memory"])
    (lost,) = named(running.events(), events.HELD_LOST)
    assert "Cannot allocate memory" in lost["reason"]
    tiny_job.hurry(project)
    assert 0 == running.end(), running.told()
    assert expected["bits"] == tensors(running.run)
    assert list(range(1, LOST_STEPS + 1)) == steps_of(running.run)
    assert [] == wait_gone("lost")


def lose_node_of_rank_0(running: Running) -> None:
    """Kill the agent of rank 0's node, and its workers and writer with it."""
    above = psutil.Process(running.pid_of(0)).parents()
    next(process for process in above if MODULES["agent"] in process.cmdline()).kill()


@pytest.mark.nightly
def test_flipped_bit_is_never_taken(project: Project, tiny_reference: Reference) -> None:
    """A bit of the newest held state flips: training resumes from the one before. Then in both: from a snapshot. The same bits at the end."""
    tiny_job.write_standard(project)
    series = Series(project, "flipped", "snapshots.every=20 steps", job="tiny", TINY_PAUSE_S="0.1")
    series.reach(25)
    older, newest = flip_and_kill(series, series.trains(0), 1)
    started = series.started(1)
    assert (older, True) == (started["step"], started["from_memory"])
    assert {newest} == {event["step"] for event in series.named(events.HELD_DAMAGED)}
    older, newest = flip_and_kill(series, series.trains(1), 2)
    assert not series.started(2)["from_memory"]
    assert {older, newest} == {event["step"] for event in series.named(events.HELD_DAMAGED, 2)}
    tiny_job.hurry(project)
    outcome = Outcome("", "")
    series.finish(tiny_reference.found, outcome)
    assert [] == outcome.problems


def flip_and_kill(series: Series, generation: int, count: int) -> list[int]:
    """Flip a bit in the newest *count* of the two states that *generation* holds, and kill it; return the states' steps."""
    series.wait("two held states", lambda: held_steps(series, generation))
    workers = [series.process(f"worker {rank}") for rank in (0, 1)]
    for worker in workers:
        assert worker is not None
        worker.suspend()
    steps: list[int] = series.wait("two held states", lambda: held_steps(series, generation))
    for slot in slots_of(series):
        label = slot.label()
        if label is not None and label.step in steps[-count:]:
            slot.memory[5] ^= 1
    for worker in reversed(workers):
        assert worker is not None
        worker.kill()
    return steps


def stopped_writer(running: Running) -> psutil.Process | None:
    """Return the node's writer if it is stopped."""
    with suppress(psutil.NoSuchProcess):
        for process in running.tree():
            if MODULES["writer"] in process.cmdline() and process.status() == psutil.STATUS_STOPPED:
                return process
    return None


def slots_of(series: Series) -> list[Slot]:
    """Return the labelled slots that the node's writer holds."""
    writer = series.process("writer")
    assert writer is not None
    slots: dict[int, Slot] = {}
    for path in Path(f"/proc/{writer.pid}/fd").iterdir():
        # A file may be closed meanwhile.
        with suppress(FileNotFoundError):
            if "elasticflow-staging" in os.readlink(path):  # noqa: PTH115
                descriptor = os.open(path, os.O_RDWR)
                facts = os.fstat(descriptor)
                memory = mmap.mmap(descriptor, facts.st_size)
                # Each has two descriptors: its mapping keeps one.
                slots[facts.st_ino] = Slot(0, descriptor, facts.st_size, memory)
    return [slot for slot in slots.values() if slot.label() is not None]


def held_steps(series: Series, generation: int) -> list[int]:
    """Return the two steps that both ranks of *generation* hold, the older first; empty: none yet."""
    labels = [slot.label() for slot in slots_of(series)]
    steps = [label.step for label in labels if label is not None and label.generation == generation]
    found = sorted({step for step in steps if steps.count(step) == 2})
    return found if len(found) == 2 else []


def test_killed_while_it_holds_and_while_a_held_state_is_written(
    project: Project, tiny_reference: Reference
) -> None:
    """A rank dies before its copy counts; the next generation's while the writer is in the midst of a snapshot of a held state."""
    tiny_job.write_standard(project)
    faults = "tier.before_seal=kill@4 rank=1 generation=1, shares.mid_write=stop@1"
    sets = ("snapshots.every=25 steps",)
    environment = {"TINY_PAUSE_S": "0.1", fault_injection.VARIABLE: faults}
    running = project.run(JOB, "holds", *sets, job="tiny", **environment)
    writer = running.wait_for("a snapshot that is being written", lambda: stopped_writer(running))
    os.kill(running.pid_of(0), signal.SIGKILL)
    running.wait_for("its death", lambda: named(running.events(), events.WORKER_FAILED)[1:])
    writer.resume()
    running.wait_for_step(26, generation=2)
    tiny_job.hurry(project)
    assert 0 == running.end(), running.told()
    started = named(running.events(), events.TRAINING_STARTED)
    assert [False, True, True] == [event["from_memory"] for event in started]
    assert started[0]["step"] < started[1]["step"] < 25 <= started[2]["step"]
    (committed, *_) = named(running.events(), events.SNAPSHOT_COMMITTED)
    assert committed["name"].startswith("000000000025-0002-")
    assert [] == named(running.events(), events.SNAPSHOT_FAILED)
    assert tiny_reference.found["bits"] == tensors(running.run)
    assert list(range(1, tiny_job.STEPS + 1)) == steps_of(running.run)


@pytest.mark.nightly
def test_killed_while_a_slow_store_writes_resumes_from_a_newer_state(
    project: Project, tiny_reference: Reference
) -> None:
    """A snapshot takes 12 s to write. States are held meanwhile, and the killed worker's successor resumes from the newest."""
    tiny_job.write_standard(project)
    fault = "shares.mid_write=stall:12@1"
    environment = {"TINY_PAUSE_S": "0.05", fault_injection.VARIABLE: fault}
    running = project.run(JOB, "slow", "snapshots.every=40 steps", job="tiny", **environment)

    def held() -> int:
        return int(running.state().get("held") or 0)

    second = running.wait_for("a state in the other slot", lambda: held() > 40 and held())
    third = running.wait_for("a state in the third slot", lambda: held() > second and held())
    later = running.wait_for("a state in place of the second", lambda: held() > third and held())
    assert [] == named(running.events(), events.SNAPSHOT_COMMITTED)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for_step(later + 1, generation=1)
    again = named(running.events(), events.TRAINING_STARTED)[1]
    assert again["from_memory"]
    assert again["step"] >= later
    tiny_job.hurry(project)
    assert 0 == running.end(), running.told()
    assert [] == named(running.events(), events.HELD_PAUSES)
    assert tiny_reference.found["bits"] == tensors(running.run)
    assert list(range(1, tiny_job.STEPS + 1)) == steps_of(running.run)


@pytest.mark.nightly
def test_without_room_for_a_third_state_it_says_so(project: Project) -> None:
    """Two states fit into the limit: none is held while the store is slow, as an event and `status` tell; then they are again."""
    tiny_job.write_standard(project)
    environment = {"TINY_PAUSE_S": "0.1", fault_injection.VARIABLE: "shares.mid_write=stall:10@1"}
    sets = ("snapshots.every=20 steps", "snapshots.staging_limit=160000 B")
    running = project.run(JOB, "narrow", *sets, job="tiny", **environment)
    (pauses,) = running.wait_for("the reason", lambda: named(running.events(), events.HELD_PAUSES))
    assert "3 times" in pauses["reason"]
    words = "nothing is held while a snapshot is being written"
    running.wait_for("its line", lambda: words in " ".join(running.told().split()))  # shown after the event
    assert "no later step while a snapshot is being written" in project.call("status", "narrow").stdout


def trace(project: Project, run_id: str) -> None:
    """Have both ranks trace three steps, and rank 1 begin to trace more steps than there are."""
    done = project.call("profile", run_id, "--steps", "3", "--ranks", "all", "--format", "json")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (0, 1) == (first["rank"], second["rank"])
    assert first["first_step"] + 2 == first["last_step"]
    assert 3 == len(first["steps_us"])
    assert {"data", "forward", "backward", "exchange", "optimizer"} <= first["parts_us"].keys()
    assert "aten::addmm" in [operator["name"] for operator in first["operators"]]
    assert project.call("profile", run_id, "--steps", "1000", "--ranks", "1", "--no-wait").returncode == 0


def require_unfinished_trace(running: Running) -> None:
    """The trace of a worker that was killed has failed, by name, and left nothing."""
    [failed] = running.wait_for("the trace's end", lambda: named(running.events(), events.PROFILE_FAILED))
    assert (2, 1, "its generation ended") == (failed["profile"], failed["rank"], failed["reason"])
    assert ["request.json"] == [path.name for path in (running.run.profiles / "2").iterdir()]
