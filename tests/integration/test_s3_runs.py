"""Whole runs whose snapshots live in a bucket of a real S3 server on loopback."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.snapshots import reader
from elasticflow.snapshots.catalog import Catalog
from elasticflow.storage import Storage
from tests.end_to_end.harness import Project, Running, named, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

QUICK = ("train.epochs=3", "snapshots.every=20 steps")
PUBLIC, SECRET = "AKIA0NLYHERE", "wJalrXUtnFEMI-only-here"
# Copies of the job file, and the entry point that runs by hand, hold what the job file holds.
COPIES = ("train.py", "sources")


def told_in_files(running: Running, without: tuple[str, ...] = ()) -> list[str]:
    """Return the files of the run, and the console's output, that tell a credential."""
    written = [path for path in running.run.path.rglob("*") if path.is_file()]
    assert {"events.jsonl", "job.json", "plan.json", "train.py", "agent.log"} <= {p.name for p in written}
    asked = [path for path in written if not any(part in without for part in path.parts)]
    return [str(path) for path in (*asked, running.output) if tells(path.read_bytes())]


def told_in_bucket(bucket: str) -> list[str]:
    """Return the objects that tell a credential."""
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    found = files.find(bucket)
    assert any(path.endswith("MANIFEST.json") for path in found)
    return [path for path in found if tells(path.encode() + files.cat_file(path))]


def told_on_command_lines(running: Running) -> list[list[str]]:
    """Return the command lines of the run's processes that tell a credential: everybody may read those."""
    lines = [process.cmdline() for process in running.tree()]
    assert len(lines) >= 4
    return [line for line in lines if tells(" ".join(line).encode())]


def tells(content: bytes) -> bool:
    """Return whether a credential is in *content*."""
    return PUBLIC.encode() in content or SECRET.encode() in content


def test_worker_killed_while_snapshots_are_in_a_bucket(
    projects: Callable[[str], Project], s3_bucket: str
) -> None:
    """Kill -9 of a worker: one restart from the bucket, no gap in the metrics, every snapshot whole."""
    uri = f"s3://{s3_bucket}/runs"
    sets = (*QUICK, f"snapshots.uri={uri}")
    keys = {"AWS_ACCESS_KEY_ID": PUBLIC, "AWS_SECRET_ACCESS_KEY": SECRET}
    running = projects("one").run("jobs/mnist.toml", "bucket", *sets, **keys)
    running.wait_for_step(45)
    assert [] == told_on_command_lines(running)
    os.kill(running.pid_of(1), signal.SIGKILL)

    assert running.end() == 0, running.told()
    happened = running.events()
    assert [(1, -9)] == [(f["rank"], f["exit_code"]) for f in named(happened, events.WORKER_FAILED)]
    assert 1 == running.state()["restarts"]
    steps = steps_of(running.run)
    assert list(range(1, steps[-1] + 1)) == steps
    first, second = named(happened, events.TRAINING_STARTED)
    assert first["restored_from"] is None
    assert second["step"] >= 20
    committed = {e["name"]: e["step"] for e in named(happened, events.SNAPSHOT_COMMITTED)}
    assert committed[second["restored_from"]] == second["step"]
    catalog = Catalog(Storage(uri), "bucket/")
    found = catalog.committed()
    assert found[0].step == steps[-1]
    assert [] == [problem for manifest in found for problem in reader.verify(catalog, manifest)]
    assert catalog.uncommitted() == []
    assert catalog.quarantined() == {}
    assert not (running.run.path / "snapshots").exists()
    assert [] == [*told_in_files(running), *told_in_bucket(s3_bucket)]


def test_run_goes_on_in_another_project_that_knows_only_the_bucket(
    projects: Callable[[str], Project], s3_bucket: str
) -> None:
    """Drained in one folder, the run id is found under the snapshot URI from another one and goes on to its end."""
    sets = (*QUICK, f"snapshots.uri=s3://{s3_bucket}/runs")
    there = projects("there").run("jobs/mnist.toml", "moved", *sets)
    there.wait_for_step(25)
    there.process.terminate()
    assert there.end() == 75, there.told()
    left_at = there.state()["step"]
    assert steps_of(there.run)[-1] == left_at

    other = projects("here")
    assert not (other.root / "runs").exists()
    here = other.run("jobs/mnist.toml", "moved", *sets)
    assert here.end() == 0, here.told()
    happened = here.events()
    assert named(happened, events.RUN_STARTED)[0]["resumed"] is True
    (started,) = named(happened, events.TRAINING_STARTED)
    assert started["step"] == left_at
    assert started["generation"] == 2
    steps = steps_of(here.run)
    assert list(range(left_at + 1, steps[-1] + 1)) == steps
    assert started["steps"] == steps[-1]
    assert 0 == here.state()["restarts"]
    assert "finished" == here.state()["status"]


def test_credentials_of_the_job_file_are_told_nowhere(
    projects: Callable[[str], Project], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in snapshots.options work, in the file and by --set; no record, event, manifest or command line tells them."""
    project = projects("keys")
    job = project.root / "jobs" / "mnist.toml"
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    options = f'options = {{ key = "{PUBLIC}", client_kwargs = {{ endpoint_url = "{endpoint}" }} }}\n'
    job.write_text(job.read_text() + f'uri = "s3://{s3_bucket}/runs"\n' + options)
    sets = ("train.epochs=2", f"snapshots.options.secret={SECRET}")
    running = project.run("jobs/mnist.toml", "keys", *sets)
    running.wait_for_step(25)
    assert [] == told_on_command_lines(running)
    running.process.terminate()
    assert running.end() == 75, running.told()

    again = project.run("jobs/mnist.toml", "keys", *sets)
    assert again.end() == 0, again.told()
    assert [] == told_in_files(running, COPIES)
    assert [] == told_in_files(again, COPIES)
    for name, value in (
        ("AWS_ENDPOINT_URL", endpoint),
        ("AWS_ACCESS_KEY_ID", "x"),
        ("AWS_SECRET_ACCESS_KEY", "x"),
    ):
        monkeypatch.setenv(name, value)
    assert [] == told_in_bucket(s3_bucket)
