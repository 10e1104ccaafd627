"""Whole runs whose snapshots live in a bucket of a real S3 server on loopback."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from examples.mnist import digits
from tests.end_to_end.harness import ROOT, Project, Running, named, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

FOLDER = ROOT / "examples" / "mnist"
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


def use_keys_of_the_job_file(project: Project, uri: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Write place and keys into the job file, take them from the environment; return what is told by --set."""
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    job = project.root / "jobs" / "mnist.toml"
    options = f'options = {{ key = "{PUBLIC}", client_kwargs = {{ endpoint_url = "{endpoint}" }} }}\n'
    job.write_text(f'{job.read_text()}uri = "{uri}"\n{options}')
    return (f"snapshots.options.secret={SECRET}",)


def test_run_in_a_bucket_outlives_a_worker_and_its_machine_and_tells_no_key(
    projects: Callable[[str], Project], s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill -9 of a worker: one restart from the bucket. Drained, it continues in a project that knows only the bucket.

    The keys are in the job file and told by --set, then in the environment, where data is read from the bucket, too:
    no record, event, manifest, output or command line tells them. No gap in the metrics; every snapshot whole.
    """
    import s3fs

    files = s3fs.S3FileSystem(skip_instance_cache=True)
    for path in FOLDER.glob("*.gz"):
        files.pipe_file(f"{s3_bucket}/mnist/{path.name}", path.read_bytes())
    uri = f"s3://{s3_bucket}/runs"
    sets = ("train.epochs=", "snapshots.every=20 steps", 'snapshots.memory="off"')
    project = projects("there")
    with monkeypatch.context() as without:
        told = use_keys_of_the_job_file(project, uri, without)
        there = project.run("jobs/mnist.toml", "moved", *sets, *told, "train.steps=100000")
    there.wait_for_step(25)
    there.wait_for("a snapshot", lambda: there.state().get("snapshot"))
    assert [] == told_on_command_lines(there)
    os.kill(there.pid_of(1), signal.SIGKILL)
    there.wait_for_group(2, 1)
    there.process.terminate()
    assert there.end() == 75, there.told()

    happened = there.events()
    assert [(1, -9)] == [(f["rank"], f["exit_code"]) for f in named(happened, events.WORKER_FAILED)]
    assert 1 == there.state()["restarts"]
    left_at = there.state()["step"]
    assert list(range(1, left_at + 1)) == steps_of(there.run)
    first, second = named(happened, events.TRAINING_STARTED)
    assert first["restored_from"] is None
    committed = {e["name"]: e["step"] for e in named(happened, events.SNAPSHOT_COMMITTED)}
    assert committed[second["restored_from"]] == second["step"] >= 20
    assert [] == told_in_files(there, COPIES)

    other, end, data = projects("here"), left_at + 30, f"s3://{s3_bucket}/mnist"
    assert not (other.root / "runs").exists()
    keys = {"AWS_ACCESS_KEY_ID": PUBLIC, "AWS_SECRET_ACCESS_KEY": SECRET}
    place = (f"snapshots.uri={uri}", f"train.steps={end}", f"evaluation.args.root={data}")
    here = other.run("jobs/mnist.toml", "moved", *sets, *place, **keys)
    assert here.pid_of(1)
    assert [] == told_on_command_lines(here)
    assert here.end() == 0, here.told()
    happened = here.events()
    assert named(happened, events.RUN_STARTED)[0]["resumed"] is True
    (started,) = named(happened, events.TRAINING_STARTED)
    assert (left_at, 3, end) == (started["step"], started["generation"], started["steps"])
    assert list(range(left_at + 1, end + 1)) == steps_of(here.run)
    assert (0, "finished") == (here.state()["restarts"], here.state()["status"])
    opened = {e["name"]: (e["source"], e["fingerprint"]) for e in named(happened, events.DATASET_OPENED)}
    assert (data, digits("test").fingerprint) == opened["evaluation"]
    catalog = Catalog(Storage(uri), "moved/")
    found = catalog.committed()
    assert found[0].step == end
    assert [] == [problem for manifest in found for problem in verify.verify(catalog, manifest)]
    assert catalog.uncommitted() == []
    assert catalog.quarantined() == {}
    assert not any((running.run.path / "snapshots").exists() for running in (there, here))
    assert [] == [*told_in_files(here), *told_in_bucket(s3_bucket)]
