"""events.jsonl and state.json."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from elasticflow import events
from elasticflow.launcher.journal.journal import Journal
from elasticflow.launcher.journal.metrics import Metrics
from elasticflow.launcher.journal.post_mortem import DISK_FULL, ending_of
from elasticflow.launcher.supervisor.ingest import EnvironmentRecord, Ingest
from elasticflow.protocol.messages import (
    Activity,
    NodeFigures,
    Printed,
    PrintedLine,
    RankFigures,
    StartedWorker,
)
from elasticflow.protocol.run_files import is_only_shown
from elasticflow.protocol.worker_environment import DeviceUsage
from elasticflow.run_folder import RunFolder
from elasticflow.system import atomic_files
from elasticflow.system.json_lines import AppendedLines

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """Return a run folder."""
    return RunFolder(tmp_path / "runs" / "job" / "run")


def _ignore(_: dict[str, Any]) -> None:
    pass


def _state(folder: RunFolder) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(folder.state.read_text())
    return loaded


@pytest.mark.parametrize("size", [0, 1, 70_000])
@pytest.mark.parametrize("whole", [0, 2])
def test_last_line_torn_by_a_crash_is_cut_off(tmp_path: Path, size: int, whole: int) -> None:
    """What was complete stays, however long the torn line is, and the next line starts on its own."""
    path = tmp_path / "lines.jsonl"
    path.write_text('{"n": 1}\n' * whole + '"' * size)
    lines = AppendedLines(path)
    lines.append([{"n": 2}])
    lines.close()

    assert [{"n": 1}] * whole + [{"n": 2}] == [json.loads(line) for line in path.read_text().splitlines()]


def test_a_full_disk_is_noted_although_no_file_can_be_made(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launch, which may have room, says why this one ended, and not that somebody killed it."""
    journal = Journal(folder, 1, _ignore)
    journal.write_state()
    before = _state(folder)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_files, "replace", fail)
    journal.note_full_disk()
    monkeypatch.undo()
    found = ending_of(folder)

    assert {**before, DISK_FULL: True} == _state(folder)
    assert found is not None
    assert ("disk_full", None) == (found.kind, found.likely)
    assert found.known.startswith("the disk of the run folder was full")
    journal.close()


def test_each_batch_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text and newline in one go: `print` under `python -u` tears lines of two writers apart."""
    lines = AppendedLines(tmp_path / "lines.jsonl")
    writes: list[bytes] = []

    def write(_: int, data: bytes) -> int:
        writes.append(data)
        return len(data)

    monkeypatch.setattr(os, "write", write)
    lines.append([{"n": 1}, {"n": 2}])
    lines.append([])
    monkeypatch.undo()
    lines.close()

    assert [b'{"n": 1}\n{"n": 2}\n'] == writes


def test_short_write_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that took a part only is followed by the rest."""
    lines = AppendedLines(tmp_path / "lines.jsonl")
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
    lines.append([{"number": 1}])
    monkeypatch.undo()
    lines.close()

    assert '{"number": 1}\n' == lines.path.read_text()


def test_event_says_who_when_and_how_bad(folder: RunFolder) -> None:
    """Every event has the common fields, is appended, and is shown as it was written."""
    shown: list[dict[str, Any]] = []
    journal = Journal(folder, 1, shown.append)
    journal.generation = 3
    journal.event(events.NODE_LOST, node="n0", reason="gone")
    journal.event(events.NODE_JOINED, node="n0", host="h", nproc=2)
    journal.close()

    written = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert shown == written
    lost, joined = written
    assert ("warning", "info") == (lost["level"], joined["level"])
    assert ("job", "run", 3) == (lost["job"], lost["run_id"], lost["generation"])
    assert lost["timestamp"].endswith("Z")
    assert set(events.COMMON_FIELDS) <= lost.keys()


def test_what_no_event_tells_is_in_the_state_and_shown(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nodes are at and what failures may still cost; an end of the group, or of the node's way to it, is the end of it."""
    shown: list[dict[str, Any]] = []
    seconds = iter(range(100, 10**9))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(seconds)))
    journal = Journal(folder, 1, shown.append)
    journal.know(epochs=5, budget_left=3)
    journal.activity(Activity("n0", "evaluate", "", 7, 60.0))
    journal.activity(Activity("n1", "import", "datasets"))
    assert ["n0", "n1"] == list(_state(folder)["activities"])
    at = _state(folder)["activities"]["n0"]
    assert ("evaluate", 7) == (at["phase"], at["step"])
    assert at["since"] <= time.time() - 60
    journal.event(events.NODE_JOINED, node="n1", host="h", nproc=2)
    assert ["n0"] == list(_state(folder)["activities"])
    journal.activity(Activity("n1", "data", "", 7, 1.0))
    journal.activity(Activity("n1", ""))
    assert ["n0"] == list(_state(folder)["activities"])
    journal.event(events.BUDGET_CHARGED, left=2, **{"class": "crash"})
    journal.event(events.GENERATION_ENDED, reason="x", step=7, **{"class": "crash"})
    assert ({}, 2, 5) == tuple(_state(folder)[name] for name in ("activities", "budget_left", "epochs"))
    journal.event(events.BUDGET_REFILLED, budget=3)
    journal.hear(Printed(1, (PrintedLine("stdout", "hello"),), 4))
    journal.close()

    assert {"printed": [{"stream": "stdout", "text": "hello"}], "left_out": 4} == shown[-1]
    assert {"known": {"epochs": 5, "budget_left": 3, "activities": {}}} == shown[-2]
    written = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert written == [record for record in shown if not is_only_shown(record)]


def test_accelerators_are_in_the_state(folder: RunFolder) -> None:
    """By rank, of all nodes, as they were told last; not those of an earlier generation, and no CPU."""
    journal = Journal(folder, 1, _ignore)
    journal.generation = 2

    def tell(node: str, *ranks: RankFigures, generation: int = 2) -> None:
        journal.figures(NodeFigures(generation, node, ranks))

    def on(device: str, rank: int, *usage: int) -> RankFigures:
        return RankFigures(rank, 1, 0.1, 0.2, device, DeviceUsage(*usage))

    tell("n1", on("cuda:0", 2, 5, 6, 7, 80), RankFigures(3, 1, 0.1, 0.2, "cpu"))
    tell("n0", on("cuda:1", 1, 1, 2, 3), on("cuda:0", 0, 1, 2, 3))
    tell("n0", on("cuda:1", 1, 10, 20, 30))
    tell("n0", on("cuda:1", 1, 0, 0, 0), generation=1)
    found = [
        (row["node"], row["rank"], row["device"], row["memory_peak"]) for row in journal.state["devices"]
    ]
    assert found == [("n0", 0, "cuda:0", 3), ("n0", 1, "cuda:1", 30), ("n1", 2, "cuda:0", 7)]
    names = "memory_allocated", "memory_reserved", "memory_peak", "utilization"
    assert [journal.state["devices"][2][name] for name in names] == [5, 6, 7, 80]
    journal.event(events.GENERATION_STARTED, world_size=1, nodes=1, members=["n0"], reason="crash")
    assert journal.state["devices"] == []
    journal.close()


def test_fields_may_be_called_as_the_event_is(folder: RunFolder) -> None:
    """An event with a field `name`, as snapshots have."""
    journal = Journal(folder, 1, _ignore)
    record = journal.event(events.SNAPSHOT_REMOVED, name="000000000020-0001-aaaaaaaa")
    journal.close()

    assert (events.SNAPSHOT_REMOVED, "000000000020-0001-aaaaaaaa") == (record["event"], record["name"])


def test_what_many_nodes_tell_at_a_time_is_written_and_shown_together(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand nodes import, then a thousand workers start: what is written of that grows as their number does."""
    now = 100.0
    shown: list[dict[str, Any]] = []
    writes: list[None] = []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal = Journal(folder, 1, shown.append)
    write = journal.write_state

    def counted() -> None:
        writes.append(None)
        write()

    monkeypatch.setattr(journal, "write_state", counted)
    for number in reversed(range(1000)):
        journal.activity(Activity(f"n{number}", "import", "torch"))
        journal.add_workers([StartedWorker(number, 5000 + number, f"n{number}")])
        journal.turn()
    assert 1 == len(shown) == len(writes)
    now += 0.3
    journal.turn()

    assert 2 == len(shown) == len(writes)
    assert 1000 == len(_state(folder)["activities"])
    assert list(range(1000)) == [worker["rank"] for worker in _state(folder)["workers"]]


def test_state_is_written_at_most_every_quarter_second(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps come by the hundred: their state waits, what matters does not, and nothing is lost at the end."""
    journal = Journal(folder, 1, _ignore)
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal.update(step=1)
    journal.update(step=2)
    assert 1 == _state(folder)["step"]
    journal.update(at_once=True, workers=[])
    assert 2 == _state(folder)["step"]
    now += 0.3
    journal.update(step=3)
    assert 3 == _state(folder)["step"]
    journal.update(step=4)
    journal.turn()
    assert 3 == _state(folder)["step"]
    now += 0.3
    journal.turn()
    assert 4 == _state(folder)["step"]
    journal.update(step=5)
    journal.close()

    assert 5 == _state(folder)["step"]


def test_reader_sees_the_old_or_the_new_state(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash in the middle of writing leaves the state before it."""
    journal = Journal(folder, 1, _ignore)
    journal.update(at_once=True, step=1)

    def torn(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(folder.state), "replace", torn)
        with pytest.raises(OSError, match="No space left"):
            journal.update(at_once=True, step=2)
    assert 1 == _state(folder)["step"]
    journal.close()


@pytest.mark.usefixtures("real_processes")
def test_what_a_killed_supervisor_was_writing_is_removed(folder: RunFolder) -> None:
    """A supervisor killed before the rename leaves its temporary file; the next launch takes it away."""
    pid = os.fork()
    if pid == 0:
        type(folder.state).replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        Journal(folder, 1, _ignore).write_state()
        os._exit(0)
    assert -signal.SIGKILL == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    (left,) = folder.state.parent.glob(".state.json.*")
    Journal(folder, 2, _ignore).close()
    assert not left.exists()


def test_restarts_are_those_of_the_run_not_of_the_launch(folder: RunFolder) -> None:
    """The next launch counts on, whatever the state file looks like."""
    first = Journal(folder, 1, _ignore)
    first.update(at_once=True, restarts=2)
    first.close()
    second = Journal(folder, 2, _ignore)
    assert (2, 2) == (second.state["restarts"], second.state["launch"])
    second.close()
    folder.state.write_text("{")
    third = Journal(folder, 3, _ignore)
    assert 0 == third.state["restarts"]
    third.close()


def test_launch_begins_where_the_one_before_left(folder: RunFolder) -> None:
    """Interrupted while it still starts, a resumed run has not lost its steps and its snapshot."""
    first = Journal(folder, 1, _ignore)
    reached = {"step": 30, "steps": 60, "epoch": 1, "loss": 0.5, "snapshot": "s30", "restarts": 2}
    first.update(at_once=True, generation=3, **reached)
    first.close()

    second = Journal(folder, 2, _ignore)
    second.close()
    assert reached.items() <= _state(folder).items()
    assert (2, 0) == (_state(folder)["launch"], _state(folder)["generation"])


def test_finished_run_has_made_its_last_step(folder: RunFolder) -> None:
    """Also when logging.every leaves that step's line out."""
    journal = Journal(folder, 1, _ignore)
    metrics = Metrics(folder)
    line = {"event": events.TRAINING_FINISHED, "step": 80, "epoch": 2}
    Ingest(journal, metrics, EnvironmentRecord(folder.launch(1))).lines([line])
    metrics.close()
    journal.close()
    assert 80 == _state(folder)["step"]


def test_state_in_memory_is_not_the_newest_snapshot(folder: RunFolder) -> None:
    """It goes with the launch: a resume begins at what is on disk."""
    journal = Journal(folder, 1, _ignore)
    metrics = Metrics(folder)
    ingest = Ingest(journal, metrics, EnvironmentRecord(folder.launch(1)))
    told = {
        "event": events.TRAINING_STARTED,
        "step": 7,
        "steps": 9,
        "epoch": 0,
        "device": "cpu",
        "generation": 1,
    }
    ingest.lines([{**told, "restored_from": "read", "from_memory": False}])
    ingest.lines([{**told, "restored_from": "held", "from_memory": True}])
    metrics.close()
    journal.close()
    assert "read" == _state(folder)["snapshot"]


def test_time_taken_is_written_without_changes(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that tells nothing runs on, and so does its clock."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    journal = Journal(folder, 1, _ignore)
    journal.update(at_once=True, script="train.py")
    now += 60.0
    journal.turn()
    assert 60.0 == sum(_state(folder)["durations"]["launch"].values())


@pytest.mark.parametrize(
    "content", ["null", "[1]", "{", "", "\x00" * 300, '{"step": "x", "steps": [], "loss": {}}']
)
def test_damaged_state_says_nothing(folder: RunFolder, content: str) -> None:
    """A launch begins with what it knows; whatever lies there, it begins."""
    folder.path.mkdir(parents=True)
    folder.state.write_text(content)
    journal = Journal(folder, 2, _ignore)
    journal.close()

    assert (0, None, None) == tuple(_state(folder)[key] for key in ("step", "steps", "loss"))


def test_damaged_lines_are_moved_aside_and_said(tmp_path: Path) -> None:
    """Good lines among the last ones stay, whatever stands between them."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n\xff\xfe\n{"n": 2}\n[3]\n' + bytes(300))
    lines = AppendedLines(path)
    lines.append([{"n": 4}])
    lines.close()

    assert [{"n": 1}, {"n": 2}, {"n": 4}] == [json.loads(line) for line in path.read_text().splitlines()]
    assert b"\xff\xfe\n[3]\n" + bytes(300) + b"\n" == (tmp_path / "lines.jsonl.damaged").read_bytes()
    assert lines.damage is not None
    assert lines.damage.why.startswith("had 307 bytes at its end")
