"""Loader processes: they read ahead of the training step, and say why when they cannot (floor R)."""

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
from multiprocessing.queues import Queue
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import DataLoader, get_worker_info

from elasticflow.errors import DatasetError, LoaderProcessError, WorkerError
from elasticflow.lifeline import die_with_parent
from elasticflow.runtime import notes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import FrameType

    from elasticflow.runtime.reader import Reader
    from elasticflow.runtime.steps import Read

_OUT_OF_MEMORY = (
    "the kernel does that when memory runs out: lower dataset.num_workers, or use smaller batches"
)
_OUT_OF_SHARED_MEMORY = (
    "shared memory was used up: make /dev/shm larger (docker run --shm-size), or lower dataset.num_workers"
)
_CRASHED = "a library that the dataset uses crashed: the process's stack is in the rank's standard error"
_REMEDIES = {signal.SIGKILL: _OUT_OF_MEMORY, signal.SIGBUS: _OUT_OF_SHARED_MEMORY}
_NOTHING = -1


class Processes:
    """Yields the batches of *reads* in their order, read by processes of its own.

    Args:
        reader: What they read with.
        dataset: What error messages name.
        reads: What to read; asked for some batches ahead of those yielded.
        number: How many processes.
        pins_memory: Batches lie in page-locked memory.

    Raises:
        Exception: while iterating, what dataset or collate raised; its cause is the traceback there.
        LoaderProcessError: anywhere in the main thread, as soon as one of the processes was killed.
        DatasetError: so, as soon as one has ended by itself.
    """

    def __init__(
        self, reader: Reader, dataset: Any, reads: Iterable[Read], number: int, *, pins_memory: bool
    ) -> None:
        # Others than forked ones would not be this process's children (Python 3.14), and lose the dataset's memory.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
        self._name = notes.name_of(dataset)
        self._at = context.RawArray("q", [_NOTHING] * number)
        loader: DataLoader[Any] = DataLoader(
            _ReaderThere(reader, self._at),  # type: ignore[arg-type]  # map-style by __getitems__ alone
            batch_sampler=reads,  # type: ignore[arg-type]
            num_workers=number,
            collate_fn=_as_it_is,
            pin_memory=pins_memory,
            worker_init_fn=_Become(os.getpid()),
            generator=torch.Generator(),  # leaves the global generator alone
            multiprocessing_context=context,
        )
        self._batches: Any = iter(loader)
        self._is_told = False
        if threading.current_thread() is threading.main_thread():
            self._listen()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            found = next(self._batches)
        except RuntimeError as error:  # torch looks every five seconds whether all are alive
            death = self._death()
            if death is None:
                raise
            raise death from error
        if isinstance(found, _Failed):
            raise found.error()
        return found

    def _listen(self) -> None:
        # A death is told at once, wherever the main thread is. torch's handler, which does the same, stays below:
        # it knows neither the dataset nor of processes that end with code 0.
        ours, torchs = weakref.ref(self), signal.getsignal(signal.SIGCHLD)

        def heard(number: int, frame: FrameType | None) -> None:
            me = ours()
            death = None if me is None or me._is_told else me._death()  # noqa: SLF001
            if death is not None:
                raise death
            if callable(torchs):
                torchs(number, frame)

        signal.signal(signal.SIGCHLD, heard)

    def _death(self) -> WorkerError | None:
        # Source: torch 2.13, _MultiProcessingDataLoaderIter: `_workers`, and `_shutdown` when they end as they should.
        for number, process in enumerate([] if self._batches._shutdown else self._batches._workers):  # noqa: SLF001
            code = process.exitcode
            if code is not None:
                self._is_told = True
                return _death(process.pid, code, self._name, self._at[number])
        return None


def _death(pid: int, code: int, name: str, sample: int) -> WorkerError:
    where = "" if sample == _NOTHING else f" while it read sample {sample}"
    if code >= 0:
        return DatasetError(
            f"loader process {pid} of {name} ended with exit code {code}{where}",
            "its last words are in the rank's standard error; with dataset.num_workers = 0 the same happens here",
        )
    try:
        how = signal.Signals(-code).name
    except ValueError:
        how = f"signal {-code}"
    remedy = _REMEDIES.get(-code, _CRASHED)  # type: ignore[call-overload]  # signals are numbers
    return LoaderProcessError(f"loader process {pid} of {name} was killed by {how}{where}", remedy)


class _ReaderThere:
    """A reader in a loader process: what it raises becomes its result."""

    def __init__(self, reader: Reader, at: Any) -> None:
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


class _Become:
    """Makes a process a loader process of *parent*; picklable, for platforms that do not fork."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, _: int) -> None:
        # A drain signal sent to the whole session is the worker's business; without the worker this process has none.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with suppress(OSError, ValueError, RuntimeError):  # standard error without a descriptor
            faulthandler.enable()
        # Else a batch that cannot be sent is dropped, and the worker waits for it for ever.
        Queue._on_queue_feeder_error = staticmethod(_end)  # type: ignore[attr-defined]  # noqa: SLF001
        die_with_parent(self._parent)


def _end(error: Exception, _: object) -> None:
    sys.stderr.write("a loader process cannot send a batch to its worker\n")
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def _as_it_is(batch: Any) -> Any:
    return batch
