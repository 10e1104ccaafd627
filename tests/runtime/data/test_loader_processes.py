"""Loader processes: what ends them is told at once, by name; nothing of them is left behind."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader

from elasticflow.errors import DatasetError, LoaderProcessError
from elasticflow.launcher.restarts import failures
from elasticflow.runtime.data.loader_processes import LoaderProcesses, ThereError
from elasticflow.runtime.data.sample_reader import SampleReader
from elasticflow.runtime.process import failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("real_processes")


class Rows:
    """Numbers; reading number 5 does something else first."""

    def __init__(self, at_five: Callable[[], object] = lambda: None) -> None:
        self.at_five = at_five

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            found = self.at_five()
            if found is not None:
                return found
        return torch.full((3,), float(index))


class TwoArgumentsError(Exception):
    """Cannot be made again from its message."""

    def __init__(self, what: str, number: int) -> None:
        super().__init__(f"{what} {number}")


def fail(error: Exception) -> Callable[[], object]:
    """Return what raises *error*."""

    def at_five() -> object:
        raise error

    return at_five


def batches(dataset: Any, number: int = 2, collate: Any = None, size: int = 2) -> LoaderProcesses:
    """Return the batches of *dataset* as loader processes read them."""
    reads = ((place, list(range(place, place + size))) for place in range(0, 20, size))
    wait: Any = SimpleNamespace(go_on=lambda: None, end=lambda: None)
    reader = SampleReader(dataset, collate, 7)
    return LoaderProcesses(reader, dataset, reads, number, pins_memory=False, wait=wait)


def pids_of(found: LoaderProcesses) -> list[int]:
    """Return the loader processes."""
    return [process.pid for process in found._processes]


def raised(found: Iterator[Any]) -> Exception:
    """Return what is raised while all is read."""
    try:
        for _ in found:
            pass
    except Exception as error:  # noqa: BLE001  # it is what is tested
        return error
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("end", "how", "remedy", "kind"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL", "memory runs out", "crash"),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), "was killed by SIGBUS", "has become shorter", "crash"),
        (lambda: ctypes.string_at(0), "was killed by SIGSEGV", "a library that the dataset uses", "crash"),
        (lambda: os._exit(3), "ended with exit code 3", "dataset.num_workers = 0", "user_error"),
        (lambda: os._exit(0), "ended with exit code 0", "dataset.num_workers = 0", "user_error"),
        (lambda: sys.exit(4), "ended with exit code 4", "dataset.num_workers = 0", "user_error"),
    ],
    ids=["kill", "bus", "segv", "exit", "exit-0", "sys.exit"],
)
def test_death_of_a_process_is_told_by_name(
    end: Callable[[], object], how: str, remedy: str, kind: str
) -> None:
    """Dataset, sample, signal or exit code, and what helps; classified as a worker's own end would be."""
    error = raised(batches(Rows(end)))
    assert isinstance(error, LoaderProcessError | DatasetError)
    assert error.message.endswith(f"of {__name__}.Rows {how} while it read sample 5")
    assert error.remedy is not None
    assert remedy in error.remedy
    assert kind == failure.classify(error)
    told = {"class": kind, "error": failure.describe(error)}
    assert kind == failures.classify(1, told)
    assert ("oom" if kind == "crash" else kind) == failures.classify(1, told, oom_killed=True)


@pytest.mark.parametrize(
    ("error", "kind", "classified"),
    [
        (ValueError("label 9 is out of range"), ValueError, "user_error"),
        (MemoryError("no room"), MemoryError, "oom"),
        (TwoArgumentsError("row", 5), RuntimeError, "user_error"),
    ],
)
def test_an_exception_of_the_dataset_keeps_its_kind_and_traceback(
    error: Exception, kind: type[Exception], classified: str
) -> None:
    """As it would be raised here, with a note that names the sample and the traceback there as its cause."""
    found = raised(batches(Rows(fail(error))))
    assert type(found) is kind
    assert str(error) in str(found)
    assert isinstance(found.__cause__, ThereError)
    assert "in at_five" in failure.text(found)
    assert f"while reading sample 5 of {__name__}.Rows" in failure.describe(found)
    assert classified == failure.classify(found)


def test_a_batch_that_cannot_be_sent_ends_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    """Else it would be dropped, and the worker would wait for it for ever."""
    error = raised(batches(Rows(), collate=lambda samples: lambda: samples))
    assert isinstance(error, DatasetError)
    assert "ended with exit code 1" in error.message
    assert "a loader process cannot send a batch to its worker" in capfd.readouterr().err


def test_processes_ignore_what_asks_the_worker_to_drain() -> None:
    """SIGTERM and SIGINT sent to the whole session do not end them: the drain needs their batches."""
    found = batches(Rows())
    first = next(found)
    for pid in pids_of(found):
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    assert first.shape == (2, 3)
    assert len(list(found)) == 9


def test_a_worker_whose_processes_cannot_start_still_hears_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork may fail for want of memory."""

    def fail_to_fork(_: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(DataLoader, "__iter__", fail_to_fork)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        batches(Rows())
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM, signal.SIGINT}


def shared_memory_of(pids: list[int]) -> list[str]:
    """Return the names that those processes left in the folder of shared memory."""
    return [f.name for f in Path("/dev/shm").iterdir() for pid in pids if f"_{pid}_" in f.name]


@pytest.mark.parametrize("collate", [torch.stack, torch.utils.data.default_collate], ids=["moved", "made"])
def test_batches_come_in_memory_without_a_name(collate: Callable[..., torch.Tensor]) -> None:
    """Whether the batch is made there, as torch's own collate does, or moved there: a kill at any moment leaves nothing."""
    for batch in batches(Rows(), collate=collate):
        (mapped,) = [
            line
            for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
            if int(line.partition("-")[0], 16) == batch.untyped_storage().data_ptr()
        ]
        assert "/memfd:elasticflow-batch" in mapped


def test_empty_batch_comes() -> None:
    """There is nothing to share of it."""
    assert [(2, 0)] * 10 == [tuple(batch.shape) for batch in batches(Rows(), collate=_without_columns)]


def _without_columns(samples: list[torch.Tensor]) -> torch.Tensor:
    made: torch.Tensor = torch.utils.data.default_collate([sample[:0] for sample in samples])
    return made


def test_nothing_is_left_of_processes_that_are_not_read_to_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No process, no shared memory, no temporary file, though batches were read ahead."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = batches(Rows())
    next(found)
    pids = pids_of(found)
    assert len(pids) == 2
    del found
    gc.collect()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert shared_memory_of([*pids, os.getpid()]) == []
    assert [] == list(tmp_path.iterdir())


def test_nothing_is_left_of_a_worker_that_is_killed() -> None:
    """Loader processes die with it, and shared memory has no names."""
    told, tells = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        found = batches(Rows())
        next(found)
        tells.send(pids_of(found))
        os.kill(os.getpid(), signal.SIGKILL)

    worker = multiprocessing.get_context("fork").Process(target=work)
    worker.start()
    pids = told.recv()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert shared_memory_of(pids) == []


def test_a_dataset_may_start_processes_of_its_own() -> None:
    """Their ends are no loader process's end."""
    first = batches(Rows())
    next(first)
    second = batches(Rows(lambda: subprocess.run(["true"], check=True).stdout))
    assert len(list(second)) == 10
    assert len(list(first)) == 9
