"""What the lifecycle decided is done: in the store, the journal, the ledger, the snapshots and the agents."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.restarts.restart_ledger import LedgerEntry, RestartLedger, read_ledger
from elasticflow.launcher.supervisor.command_runner import CommandRunner
from elasticflow.launcher.supervisor.commands import (
    AskWorkers,
    ClaimFailed,
    ClaimGeneration,
    ClearSnapshot,
    ForgetAgent,
    FormGeneration,
    GenerationClaimed,
    ListSnapshots,
    RecordEvent,
    RecordFailure,
    ReleaseNode,
    RunTakenOver,
    SetSnapshotAside,
    SnapshotSetAside,
    SnapshotsListed,
    StartAgent,
    UpdateState,
)
from elasticflow.run_folder import RunFolder, snapshot_name
from elasticflow.snapshots.format.manifest import Manifest
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.snapshots.store.publish import Publisher
from elasticflow.storage.storage import Storage

if TYPE_CHECKING:
    from pathlib import Path

NEWER, OLDER = snapshot_name(10, 1, "0000000a"), snapshot_name(5, 1, "00000005")


class Calls:
    """Stands for what is asked through a channel, or of this machine's agents."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


class Bench:
    """A runner with real files and snapshots; agents are noted."""

    def __init__(self, folder: RunFolder) -> None:
        self.records: list[dict[str, Any]] = []
        self.folder, self.catalog = folder, Catalog(Storage(str(folder.path)))
        self.journal = Journal(folder, 1, self.records.append)
        self.channel, self.agents = Calls(), Calls()
        self.is_led_anew = False
        launch = SimpleNamespace(
            store=SimpleNamespace(is_led_anew=lambda: self.is_led_anew),
            request=SimpleNamespace(folder=folder),
            number=1,
            catalog=self.catalog,
            ledger=RestartLedger(folder.ledger),
        )
        self.runner = CommandRunner(
            launch,  # type: ignore[arg-type]
            self.journal,
            self.channel,  # type: ignore[arg-type]
            self.agents,  # type: ignore[arg-type]
        )

    def publish(self, step: int) -> None:
        """Commit a snapshot without files."""
        facts = {
            "run_id": "r",
            "world_size": 1,
            "trigger": "steps",
            "created": 0.0,
            "files": {},
            "tensors": {},
        }
        publisher, name = Publisher(self.catalog), snapshot_name(step, 1, f"{step:08x}")
        self.catalog.storage.write(f"{publisher.place(name)}/state.json", [b"{}"])
        publisher.publish(Manifest(name=name, step=step, generation=1, **facts))  # type: ignore[arg-type]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Return a runner in a run folder with two snapshots."""
    made = Bench(RunFolder(tmp_path / "runs" / "job" / "run"))
    made.publish(5)
    made.publish(10)
    return made


def test_agents_are_told(bench: Bench) -> None:
    """Those of all machines through the store, those of this one as processes."""
    formed = FormGeneration(3, (("n0", 2),), 1.5)
    for command in (formed, AskWorkers("drain", 3), ReleaseNode("n1"), StartAgent("n0"), ForgetAgent("n1")):
        assert bench.runner.run(command) is None

    asked = [("form", 3, (("n0", 2),), 1.5), ("request", "drain", 3), ("release", "n1")]
    assert asked == bench.channel.calls
    assert [("start_again", "n0"), ("forget", "n1")] == bench.agents.calls


def test_what_is_to_be_recorded_is_on_disk(bench: Bench) -> None:
    """Events, state and failures."""
    entry = LedgerEntry(1.0, "crash", 12, 0, 12, 0, 1, "f", charged=True)
    bench.runner.run(RecordEvent(events.NODE_LEFT, {"node": "n1"}))
    bench.runner.run(UpdateState({"restarts": 7}))
    bench.runner.run(RecordFailure(entry))

    assert (events.NODE_LEFT, "n1") == (bench.records[-1]["event"], bench.records[-1]["node"])
    assert '"restarts": 7' in bench.folder.state.read_text()
    assert [entry] == read_ledger(bench.folder.ledger)


def test_claim_is_answered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, from which on it stands in every event; that another launch has the run; or why there is no answer."""
    assert GenerationClaimed(2) == bench.runner.run(ClaimGeneration("start", 0, ("n0",)))
    assert 2 == bench.journal.event(events.NODE_LEFT, node="n0")["generation"]
    assert GenerationClaimed(3) == bench.runner.run(ClaimGeneration("crash", 2, ("n0",)))
    bench.catalog.claim_generation({})
    assert RunTakenOver() == bench.runner.run(ClaimGeneration("crash", 3, ("n0",)))

    def fail(last: int, claim: object) -> bool:
        raise OSError("no route to host")

    monkeypatch.setattr(bench.catalog, "claim_after", fail)
    assert ClaimFailed("no route to host") == bench.runner.run(ClaimGeneration("crash", 3, ("n0",)))


def test_first_generation_is_not_claimed_from_a_launch_that_has_taken_over(bench: Bench) -> None:
    """This process was stopped between its lead and its first claim, and that of the new leader would be fenced off."""
    bench.is_led_anew = True
    claimed = bench.catalog.newest_generation()
    assert RunTakenOver() == bench.runner.run(ClaimGeneration("start", 0, ("n0",)))
    assert claimed == bench.catalog.newest_generation()


def test_snapshots_are_listed_set_aside_and_cleared(bench: Bench) -> None:
    """Newest first, and recorded as it is done."""
    assert SnapshotsListed((NEWER, OLDER)) == bench.runner.run(ListSnapshots())
    assert SnapshotSetAside(NEWER) == bench.runner.run(SetSnapshotAside(NEWER, "two starts failed"))
    assert SnapshotsListed((OLDER,)) == bench.runner.run(ListSnapshots())
    assert {NEWER: "two starts failed"} == bench.catalog.quarantined()
    assert bench.runner.run(ClearSnapshot(NEWER, "not to blame")) is None
    assert {} == bench.catalog.quarantined()

    assert [
        (events.SNAPSHOT_REJECTED, NEWER, "two starts failed"),
        (events.SNAPSHOT_CLEARED, NEWER, "not to blame"),
    ] == [(record["event"], record["name"], record["reason"]) for record in bench.records]


def test_store_that_does_not_answer_changes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No snapshot is known, none is set aside, and nothing is recorded that did not happen."""

    def no_answer(*_: object) -> None:
        raise OSError(errno.EIO, "no answer")

    for name in ("list", "create", "remove"):
        monkeypatch.setattr(bench.catalog.storage, name, no_answer)
    assert SnapshotsListed(()) == bench.runner.run(ListSnapshots())
    assert bench.runner.run(SetSnapshotAside(NEWER, "two starts failed")) is None
    assert bench.runner.run(ClearSnapshot(NEWER, "not to blame")) is None

    assert [] == bench.records
