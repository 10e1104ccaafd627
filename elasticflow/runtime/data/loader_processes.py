"""Loader processes: they read ahead of the training step, and report why if they cannot."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from elasticflow.errors import DatasetError, LoaderProcessError, WorkerError
from elasticflow.runtime.data import notes
from elasticflow.runtime.process import stopping
from elasticflow.runtime.process.torch_private import (
    LOADER_TIMED_OUT,
    is_next_delivered,
    loader_processes_of,
    share_batches_without_names,
)
from elasticflow.system.processes import LOADER, die_with_parent, set_name, signal_or_code

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from elasticflow.runtime.data.sample_reader import SampleReader
    from elasticflow.runtime.data.step_plan import Read
    from elasticflow.runtime.process.context import Worker

_OUT_OF_MEMORY = (
    "the kernel does that when memory runs out: lower dataset.num_workers, or use smaller batches"
)
_CRASHED = "a library that the dataset uses crashed: the process's stack is in the rank's standard error"
_CUT_SHORT = "a file that it had mapped to memory has become shorter, or /dev/shm is full (torch's sharing strategy `file_system`)"
_REMEDIES = {signal.SIGKILL: _OUT_OF_MEMORY, signal.SIGBUS: _CUT_SHORT}
_IGNORED = (signal.SIGTERM, signal.SIGINT)
_NOTHING = -1
_DYING_S = 2.0
_LOOK_S = 0.2  # a process that ended is missed after so long
_ENDING = (RuntimeError, OSError, EOFError)  # what it looks like to fetch from a process that ends


class LeaveWhileWaiting:
    """Reports a long wait for loader processes, and exits if asked to."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self._phase = worker, ""

    def go_on(self) -> None:
        """Called several times a second.

        Raises:
            Leaving: this rank was asked to exit.
        """
        worker = self._worker
        if not self._phase:
            self._phase = worker.heartbeat.phase("data")
        if worker.vote.leave_wanted and worker.vote.may_skip:
            raise stopping.Leaving

    def end(self) -> None:
        """Called once data is there."""
        self._worker.heartbeat.phase(self._phase)
        self._phase = ""


class LoaderProcesses:
    """Yields the batches of *reads* in their order, read by processes of its own.

    Args:
        reads: The reads in order; some batches ahead of those yielded are requested.
        wait: Called while a batch is long in coming, and once it has come.

    Raises:
        Exception: while iterating, an exception of dataset or collate; its cause is the traceback in the loader process.
        LoaderProcessError: while iterating, a loader process was killed.
        DatasetError: while iterating, a loader process has ended by itself.
    """

    def __init__(
        self,
        reader: SampleReader,
        dataset: Any,
        reads: Iterable[Read],
        num_workers: int,
        *,
        pins_memory: bool,
        wait: LeaveWhileWaiting,
    ) -> None:
        # Others than forked ones would not be this process's children (Python 3.14), and lose the dataset's memory.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._name, self._wait = notes.name_of(dataset), wait
        self._at = context.RawArray("q", [_NOTHING] * num_workers)
        loader: DataLoader[Any] = DataLoader(
            _ReaderInProcess(reader, self._at),  # type: ignore[arg-type]  # map-style by __getitems__ alone
            batch_sampler=reads,  # type: ignore[arg-type]
            num_workers=num_workers,
            collate_fn=_as_it_is,
            pin_memory=pins_memory,
            worker_init_fn=partial(_enter_process, os.getpid()),
            generator=torch.Generator(),  # leaves the global generator alone
            multiprocessing_context=context,
            timeout=_LOOK_S,
        )
        before = signal.getsignal(signal.SIGCHLD)
        signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until a process has learnt to ignore them
        try:
            batches: Any = iter(loader)
        finally:  # a fork may fail, and the worker is still to be ended by a signal
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)  # torch's handler raises wherever the main thread is
        self._batches, self._processes = batches, loader_processes_of(batches)
        # They ignore what Python ends them with at its own end, and would be waited for.
        weakref.finalize(self, _kill, self._processes, os.getpid())

    def __iter__(self) -> Iterator[Any]:
        return self

    @property
    def is_next_here(self) -> bool:
        """True if the next batch, or the error in its place, is taken without waiting; known of pinned batches alone."""
        return is_next_delivered(self._batches)

    def __next__(self) -> Any:
        has_waited = False
        while True:
            try:
                batch = next(self._batches)
            except _ENDING as error:
                if LOADER_TIMED_OUT in str(error):
                    has_waited = True
                    self._wait.go_on()
                    continue
                self._refuse_deaths()
                raise
            if has_waited:
                self._wait.end()
            if isinstance(batch, _Failed):
                raise batch.error()
            return batch

    def _refuse_deaths(self) -> None:
        ended = connection.wait([process.sentinel for process in self._processes], timeout=_DYING_S)
        for number, process in enumerate(self._processes):
            if process.sentinel in ended:
                process.join()
                raise _death(process.pid, process.exitcode, self._name, self._at[number])


def _kill(processes: list[Any], parent: int) -> None:
    if os.getpid() == parent:
        for process in processes:
            process.kill()


def _death(pid: int, code: int, name: str, sample: int) -> WorkerError:
    where = "" if sample == _NOTHING else f" while it read sample {sample}"
    if code >= 0:
        return DatasetError(
            f"loader process {pid} of {name} ended with exit code {code}{where}",
            "its last words are in the rank's standard error; with dataset.num_workers = 0 the same happens here",
        )
    remedy = _REMEDIES.get(-code, _CRASHED)  # type: ignore[call-overload]  # signals are numbers
    return LoaderProcessError(f"loader process {pid} of {name} was {signal_or_code(code)}{where}", remedy)


class _ReaderInProcess:
    """A reader in a loader process: what it raises becomes its result."""

    def __init__(self, reader: SampleReader, at: Any) -> None:
        self._reader, self._at = reader, at
        self._is_ready = False

    def __getitems__(self, read: Read) -> Any:  # torch's loader calls it by this name
        if not self._is_ready:
            self._reader.enter_process(self._noted)
            self._is_ready = True
        try:
            return self._reader.read(*read)
        except Exception as error:  # noqa: BLE001  # raised again where it is awaited
            return _Failed.of(error)

    def _noted(self, indices: list[int]) -> Iterator[int]:
        info, at = get_worker_info(), self._at
        assert info is not None
        for index in indices:
            at[info.id] = index
            yield index
        at[info.id] = _NOTHING


class ThereError(Exception):
    """The traceback of an exception in a loader process."""


class _Failed(NamedTuple):
    """An exception that travels between processes."""

    pickled: bytes
    text: str

    @classmethod
    def of(cls, error: Exception) -> _Failed:
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # noqa: S301  # what this process made
        except Exception:  # noqa: BLE001  # some exceptions cannot be made again from their arguments
            said = "".join(traceback.format_exception_only(error)).strip()
            pickled = pickle.dumps(RuntimeError(said))
        return cls(pickled, text)

    def error(self) -> Exception:
        error: Exception = pickle.loads(self.pickled)  # noqa: S301  # what a child of this process made
        error.__cause__ = ThereError(f'\n"""\n{self.text}"""')
        return error


def _enter_process(parent: int, _: int) -> None:
    """Make this process a loader process of *parent*."""
    # A drain signal sent to the whole session is the worker's business; without the worker this process has none.
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)
    with suppress(OSError, ValueError, RuntimeError):  # standard error without a descriptor
        faulthandler.enable()
    # By default a batch that cannot be sent is dropped, and the worker waits for it for ever.
    Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]  # noqa: SLF001
    if sys.platform == "linux":
        share_batches_without_names()
    set_name(LOADER)
    die_with_parent(parent)


def _end(error: Exception, _: object) -> None:
    sys.stderr.write("a loader process cannot send a batch to its worker\n")
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _as_it_is(batch: Any) -> Any:
    return batch
