"""Bad days of whole runs: a full disk, a writer and then everything killed inside a save, two hosts at one run.

All are the same job, and all end with the same bits.
"""

from __future__ import annotations

import signal
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from elasticflow import events
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from elasticflow.system import fault_injection
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import Project, Running, named, project_at, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.end_to_end.tiny_job import Reference

EVERY, STEPS = 15, tiny_job.STEPS
JOB, PAUSE = "jobs/tiny.toml", {"TINY_PAUSE_S": "0.02"}
SETS = (f"snapshots.every={EVERY} steps", "snapshots.keep.last=2")

# Rank 0 halts two steps after the first snapshot was staged, when every rank has handed its share over, and after the third.
HALTS = ", ".join(f"training.step=stop@{step} rank=0" for step in (EVERY + 2, 3 * EVERY + 2))


@dataclass(frozen=True)
class FullDisk:
    """A run whose disk was full for a while.

    Attributes:
        running: The launch, which has ended.
        catalog: Its snapshots.
        failed: The event of the first snapshot that found no room.
        kept: Steps of the snapshots that were there then.
    """

    running: Running
    catalog: Catalog
    failed: dict[str, Any]
    kept: list[int]


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FullDisk]:
    """Fill the file system of the snapshots as soon as one is there, and make room when the next has failed.

    Training waits for both, so that on a busy machine neither comes too late for the snapshots it is about.
    """
    root = tmp_path_factory.mktemp("full-disk")
    place = root / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"may not mount: {mounted.stderr.strip()}")
    with ExitStack() as after:
        after.callback(subprocess.run, ["umount", "--lazy", str(place)], check=True)
        project = after.enter_context(project_at(root / "project"))
        tiny_job.write_standard(project)
        tiny_job.hurry(project)
        sets = (*SETS, f"snapshots.uri={place}")
        running = project.run(JOB, "full", *sets, job="tiny", **{fault_injection.VARIABLE: HALTS})
        catalog = Catalog(Storage(str(place)), "full/")
        running.wait_for("a snapshot", catalog.committed)
        filler = fill(place)
        running.halted(0).resume()
        failed = running.wait_for("a failure", lambda: named(running.events(), events.SNAPSHOT_FAILED))[0]
        kept = whole(catalog)
        filler.unlink()
        running.halted(0).resume()
        assert running.end() == 0, running.told()
        yield FullDisk(running, catalog, failed, kept)


def fill(place: Path) -> Path:
    """Fill the disk to its last byte and return the file that does."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def whole(catalog: Catalog) -> list[int]:
    """Return the steps of the committed snapshots, newest first, having verified every byte."""
    assert {} == catalog.damaged()
    found = catalog.committed()
    for manifest in found:
        assert [] == verify.verify(catalog, manifest)
    return [manifest.step for manifest in found]


def bits(catalog: Catalog) -> dict[str, bytes]:
    """Return the bytes of every tensor of the last snapshot, by name."""
    newest = catalog.newest()
    assert newest is not None
    assert STEPS == newest.step
    files = {name: catalog.storage.read(f"{catalog.folder(newest.name)}/{name}") for name in newest.files}
    return {key: files[at.file][at.offset : at.offset + at.nbytes] for key, at in newest.tensors.items()}


def everybody(running: Running) -> list[psutil.Process]:
    """Return the command and all that it started."""
    return [psutil.Process(running.process.pid), *running.tree()]


def test_full_disk(full_disk: FullDisk, tiny_reference: Reference) -> None:
    """Training continues, the failure is told, what was there stays; as soon as there is room, snapshots are taken."""
    happened = full_disk.running.events()
    assert "warning" == full_disk.failed["level"]
    for told in (full_disk.failed["reason"], full_disk.running.output.read_text()):
        assert "No space left on device" in told
    committed = [event["step"] for event in named(happened, events.SNAPSHOT_COMMITTED)]
    assert set(full_disk.kept) <= set(committed)
    assert full_disk.failed["step"] not in committed
    assert [STEPS, STEPS // EVERY * EVERY] == whole(full_disk.catalog)
    assert tiny_reference.found["bits"] == bits(full_disk.catalog)
    assert list(range(1, STEPS + 1)) == steps_of(full_disk.running.run)
    assert [] == named(happened, events.WORKER_FAILED)
    assert 1 == len(named(happened, events.GENERATION_STARTED))
    left = full_disk.catalog.storage.list(full_disk.catalog.folder())
    assert sorted(manifest.name for manifest in full_disk.catalog.committed()) == left


def test_killed_inside_saves_then_suspended_while_another_host_goes_on(
    project: Project, tiny_reference: Reference, tmp_path: Path
) -> None:
    """Halted with its manifest written, killed with all others; resumed, where the writer dies with half a shard.

    Then its whole host is suspended, and another continues to the end; woken up, the first ends by itself and harms nothing.
    """
    tiny_job.write_standard(project)
    cue, store = tmp_path / "cue", tmp_path / "store"
    cue.touch()
    halted = f"commit.before_rename=stop@3 cue={cue}"
    sets = (*SETS, f"snapshots.uri={store}")
    first = project.run(JOB, "taken", *sets, job="tiny", **PAUSE, **{fault_injection.VARIABLE: halted})
    first.wait_for("the writer at its point", lambda: not cue.exists())
    for process in everybody(first):
        process.kill()
    first.process.wait()
    catalog = Catalog(Storage(str(store)), "taken/")
    assert [2 * EVERY, EVERY] == whole(catalog)
    assert 3 == len(catalog.storage.list(catalog.folder()))

    cue.touch()
    killed = f"shares.mid_write=kill@8 cue={cue}"
    second = project.start(
        "resume", "taken", run_id="taken", job="tiny", **PAUSE, **{fault_injection.VARIABLE: killed}
    )
    second.wait_for("the writer's end", lambda: named(second.events(), events.AGENT_RESTARTED))
    second.wait_for("a step", lambda: len(named(second.events(), events.TRAINING_FIRST_STEP)) == 3)
    assert not cue.exists()
    suspended = everybody(second)
    for process in suspended:
        process.suspend()

    other = project.elsewhere(tmp_path / "host-b")
    tiny_job.write_standard(other)
    tiny_job.hurry(other)
    third = other.run(JOB, "taken", *sets, job="tiny")
    assert 0 == third.end(), third.told()
    assert [STEPS, STEPS // EVERY * EVERY] == whole(catalog)[:2]  # and where it came from
    assert sorted(manifest.name for manifest in catalog.committed()) == catalog.storage.list(catalog.folder())
    for process in suspended:
        process.send_signal(signal.SIGCONT)

    assert 1 == second.end(), second.told()
    happened = second.events()
    assert "taken_over" == second.state()["verdict"]["class"]
    assert 1 == len(named(happened, events.AGENT_RESTARTED))
    assert [] == named(happened, events.BUDGET_CHARGED)
    assert [] == named(happened, events.SNAPSHOT_REJECTED)
    assert ["start", "resume", "agent_lost"] == [
        e["reason"] for e in named(happened, events.GENERATION_STARTED)
    ]
    newest = catalog.newest()
    assert newest is not None
    assert (4, STEPS) == (newest.generation, newest.step)
    steps = steps_of(third.run)
    assert list(range(steps[0], STEPS + 1)) == steps
    assert (steps[0] - 1) % EVERY == 0
    assert 3 * EVERY < steps[0] <= steps_of(second.run)[-1] + 1
    assert tiny_reference.found["bits"] == bits(catalog)
