"""Failures around a run: of its snapshots, their store, other machines and the network between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from elasticflow import events
from elasticflow.system import fault_injection
from tests import servers
from tests.end_to_end.disturbed import Series
from tests.end_to_end.harness import ROOT, Project
from tests.faulty_proxy import FaultyProxy
from tests.hosts import Hosts
from tests.measured.campaign import scarcity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.measured.campaign.trial import Trial


def _damaged(trial: Trial, damage: Callable[[Path], object]) -> None:
    series = trial.start()
    series.reach(25)
    series.wait("two snapshots", lambda: len(series.catalog.committed()) > 1)
    os.kill(series.running.process.pid, signal.SIGTERM)
    assert series.running.end(60) == 75
    newest = series.catalog.newest()
    assert newest is not None
    folder = Path(series.catalog.storage.uri) / series.catalog.folder(newest.name)
    damage(next(folder.glob("shard-*.safetensors")))
    series.resume()
    trial.finish()


def corrupt(trial: Trial) -> str:
    """Flip a bit of the newest snapshot."""

    def flip(shard: Path) -> None:
        content = bytearray(shard.read_bytes())
        content[-3] ^= 1
        shard.write_bytes(content)

    _damaged(trial, flip)
    return "a bit flipped in a shard of the newest snapshot"


def truncated(trial: Trial) -> str:
    """Cut a shard of the newest snapshot short."""
    _damaged(trial, lambda shard: os.truncate(shard, shard.stat().st_size // 2))
    return "a shard of the newest snapshot cut short"


def missing(trial: Trial) -> str:
    """Remove a shard of the newest snapshot."""
    _damaged(trial, Path.unlink)
    return "a shard of the newest snapshot removed"


def io_error(trial: Trial) -> str:
    """Let the store's file system turn read-only, and fail a read."""
    cue = trial.project.root / "read-error"
    with scarcity.small_disk(trial.project.root / "disk", "64m") as place:
        series = trial.start(
            f"snapshots.uri={place}", **{fault_injection.VARIABLE: f"storage.read=raise:EIO cue={cue}"}
        )
        trial.look_in(str(place))
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        series.wait("a failed snapshot", lambda: series.named(events.SNAPSHOT_FAILED))
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        cue.touch()
        psutil.Process(trial.running.pid_of(1)).kill()
        trial.goes_on()
        trial.finish()
    return "the store's file system read-only for a while; then EIO at the first read of the next generation"


def payload(trial: Trial) -> str:
    """Flip bits of what a store answers."""
    with scarcity.bucket() as (url, uri, variables), FaultyProxy(url).running() as proxy:
        sets = (f"snapshots.uri={uri}", "snapshots.every=25 steps")
        series = trial.start(*sets, **variables, AWS_ENDPOINT_URL=proxy.url)
        series.wait("a snapshot", lambda: series.named(events.SNAPSHOT_COMMITTED))
        proxy.schedule = lambda number, method: "flip" if method == "GET" and number % 3 == 0 else None
        psutil.Process(trial.running.pid_of(1)).kill()
        trial.goes_on()
        proxy.schedule = lambda _number, _method: None
        trial.look_in(uri, {"client_kwargs": {"endpoint_url": url}, "key": "testing", "secret": "testing"})
        trial.finish()
    return "a worker killed; a bit flipped in every third answer of an S3 server, by a proxy before it, until training goes on"


def stale(trial: Trial) -> str:
    """Let another launch of the run take over while the first still trains, and a writer of it still writes."""
    root, uri = trial.project.root, f"snapshots.uri={trial.project.root / 'shared'}"
    trial.start(uri, TINY_PAUSE_S="0.1")
    other = Project(root.with_name(f"{root.name}-other"), trial.project.started)
    shutil.copytree(root, other.root, ignore=shutil.ignore_patterns("runs", "shared"))
    first = trial.running
    trial.series = Series(other, trial.run_id, uri, job="tiny")
    trial.is_refused(1, "another launch of this run goes on", by=first)
    trial.project = other
    trial.look_in(str(root / "shared"))
    trial.finish(is_whole=False)
    return "a second launch of the run, on another machine's copy, while the first trains on"


# --- machines --------------------------------------------------------------------------------------------


@contextmanager
def _two_hosts(trial: Trial) -> Iterator[Hosts]:
    """Run on two hosts in namespaces of their own, with a link between them."""
    hosts = Hosts()
    try:
        hosts.make()
        address = f"{hosts.addresses[0]}:29400"
        options = [f"--set=nodes.endpoint={address}", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1"]
        root, started = trial.project.root, trial.project.started
        trial.project, other = (
            Project(root, started, prefix=("ip", "netns", "exec", name)) for name in hosts.names
        )
        trial.start(options=options, TINY_PAUSE_S="0.1")
        other.start("run", "jobs/tiny.toml", f"--join={address}", *options, run_id=trial.run_id, job="tiny")
        trial.running.wait_for_group(2, 0)
        yield hosts
    finally:
        hosts.remove()


def message_drop(trial: Trial) -> str:
    """Drop all packets between two hosts for a second."""
    with _two_hosts(trial) as hosts:
        hosts.link("down")
        time.sleep(1.0)
        hosts.link("up")
        time.sleep(1.0)
        trial.finish()
    return "two hosts in network namespaces; all packets between them dropped for 1 s"


def partition(trial: Trial) -> str:
    """Cut the link between two hosts, until the other is given up; then mend it."""
    with _two_hosts(trial) as hosts:
        both = int(trial.running.state()["generation"])
        hosts.link("down")
        alone = trial.running.wait_for_group(1, both)
        hosts.link("up")
        trial.running.wait_for_group(2, alone)
        trial.finish()
    return (
        "two hosts in network namespaces; the link between them cut, and mended once the head continues alone"
    )


def drift(trial: Trial) -> str:
    """Let machines join that have another job file, and other versions."""
    endpoint = f"127.0.0.1:{servers.free_port()}"
    sets = (f"--set=nodes.endpoint={endpoint}", "--set=nodes.max=2", "--set=nodes.nproc_per_node=1")
    trial.start(options=sets, TINY_PAUSE_S="0.1")
    join = ("run", "jobs/tiny.toml", f"--join={endpoint}", *sets)
    start = trial.project.start
    other = start(*join, "--set=job.seed=7", run_id=trial.run_id, job="tiny")
    trial.is_refused(2, "job.seed is", by=other)
    older = scarcity.other_version(trial.project.root / "older", "torch", "2.12.0")
    other = start(*join, run_id=trial.run_id, job="tiny", PYTHONPATH=f"{older}:{ROOT}")
    trial.is_refused(2, "the run uses torch", by=other)
    trial.finish()
    return "machines that join with another seed, and with another torch"
