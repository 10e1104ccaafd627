"""Runs that meet in a store which outlives their supervisors: real etcd, and `elasticflow rendezvous serve`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.protocol.etcd_store import EtcdControlStore
from elasticflow.protocol.store_address import StoreAddress, StoreLostError
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests import servers
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import ROOT, Project, Running, named, read_lines, steps_of, tensors
from tests.end_to_end.trajectory_jobs import write_jobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tests.end_to_end.tiny_job import Reference

pytestmark = pytest.mark.integration
with_etcd = pytest.mark.nightly


@pytest.fixture
def etcd_port(tmp_path: Path) -> Iterator[int]:
    """Yield the port of an etcd of the test's own; skips where it is not installed."""
    with contextlib.ExitStack() as stack:
        try:
            port = stack.enter_context(servers.etcd(tmp_path / "etcd"))
        except servers.MissingServerError as error:
            pytest.skip(str(error))
        yield port


@pytest.fixture
def place(etcd_port: int) -> StoreAddress:
    """Return a part of that etcd."""
    return StoreAddress("127.0.0.1", etcd_port, "elasticflow/job/1", "etcd-v2")


def _soon(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@with_etcd
def test_keys_in_etcd_are_those_of_a_store(place: StoreAddress) -> None:
    """What is set is seen by all, whatever it holds and is called; what nobody set is not there."""
    mine, other = EtcdControlStore(place), EtcdControlStore(place)
    mine.set("pg/0//_x y", b"\x00\xff")
    mine.set("_hidden", "text")

    assert b"\x00\xff" == other.get("pg/0//_x y")
    assert other.check(["pg/0//_x y", "_hidden"])
    assert not other.check(["_hidden", "pg/1"])
    assert other.delete_key("_hidden")
    assert not mine.delete_key("_hidden")
    with pytest.raises(StoreLostError):
        mine.get("_hidden", 0.05)


@with_etcd
def test_sums_in_etcd_count_everybody(place: StoreAddress) -> None:
    """Each `add` is one act: no two processes get the same number."""
    first, second = EtcdControlStore(place), EtcdControlStore(place)

    assert [1, 2, 3, 10] == [first.add("n", 1), second.add("n", 1), first.add("n", 1), second.add("n", 7)]
    assert b"10" == first.get("n")


@with_etcd
def test_copy_of_a_folder_follows_it(place: StoreAddress) -> None:
    """Those who look all the time see changes within moments, also after more of them than etcd remembers."""
    told = EtcdControlStore(place)
    told.set("orders/round/1", "one")
    agent = EtcdControlStore(place, looks_at="orders")

    assert b"one" == agent.get("orders/round/1")
    told.set("orders/stop/1", "1")
    _soon(lambda: agent.check(["orders/stop/1"]))
    for _ in range(1100):
        told.set("elsewhere", "x")
    told.delete_key("orders/stop/1")
    _soon(lambda: not agent.check(["orders/stop/1"]))
    told.forget()
    _soon(lambda: not agent.check(["orders/round/1"]))
    told.set("orders/round/2", "two")
    _soon(lambda: agent.check(["orders/round/2"]))


@with_etcd
def test_copy_of_a_folder_is_followed_as_long_as_somebody_has_it(place: StoreAddress) -> None:
    """A process that leads many launches is not left with a thread of each."""
    before = set(threading.enumerate())
    store = EtcdControlStore(place, looks_at="orders")
    assert not store.check(["orders/stop/1"])
    [following] = set(threading.enumerate()) - before
    del store
    EtcdControlStore(place).set("orders/stop/1", "1")  # what wakes it
    _soon(lambda: not following.is_alive())


@with_etcd
def test_restart_of_etcd_is_waited_for(tmp_path: Path) -> None:
    """A request while it is away ends well once it is back; an etcd that stays away is lost."""
    folder = tmp_path / "etcd"
    try:
        with servers.etcd(folder) as port:
            place = StoreAddress("127.0.0.1", port, "elasticflow/job/1", "etcd-v2")
            EtcdControlStore(place).set("orders/round/1", "one")
            agent = EtcdControlStore(place, looks_at="orders", patience_s=0.5)
            assert agent.check(["orders/round/1"])
    except servers.MissingServerError as error:
        pytest.skip(str(error))
    with pytest.raises(StoreLostError):
        agent.add("n", 1)
    with servers.etcd(folder, port):
        agent.set("orders/round/2", "two")
        _soon(lambda: agent.check(["orders/round/1", "orders/round/2"]))


@with_etcd
def test_run_goes_on_without_the_machine_that_began_it(
    projects: Callable[[str], Project], etcd_port: int, tmp_path: Path
) -> None:
    """The head is killed with all it started: the machine that had joined leads the run on; no sample is repeated."""
    head, other = projects("head"), projects("other")
    sets = (
        "torchrun.rdzv_backend=etcd-v2",
        f"nodes.endpoint=127.0.0.1:{etcd_port}",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=1000000",
        "snapshots.every=50 steps",
        "snapshots.keep.last=3",
        f"snapshots.uri={tmp_path / 'shared'}",
    )
    for project in (head, other):
        write_jobs(project)
    running = head.run("jobs/counting.toml", "led", *sets, job="counting")
    options = [f"--set={text}" for text in sets]
    join = f"--join=127.0.0.1:{etcd_port}"
    joined = other.start("run", "jobs/counting.toml", join, *options, run_id="led", job="counting")
    both = running.wait_for_group(2, 0)
    running.wait_for("a snapshot", lambda: named(running.events(), events.SNAPSHOT_COMMITTED))
    os.kill(running.process.pid, signal.SIGKILL)
    running.process.wait()
    joined.wait_for_group(1, both)
    os.kill(joined.process.pid, signal.SIGTERM)
    assert 75 == joined.end(), joined.told()

    happened = joined.events()
    [begun] = named(happened, events.RUN_STARTED)
    assert begun["resumed"]
    steps = steps_of(joined.run)
    assert list(range(steps[0], steps[0] + len(steps))) == steps
    started = named(happened, events.TRAINING_STARTED)[-1]["step"]
    assert started > 0
    # Where rank 0 was on the machine that had joined, its log of before the takeover lies there, too.
    assert steps[0] in {1, started + 1}


@with_etcd
@pytest.mark.campaign  # its neighbours train with etcd
def test_torchrun_script_of_an_etcd_job_trains(projects: Callable[[str], Project], etcd_port: int) -> None:
    """What `plan -o` writes meets in the same etcd by hand, with plain torchrun."""
    project = projects("by-hand")
    sets = ("torchrun.rdzv_backend=etcd-v2", f"nodes.endpoint=127.0.0.1:{etcd_port}", "train.epochs=1")
    write_jobs(project)
    compiled = project.start(
        "plan", "jobs/counting.toml", "-o", "launch", *[f"--set={text}" for text in sets], run_id="none"
    )
    assert 0 == compiled.end(), compiled.told()
    done = subprocess.run(
        ["bash", str(project.root / "launch" / "torchrun.sh")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    assert "training.finished" in done.stdout


def test_run_meets_in_a_store_of_its_own_and_ends_with_it(projects: Callable[[str], Project]) -> None:
    """A run uses what `rendezvous serve` serves; once that is gone the run is interrupted, and says why."""
    project = projects("served")
    port = servers.free_port()
    serving = project.start("rendezvous", "serve", "--host=127.0.0.1", f"--port={port}", run_id="store")
    serving.wait_for("a store", lambda: "serving" in serving.output.read_text())
    write_jobs(project)
    running = project.run(
        "jobs/counting.toml",
        "served",
        f"nodes.endpoint=127.0.0.1:{port}",
        "torchrun.rdzv_conf={is_host=false}",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        "train.epochs=1000000",
        job="counting",
    )
    running.wait_for_step(1)
    os.kill(serving.process.pid, signal.SIGINT)
    assert 0 == serving.end(), serving.told()

    assert 75 == running.end(), running.told()
    [ended] = named(running.events(), events.RUN_INTERRUPTED)
    assert f"the store at 127.0.0.1:{port} is lost" in ended["reason"]


def test_run_goes_on_while_its_store_is_killed_and_started_again(
    projects: Callable[[str], Project], tiny_reference: Reference, tmp_path: Path
) -> None:
    """Two machines train on without the store, whose state is on disk; once it is back, a worker that is killed is replaced.

    The weights are those of a run that nobody disturbed.
    """
    head, other = projects("head"), projects("other")
    for project in (head, other):
        tiny_job.write_standard(project)
    port = servers.free_port()

    def serve() -> Running:
        store = ("rendezvous", "serve", "--host=127.0.0.1", f"--port={port}", f"--state={tmp_path / 'store'}")
        serving = head.start(*store, run_id="store")
        serving.wait_for("a store", lambda: "serving" in serving.output.read_text())
        return serving

    serving = serve()
    sets = (
        f"nodes.endpoint=127.0.0.1:{port}",
        "torchrun.rdzv_conf={is_host=false}",
        "nodes.max=2",
        "nodes.nproc_per_node=1",
        f"snapshots.uri={tmp_path / 'shared'}",
    )
    running = head.run("jobs/tiny.toml", "kept", *sets, job="tiny", TINY_PAUSE_S="0.05")
    options = [f"--set={text}" for text in sets]
    join = ("run", "jobs/tiny.toml", f"--join=127.0.0.1:{port}", *options)
    joined = other.start(*join, run_id="kept", job="tiny", TINY_PAUSE_S="0.05")
    both = running.wait_for_group(2, 0)
    os.kill(serving.process.pid, signal.SIGKILL)
    serving.process.wait()
    step = _last_step((head, other), both)
    running.wait_for("steps without a store", lambda: _last_step((head, other), both) > step + 3)
    step = _last_step((head, other), both)
    serving = serve()
    running.wait_for_step(step)
    os.kill(running.pid_of(1), signal.SIGKILL)
    running.wait_for_group(2, both)
    for project in (head, other):
        tiny_job.hurry(project)
    assert [0, 0] == [running.end(), joined.end()], running.told() + joined.told()
    assert tiny_reference.found["bits"] == tensors(Catalog(Storage(str(tmp_path / "shared")), "kept/"))
    formed = [event["reason"] for event in named(running.events(), events.GENERATION_STARTED)]
    assert 1 == formed.count("crash"), formed
    assert [] == named(running.events(), events.NODE_LOST)
    os.kill(serving.process.pid, signal.SIGTERM)
    assert 0 == serving.end(), serving.told()


def _last_step(projects: Iterable[Project], generation: int) -> int:
    """Return the last step in the logs of a generation's workers, which lie in the folders of their machines."""
    lines = [
        line
        for project in projects
        for path in project.root.glob(f"runs/tiny/kept/logs/g{generation:04d}/rank*.jsonl")
        for line in read_lines(path)
        if "step" in line
    ]
    return max((int(line["step"]) for line in lines), default=0)
