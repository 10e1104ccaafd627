"""A run that was interrupted after three snapshots, made by the product's own writers in this process, and its next launch.

What needs other processes is left out: no agent is started, no worker trains. A launch is cut short right after it has
decided which snapshot it resumes from.
"""

from __future__ import annotations

import contextlib
import io
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from elasticflow import events
from elasticflow.cli.main import call
from elasticflow.launcher import launch as launch_module
from elasticflow.launcher.restarts.restart_ledger import LedgerEntry
from elasticflow.launcher.supervisor.command_runner import CommandRunner
from elasticflow.launcher.supervisor.commands import ClaimGeneration
from elasticflow.launcher.supervisor.supervisor import Supervisor
from elasticflow.runtime.snapshot import restore
from elasticflow.snapshots.format import shard_file
from elasticflow.snapshots.format.manifest import Manifest
from elasticflow.snapshots.format.shard_file import TensorEntry
from elasticflow.snapshots.store.publish import Publisher
from tests.damage import harm
from tests.damage.harm import Answer
from tests.own_loader import OwnLoader

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from elasticflow.runtime.process.context import Worker
    from elasticflow.snapshots.store.catalog import Catalog

STEPS, EVERY = 30, 10
_SHARD = "shard-00000-of-00001.safetensors"


class _Beginning(Supervisor):
    """A launch that claims a generation, trains for some steps and is interrupted: its files alone."""

    def _lead(self) -> int:
        launch, folder = self._launch, self._launch.request.folder
        self._announce()
        launch.ledger.append(LedgerEntry(1.0, "crash", 12, 0, 12, 0, 1, "f", charged=True))
        nobody: Any = None
        CommandRunner(launch, self._journal, nobody, nobody).run(ClaimGeneration("start", 0, ()))
        number = self._journal.generation
        self._journal.event(events.GENERATION_STARTED, world_size=1, nodes=1, reason="start")
        lines = [_step(step, number) for step in range(1, STEPS + 1)]
        self._metrics.add(lines)
        logs = folder.generation_logs(number)
        logs.mkdir(parents=True)
        (logs / "rank0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (logs / "rank0.stdout").write_text("printed\n")
        (logs / "rank0.stderr").write_text("warned\n")
        folder.agent_log().write_text("agent\n")
        names = [_publish(launch.catalog, step, number) for step in range(EVERY, STEPS + 1, EVERY)]
        launch.catalog.pin(names[0], "a note")
        launch.catalog.quarantine(_publish(launch.catalog, 5, number), "set aside for the test")
        for name in names:
            self._journal.event(events.SNAPSHOT_COMMITTED, name=name, step=EVERY, bytes=1, seconds=0.1)
        self._environment.found(
            {"node": "n0", "generation": 1, "device": {}, "files": {"pieces.py": "0" * 64}, "modules": []}
        )
        failed: dict[str, Any] = {"rank": 0, "node": "n0", "pid": 1, "exit_code": -9, "error": "killed"}
        self._journal.event(events.WORKER_FAILED, **failed, **{"class": "crash"})
        self._journal.event(events.GENERATION_ENDED, reason="killed", step=STEPS, **{"class": "crash"})
        self._journal.update(
            status="interrupted", generation=number, step=STEPS, steps=60, snapshot=names[-1]
        )
        for end in (self._journal.close, self._environment.close, self._metrics.close):
            end()
        return 75


class _Decision(Supervisor):
    """A launch that ends once it is known from where it continues."""

    decided: str | None = None

    def _lead(self) -> int:
        self._announce()
        catalog = self._launch.catalog
        found = restore.newest_good(_alone(), catalog, OwnLoader(catalog))
        _Decision.decided = None if found is None else found.manifest.name
        self._metrics.settle(0 if found is None else found.manifest.step)
        for end in (self._journal.close, self._environment.close, self._metrics.close):
            end()
        return 0


def _alone() -> Worker:
    nothing = SimpleNamespace(
        rank=0,
        gather_text=lambda text: [text],
        barrier=lambda: None,
        event=lambda *_, **__: None,
        tell=lambda _: None,
    )
    return cast("Worker", nothing)


def _step(step: int, generation: int) -> dict[str, Any]:
    return {
        "origin": "elasticflow", "event": "step", "timestamp": "2026-11-22T03:41:39.006495Z", "level": "info",
        "rank": 0, "node": "n0", "run_id": harm.RUN, "job": harm.NAME, "generation": generation, "world_size": 1,
        "step": step, "epoch": 0, "samples": 8 * step, "loss": 1 / step, "lr": 0.1, "time": 1e9 + step, "seconds": 0.1,
    }  # fmt: skip


def _publish(catalog: Catalog, step: int, generation: int) -> str:
    publisher, name = Publisher(catalog), f"{step:012d}-{generation:04d}-{step:08x}"
    place, data = publisher.place(name), memoryview(bytes([step]) * 1000)
    entries = [TensorEntry("model/x", "U8", (1000,), 0, 1000)]
    shard = shard_file.pack(_SHARD, tensors=entries, staged=data, about={})
    state = {"position": {"step": step}, "state": {"model": {"x": {"$tensor": "model/x"}}}}
    files = [
        shard_file.write_shard(catalog.storage, place, shard),
        shard_file.write_json(catalog.storage, place, "state.json", state),
    ]
    about: dict[str, Any] = {
        "run_id": harm.RUN,
        "generation": generation,
        "world_size": 1,
        "trigger": "steps",
    }
    made = {file.name: file.entry for file in files}
    publisher.publish(
        Manifest(name=name, step=step, created=1e9, files=made, tensors=files[0].tensors, **about)
    )
    return name


def make(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the project with its run in *root*."""
    harm.write_project(root)
    monkeypatch.chdir(root)
    monkeypatch.setattr(launch_module, "Supervisor", _Beginning)
    answer = ask("run --run-id")
    assert answer.code == 75, answer.said


def cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have launches end once they have decided from where they continue."""
    monkeypatch.setattr(launch_module, "Supervisor", _Decision)


def ask(command: str) -> Answer:
    """Run the command in the project that is the working folder, in this process."""
    return ask_with(*harm.COMMANDS[command])


def ask_with(*words: str) -> Answer:
    """Run the command line in the project that is the working folder, in this process."""
    said = io.StringIO()
    _Decision.decided = None
    code: int | None = None
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = call(words)
        except Exception as error:  # noqa: BLE001  # what a user would see as a traceback
            said.write(f"Traceback: {type(error).__name__}: {error}")
    return Answer(code, said.getvalue(), _Decision.decided)
