"""The writer process as workers, its parent and the file system see it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow import events
from elasticflow.errors import SnapshotError
from elasticflow.snapshots.client import writer_process
from elasticflow.snapshots.client.messages import as_event
from elasticflow.snapshots.client.staging import MOST_OPEN, StagingClient
from elasticflow.snapshots.client.writer_process import WriterStart, start_writer
from elasticflow.snapshots.format.manifest import ManifestFacts
from elasticflow.snapshots.format.shard_file import SnapshotRecord, TensorEntry
from elasticflow.snapshots.read import verify
from elasticflow.snapshots.writer.main import ThrottledTroubles
from elasticflow.storage.storage import Trouble

if TYPE_CHECKING:
    from tests.snapshots.conftest import Bench


def test_two_ranks_make_one_snapshot(bench: Bench) -> None:
    """Both shares, the state and the manifest are there, verified, and say what was staged."""
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    for rank, client in enumerate(clients):
        bench.share(client, 5, rank=rank, parent=None, metric=float("inf"), epoch=2)
    for client in clients:
        assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 5)]
    name = bench.name_of(5)
    (found,) = bench.catalog.committed()
    assert (found.name, found.step, found.generation, found.world_size) == (name, 5, 1, 2)
    assert (found.trigger, found.samples, found.metric, found.epoch) == ("steps", 50, float("inf"), 2)
    assert set(found.tensors) == {"a0", "b0", "a1", "b1"}
    assert verify.verify(bench.catalog, found) == []
    assert verify.read_state(bench.catalog, found) == {"position": {"step": 5}, "state": {}}
    place = found.tensors["b1"]
    shard = verify.read_shard(
        bench.catalog.storage, f"snapshots/{name}/{place.file}", found.files[place.file]
    )
    assert shard[place.offset : place.offset + place.nbytes] == bench.content(5, 1)[500:1000]
    assert set(bench.catalog.storage.list(f"snapshots/{name}")) == {*found.files, "MANIFEST.json"}


def test_shards_are_safetensors(bench: Bench) -> None:
    """Any safetensors reader opens a shard, also when the staging buffer has gaps and the order is mixed."""
    deserialize = pytest.importorskip("safetensors").deserialize
    client = bench.connect(bench.writer())
    buffer = client.buffer(200)
    buffer[:] = bytes(range(200))
    entries = [
        TensorEntry("late", "U8", (10,), 150, 10),
        TensorEntry("early", "U8", (8,), 0, 8),
        TensorEntry("empty", "F32", (0, 3), 64, 0),
        TensorEntry("scalar", "I64", (), 64, 8),
    ]
    name = bench.name_of(1)
    client.stage(
        name=name,
        step=1,
        tensors=entries,
        nbytes=200,
        record=SnapshotRecord({}, ManifestFacts(trigger="steps")),
    )
    client.flush(20)
    shard = bench.catalog.storage.read(f"snapshots/{name}/shard-00000-of-00001.safetensors")
    found = {key: (value["dtype"], value["shape"], bytes(value["data"])) for key, value in deserialize(shard)}
    assert found == {
        "early": ("U8", [8], bytes(range(8))),
        "late": ("U8", [10], bytes(range(150, 160))),
        "empty": ("F32", [0, 3], b""),
        "scalar": ("I64", [], bytes(range(64, 72))),
    }


def test_a_rank_may_have_nothing_to_stage(bench: Bench) -> None:
    """More ranks than tensors: the empty share takes part all the same."""
    writer = bench.writer()
    clients = [bench.connect(writer, rank, 2) for rank in range(2)]
    bench.share(clients[0], 1)
    clients[1].stage(name=bench.name_of(1), step=1, tensors=[], nbytes=0)
    assert bench.outcomes(clients[1].flush(20)) == [("snapshot.committed", 1)]
    newest = bench.catalog.newest()
    assert newest is not None
    assert set(newest.tensors) == {"a0", "b0"}


def test_parent_and_workers_hear_of_commits(bench: Bench) -> None:
    """The same outcome reaches the parent's pipe and every rank that gave a share."""
    writer = bench.writer(keep_last=1)
    client = bench.connect(writer)
    for step in (1, 2):
        bench.share(client, step)
    reports = bench.flushed(client, 20)
    assert bench.outcomes(reports) == [("snapshot.committed", 1), ("snapshot.committed", 2)]
    assert [r.name for r in reports if r.event == "snapshot.removed"] == [bench.name_of(1)]
    committed = reports[0]
    assert (committed.bytes or 0) > 1000
    assert (committed.seconds or 0) > 0
    assert (committed.trigger, committed.generation) == ("steps", 1)
    time.sleep(0.1)
    assert bench.outcomes(writer.reports()) == bench.outcomes(reports)


def test_retention_keeps_last_best_and_parent(bench: Bench) -> None:
    """After a commit the newest, the best and the one this generation started from stay."""
    client = bench.connect(bench.writer(keep_last=1, keep_best=1, best_mode="max"))
    for step, metric in ((1, 0.1), (2, 0.9), (3, 0.5), (4, 0.2)):
        bench.share(client, step, metric=metric, parent=bench.name_of(1))
        client.flush(20)
    assert [s.step for s in bench.catalog.committed()] == [4, 2, 1]
    assert set(bench.catalog.storage.list("snapshots")) == {bench.name_of(step) for step in (1, 2, 4)}


def test_retention_goes_on_beside_a_folder_that_cannot_be_removed(bench: Bench) -> None:
    """A snapshot that was moved to another disk, with a link in its place, and a file where a writer left a folder."""
    client = bench.connect(bench.writer(keep_last=3))
    for step in (1, 2):
        bench.share(client, step)
        client.flush(20)
    folder = bench.catalog.storage.local_path("snapshots")
    moved = folder.parent / "moved"
    (folder / bench.name_of(2)).rename(moved)
    (folder / bench.name_of(2)).symlink_to(moved)
    (folder / f".tmp-{bench.name_of(8)}").touch()
    (folder / f".tmp-{bench.name_of(9)}").mkdir()
    client = bench.connect(bench.writer(keep_last=1), generation=2)
    bench.share(client, 3, generation=2)
    client.flush(20)
    left = {bench.name_of(2), bench.name_of(3, 2), f".swept-{bench.name_of(8)}"}
    assert left == {path.name for path in folder.iterdir()}


def test_both_buffers_busy_makes_the_worker_wait(bench: Bench) -> None:
    """A slow store delays the next snapshot; nothing staged is overwritten before it is written."""
    client = bench.connect(bench.writer(keep_last=100))
    for step in range(1, 9):
        bench.share(client, step, size=3_000_000)
    reports = client.flush(60)
    assert bench.outcomes(reports) == [("snapshot.committed", step) for step in range(1, 9)]
    catalog = bench.catalog
    for found in catalog.committed():
        assert verify.verify(catalog, found) == []
        place = found.tensors["a0"]
        shard = verify.read_shard(
            catalog.storage, f"snapshots/{found.name}/{place.file}", found.files[place.file]
        )
        assert (
            shard[place.offset : place.offset + place.nbytes]
            == bench.content(found.step, 0, 3_000_000)[:1_500_000]
        )


def test_snapshots_that_are_not_committed_do_not_pile_up(bench: Bench) -> None:
    """Small ones are written at once; while the commit of the first waits for another node, the ninth is not taken."""
    client = bench.connect(bench.writer(keep_last=100), 0, 2, local_world_size=1)
    for step in range(1, MOST_OPEN + 1):
        bench.share(client, step)
    with pytest.raises(SnapshotError, match=f"none of {MOST_OPEN} snapshots was committed"):
        client.buffer(1000, timeout_s=0.3)
    other = bench.connect(bench.writer(keep_last=100), 1, 2, local_world_size=1)
    bench.share(other, 1, rank=1)
    bench.share(client, MOST_OPEN + 1)

    assert ("snapshot.committed", 1) in bench.outcomes(client.reports())


def test_buffers_grow_and_stay_warm(bench: Bench) -> None:
    """A larger state gets larger buffers; a worker's successor gets its buffers back."""
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1, size=1000)
    bench.share(client, 2, size=5_000_000)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 1), ("snapshot.committed", 2)]
    numbers = {slot.number for slot in client.slots}
    client.close()
    time.sleep(0.2)
    successor = bench.connect(writer, generation=2)
    successor.reserve(5_000_000)
    successor.buffer(5_000_000)
    assert {slot.number for slot in successor.slots} == numbers


def test_no_torch_and_no_fsspec_in_the_writer(real_processes: None) -> None:
    """On a local disk the writer starts with neither loaded."""
    code = (
        "import sys, elasticflow.snapshots.writer.main as w; "
        "assert not {'torch', 'fsspec', 'pydantic', 'structlog'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_term_and_int_are_ignored(bench: Bench) -> None:
    """Signals meant for a whole process group do not end the writer in the middle of the last snapshot."""
    writer = bench.writer()
    client = bench.connect(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        writer.process.send_signal(number)
    bench.share(client, 1)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 1)]


def test_leaves_when_its_input_ends(bench: Bench) -> None:
    """Closing the parent's pipe ends the writer within moments, whatever it was doing."""
    writer = bench.writer()
    began = time.monotonic()
    writer.close()
    assert time.monotonic() - began < 1
    assert writer.process.returncode == 0


def test_dies_with_its_parent(tmp_path: Path, real_processes: None) -> None:
    """A parent killed by SIGKILL takes the writer with it."""
    code = (
        "import sys, time; from elasticflow.snapshots.client.writer_process import start_writer; from elasticflow.snapshots.client.writer_process import WriterStart; "
        f"w = start_writer(WriterStart({str(tmp_path)!r}, 'r')); print(w.process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and _is_alive(pid):
        time.sleep(0.01)
    assert not _is_alive(pid)


def test_dead_writer_is_noticed(bench: Bench) -> None:
    """A worker that waits for a writer that was killed gets an error, not silence."""
    writer = bench.writer()
    client = bench.connect(writer)
    bench.share(client, 1)
    writer.process.kill()
    writer.process.wait()
    with pytest.raises(SnapshotError, match="the snapshot writer died"):
        client.flush(20)


def test_whoever_hears_of_the_writers_death_finds_it_ended(bench: Bench) -> None:
    """Its connections close before it can be waited for: the agent blames it, not the worker that noticed."""
    writer = bench.writer()
    client = bench.connect(writer)
    assert writer.exit_code() is None
    writer.process.kill()
    with pytest.raises(SnapshotError, match="the snapshot writer died"):
        client.receive_one(None, "")

    assert -9 == writer.exit_code()


def test_nobody_listens() -> None:
    """Connecting to an address without a writer is told at once."""
    with pytest.raises(SnapshotError, match="the snapshot writer cannot be reached"):
        StagingClient.connect("@elasticflow-nobody", rank=0, world_size=1, local_world_size=1, generation=1)


def test_writer_that_cannot_start_is_told(
    tmp_path: Path,
    real_processes: None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A configuration that makes the writer fail is an error at start, with its traceback on standard error."""
    told = {"uri": str(tmp_path), "run_id": "r", "settings": {"no_such_key": 1}, "limits": {}}
    monkeypatch.setattr(writer_process, "to_json", lambda _: json.dumps(told))
    with pytest.raises(SnapshotError, match=r"the snapshot writer did not start \(exit code 1\)"):
        start_writer(WriterStart(str(tmp_path), "r"))
    assert "no_such_key" in capfd.readouterr().err


def test_no_memory_to_stage_is_told(bench: Bench) -> None:
    """A state larger than the machine is an error with figures, and no process is killed for it."""
    writer = bench.writer()
    client = bench.connect(writer)
    with pytest.raises(SnapshotError, match=r"no memory to stage \d+ bytes: .* MiB of memory are left"):
        client.buffer(1 << 50, timeout_s=20)
    assert writer.process.poll() is None


def test_waiting_for_a_buffer_has_a_limit(bench: Bench) -> None:
    """A store that hangs is an error after the time that was given."""
    writer = bench.writer()
    client = bench.connect(writer)
    client.buffer(1000)
    writer.process.send_signal(signal.SIGSTOP)
    for step in (1, 2):
        bench.share(client, step)
    with pytest.raises(SnapshotError, match="no staging buffer became free in time"):
        client.buffer(1000, timeout_s=0.2)
    with pytest.raises(SnapshotError, match="no outcome of 000000000001-0001-00000001, 0"):
        client.flush(0.2)
    writer.process.send_signal(signal.SIGCONT)
    assert bench.outcomes(client.flush(20)) == [("snapshot.committed", 1), ("snapshot.committed", 2)]


def test_older_generation_is_refused(bench: Bench) -> None:
    """After a worker of generation 3 a late one of generation 2 is turned away by name."""
    writer = bench.writer()
    bench.connect(writer, generation=3)
    with pytest.raises(SnapshotError, match="generation 2 is over, 3 is here"):
        bench.connect(writer, generation=2)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_first_trouble_is_told_and_then_one_in_ten_seconds() -> None:
    """Of an outage with hundreds of tries a few events remain, each with the try it is about."""
    told: list[Trouble] = []
    now = 100.0
    take = ThrottledTroubles(told.append, lambda: now)
    for attempt in range(1, 26):
        take(Trouble("read x", "ConnectionError", "ConnectionError: reset", attempt, 0.123))
        now += 1.0
    assert [1, 11, 21] == [trouble.attempt for trouble in told]
    event = as_event(told[0])
    assert {"event", *events.STORE_TROUBLE.fields} == set(event)
    assert (0.1, "ConnectionError") == (event["pause_s"], event["class"])
    assert ("read x", "ConnectionError: reset", 1) == (event["operation"], event["error"], event["attempt"])
