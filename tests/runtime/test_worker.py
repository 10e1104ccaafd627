"""Workers that fail, skip, meet other data or damage, in real groups."""

from __future__ import annotations

import json
import os
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from elasticflow import errors
from elasticflow.errors import StateError
from elasticflow.events import COMMON_FIELDS, EVENTS, WORKER_FIELDS
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.run_folder import RunFolder
from elasticflow.runtime import worker
from elasticflow.runtime.measuring import device_memory
from elasticflow.runtime.process import failure, process_group
from elasticflow.runtime.process.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Groups = "Callable[[str], Any]"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("x"), "user_error"),
        (errors.NonFiniteLossError("x"), "nonfinite"),
        (errors.StorageError("x"), "storage"),
        (MemoryError(), "oom"),
        (dist.DistNetworkError("x"), "peer"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"), "peer"),
        (RuntimeError("CUDA error"), "user_error"),
    ],
)
def test_classes_of_failures(error: BaseException, expected: str) -> None:
    """Each exception is counted under one class of the restart budget."""
    assert failure.classify(error) == expected


def test_memory_of_the_device_is_told_with_a_failure_for_want_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the error, and whole on standard error; of another failure it is not asked."""
    told: list[dict[str, Any]] = []
    device, log = torch.device("cuda", 0), SimpleNamespace(error=lambda _, **facts: told.append(facts))
    monkeypatch.setattr(worker, "_current", SimpleNamespace(device=device, log=log))
    monkeypatch.setattr(device_memory, "memory_line", lambda on: f"{on}: 70 GB in tensors")
    monkeypatch.setattr(device_memory, "memory_summary", lambda on: f"summary of {on}")
    worker._report(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    worker._report(ValueError("x"))
    memory, other = told
    assert memory["class"] == "oom"
    assert memory["error"].endswith("Tried to allocate 2 GiB\n  cuda:0: 70 GB in tensors")
    assert other["error"] == "ValueError: x"
    assert capsys.readouterr().err.count("summary of cuda:0") == 1


def test_identity_of_a_plain_process(tmp_path: Path) -> None:
    """Without any variable it is one process, and the run folder is where the entry point lies."""
    identity = Identity.read({}, tmp_path)
    assert (identity.started_by, identity.rank, identity.world_size, identity.run_id) == (
        "python",
        0,
        1,
        "by-hand",
    )
    assert identity.run_folder.path == tmp_path
    assert identity.generation is None


def test_identity_given_by_our_agent(tmp_path: Path) -> None:
    """The agent's variables say everything."""
    variables = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "29500",
    }
    ours = {
        "ELASTICFLOW_GENERATION": "7",
        "ELASTICFLOW_RUN_FOLDER": str(tmp_path / "run"),
        "ELASTICFLOW_FAILED_AT": "",
    }
    identity = Identity.read({**variables, **ours}, tmp_path)
    assert (identity.started_by, identity.rank, identity.local_rank, identity.generation) == (
        "launcher",
        3,
        1,
        7,
    )
    assert identity.run_folder.path == tmp_path / "run"
    assert identity.failed_at is None


def test_workers_of_one_start_of_torchrun_share_a_folder(tmp_path: Path) -> None:
    """It tells each of them a file of its own below that folder; another start's folder has another name."""
    of_rank, of_other, of_next = (
        Identity.read({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": file}, tmp_path)
        for file in (
            "/t/none_a/attempt_0/0/error.json",
            "/t/none_a/attempt_0/1/error.json",
            "/t/none_b/attempt_0/0/error.json",
        )
    )
    assert of_rank.torchrun_folder == of_other.torchrun_folder != of_next.torchrun_folder


def test_a_place_of_snapshots_is_of_one_job(tmp_path: Path) -> None:
    """Two scripts with one place: the second went on from the first one's last step, and ended without a step of its own."""
    settings = SnapshotSettings(str(tmp_path / "snaps"))
    first, second = (Identity.read({}, tmp_path / name) for name in ("a", "b"))
    assert worker._generation(first, settings, None, "a") == 1
    assert worker._generation(first, settings, None, "a") == 2
    with pytest.raises(StateError, match="snaps are those of a, and this is b"):
        worker._generation(second, settings, None, "b")
    assert worker._generation(first, settings, None, "a") == 3


def test_the_run_folder_is_locked_once_the_store_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank 0 whose torchrun was killed while it imported waits minutes for the store: the next start has the run meanwhile."""

    def wait_in_vain(identity: Identity, device: torch.device) -> None:
        assert (identity.started_by, identity.rank) == ("torchrun", 0)
        raise dist.DistNetworkError("no store")

    monkeypatch.setattr(worker, "_prepare_process", lambda _: None)
    monkeypatch.setattr(process_group, "connect", wait_in_vain)
    monkeypatch.setattr(process_group, "set_threads", lambda *_: None)
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = SnapshotSettings(str(tmp_path / "snapshots"))
    with pytest.raises(dist.DistNetworkError):
        worker.join("a", "", tmp_path, settings, seed=0, threads=1, device="cpu")
    assert not RunFolder(tmp_path).lock.exists()


def test_a_rank_that_waits_for_its_peers_ends_at_sigterm_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes from torchrun once one rank has failed: while it was blocked, the others were killed 30 s later."""
    for part in ("faulthandler", "fault_injection", "forked_children", "devices"):
        monkeypatch.setattr(worker, part, MagicMock())
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a handler would run after the wait
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    try:
        worker._prepare_process(Identity.read(os.environ, tmp_path))
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


@pytest.mark.e2e
def test_user_error_is_told_from_its_echo(groups: Callable[[str], Any]) -> None:
    """The rank that raises says so with the user's frame last; the other one lost its peer."""
    group = groups("run")
    ended = group.run(2, "--raise-at", "3", ends=False)
    assert ended.codes[1] == 1
    (raised,) = group.lines("worker.raised", rank=1)
    assert (raised["class"], raised["error"]) == ("user_error", "ValueError: label 9 is out of range")
    assert 'raise ValueError("label 9 is out of range")' in raised["traceback"].splitlines()[-2]
    assert "ValueError: label 9 is out of range" in ended.errors[1]
    assert [line["class"] for line in group.lines("worker.raised", rank=0)] in ([], ["peer"])


@pytest.mark.e2e
def test_loss_that_is_not_finite_stops_every_rank(groups: Callable[[str], Any]) -> None:
    """All ranks stop at the same step with the same reason."""
    group = groups("run")
    assert group.run(2, "--nan-at", "4").codes == [1, 1]
    for rank in (0, 1):
        (raised,) = group.lines("worker.raised", rank=rank)
        assert raised["class"] == "nonfinite"
        assert raised["error"].startswith("the loss of step 4 is nan")


@pytest.mark.e2e
def test_skipped_step_other_data_and_damage(groups: Callable[[str], Any]) -> None:
    """A skipped step is logged and never snapshotted; other data is refused; a damaged snapshot is set aside."""
    group = groups("run")
    arguments = ["--every", "2 steps", "--nan-at", "4", "--on-nonfinite", "skip"]
    assert group.run(2, *arguments, "--term-at", "7").codes == [0, 0]
    assert [line["step"] for line in group.lines("loss.skipped")] == [4]
    assert [line["step"] for line in group.lines("snapshot.staged")] == [2, 5, 6, 7]
    for line in group.lines("step") + group.lines("snapshot.staged") + group.lines("training.started"):
        assert {*COMMON_FIELDS, *WORKER_FIELDS, *EVENTS[line["event"]].fields} <= line.keys()
        assert line["timestamp"].endswith("Z")

    assert group.run(2, *arguments, "--data-seed", "1", "--samples", "101").codes == [1, 1]
    (raised,) = group.lines("worker.raised", generation=2)
    assert raised["error"].startswith(
        "the data of `train` is not what the snapshot was trained on: fingerprint "
    )
    assert " and 101 samples, not 100" in raised["error"]

    newest = group.folder.path / "snapshots" / group.newest().manifest.name
    shard = next(newest.glob("shard-00001*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert group.run(2, *arguments).codes == [0, 0]
    (rejected,) = group.lines("snapshot.rejected", generation=3)
    assert rejected["name"] == newest.name
    assert rejected["reason"].startswith("shard-00001-of-00002.safetensors: block 0")
    assert group.lines("training.started", generation=3)[0]["step"] == 6
    assert (
        json.loads((group.folder.path / "verdicts" / f"{newest.name}.json").read_text())["name"]
        == newest.name
    )
