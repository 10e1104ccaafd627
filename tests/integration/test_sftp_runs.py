"""A whole run whose snapshots lie on a real sftp server on loopback."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.system import fault_injection
from tests.end_to_end import tiny_job
from tests.end_to_end.harness import named, steps_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.end_to_end.harness import Project
    from tests.places import Place

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("place", ["sftp"], indirect=True)
def test_worker_killed_while_snapshots_are_on_an_ssh_server(
    projects: Callable[[str], Project], place: Place
) -> None:
    """Kill -9 of a worker: one restart from the server, no gap in the metrics, every snapshot whole."""
    options = [f"snapshots.options.{name}={value}" for name, value in place.options.items()]
    project = projects("one")
    tiny_job.write_standard(project)
    tiny_job.hurry(project)
    sets = ("snapshots.every=20 steps", f"snapshots.uri={place.uri}", *options)
    halt = {fault_injection.VARIABLE: "training.step=stop@45 rank=0 generation=1"}
    running = project.run("jobs/tiny.toml", "away", *sets, job="tiny", **halt)
    running.halted(0)
    running.wait_for("a snapshot", Catalog(place.storage(), "away/").committed)
    os.kill(running.pid_of(1), signal.SIGKILL)

    assert running.end() == 0, running.told()
    happened = running.events()
    assert 1 == running.state()["restarts"]
    steps = steps_of(running.run)
    assert list(range(1, steps[-1] + 1)) == steps
    _, second = named(happened, events.TRAINING_STARTED)
    committed = {e["name"]: e["step"] for e in named(happened, events.SNAPSHOT_COMMITTED)}
    assert committed[second["restored_from"]] == second["step"] >= 20
    catalog = Catalog(place.storage(), "away/")
    found = catalog.committed()
    assert found[0].step == steps[-1]
    assert [] == [problem for manifest in found for problem in verify.verify(catalog, manifest)]
    assert catalog.uncommitted() == []
    assert not (running.run.path / "snapshots").exists()
