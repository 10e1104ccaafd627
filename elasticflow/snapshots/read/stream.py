"""Reads files of snapshots once, by several threads, and checks every byte on its way."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from elasticflow.errors import SnapshotError
from elasticflow.snapshots.format.digests import Verifier
from elasticflow.snapshots.format.manifest import (
    BLOCK,
    DamagedSnapshotError,
    FileEntry,
    UnreadableSnapshotError,
)
from elasticflow.system import fault_injection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import BinaryIO

    from elasticflow.storage.storage import Storage

    Sink = Callable[[str, int, memoryview], None]

ABSENT = "is absent"
"""The damage of a file that is not there."""
# Bytes of one read from a local disk: few enough to be in the processor's cache when they are checked.
_PIECE = 1 << 18
# Blocks that one thread reads in a row: few, so that threads share a file; not one, since the file is opened for each run.
_RUN = 4
# Most threads at a time; each has one block in memory at most.
_THREADS = 8
_BAD_PLACE = (errno.EIO, errno.EISDIR, errno.ENOTDIR)
_REFUSED = (errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class _Run:
    """Blocks of a file that are read in a row; *count* None: the whole file."""

    path: str
    entry: FileEntry
    first: int = 0
    count: int | None = None


class VerifiedStream:
    """Reads and verifies files, and passes their bytes to a sink; for one use.

    Args:
        files: Entries of the manifest, by path in the storage.
        sink: Called with path, offset and bytes, from several threads at a time; the bytes may not be used after the
            call. None: the files are only verified.
        progress: Called with the bytes read so far, from one thread at a time.
        to_the_end: Read on after the first damage, to find all of it; a file that may not be read counts as damage then.

    Attributes:
        partly: Numbers of the blocks that are needed of a file, by path; of files that are not named, all. It may change meanwhile.
    """

    def __init__(
        self,
        storage: Storage,
        files: Mapping[str, FileEntry],
        *,
        sink: Sink | None = None,
        progress: Callable[[int], None] | None = None,
        to_the_end: bool = False,
    ) -> None:
        self._storage, self._files = storage, files
        self._sink, self._progress, self._to_the_end = sink, progress, to_the_end
        # On local disks two for each core: one checks while another waits for the disk. Elsewhere all wait for answers.
        self._threads = min(2 * (os.cpu_count() or 1), _THREADS) if storage.is_local else _THREADS
        most = _PIECE if storage.is_local else BLOCK
        self._piece = min(most, max((entry.size for entry in files.values()), default=0))
        self.partly: Mapping[str, frozenset[int]] = {}
        self._runs: deque[_Run] = deque()
        self._lock = threading.Lock()
        self._damage: dict[str, tuple[int, str]] = {}
        self._done = 0
        self._is_over = False

    def read(self) -> dict[str, str]:
        """Return the damage, by path; empty: every byte is what was written, and went to the sink.

        Raises:
            UnreadableSnapshotError: this process may not read a file on a disk of this machine.
            SnapshotError: the store could not be read, the sink failed, or `stop` was called; that says nothing about
                the files.
        """
        with ThreadPoolExecutor(self._threads, thread_name_prefix="reading") as pool:
            self._each(pool, [partial(self._look, *item) for item in self._files.items()])
            # The longest first, so that all threads end together.
            self._runs = deque(sorted(self._runs, key=_size, reverse=True))
            self._each(pool, [self._work] * self._threads)
        if self._is_over and not self._damage:
            raise SnapshotError("reading was given up")
        return {path: text for path, (_, text) in sorted(self._damage.items())}

    def stop(self) -> None:
        """Have `read` end soon; from any thread."""
        self._is_over = True

    def _each(self, pool: ThreadPoolExecutor, actions: Iterable[Callable[[], None]]) -> None:
        for future in [pool.submit(self._guarded, action) for action in actions]:
            future.result()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            if not self._is_over:
                action()
        except BaseException:
            self._is_over = True
            raise

    def _look(self, path: str, entry: FileEntry) -> None:
        """Compare the file's size, and cut it into runs."""
        with self._noting(_Run(path, entry)), self._storage.open_read(path) as file:
            size = _size_of(file)
            if size is not None and size < entry.size:
                raise DamagedSnapshotError(f"ends at byte {size}, {entry.size} bytes were written")
            if size is not None and size > entry.size:
                raise _longer(entry)
            if size is None or entry.sha256 is not None or not entry.crc32:
                self._runs.append(_Run(path, entry))
            else:
                self._runs += _cut(path, entry, self.partly.get(path))

    @contextlib.contextmanager
    def _noting(self, run: _Run) -> Iterator[None]:
        """Note damage in the file of *run*; raise SnapshotError for errors that say nothing about the file."""
        name = run.path.rpartition("/")[2]
        try:
            yield
        except FileNotFoundError:
            self._note(run, ABSENT)
        except DamagedSnapshotError as error:
            self._note(run, error.message)
        except SnapshotError:
            raise
        except Exception as error:
            number = getattr(error, "errno", None) if self._storage.is_local else None
            text = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            # A local disk that cannot read these bytes is damage; anything else may pass.
            if number in _BAD_PLACE or (number in _REFUSED and self._to_the_end):
                self._note(run, f"cannot be read: {text}")
            elif number in _REFUSED:
                raise UnreadableSnapshotError(f"{name}: cannot be read: {text}") from error
            else:
                raise SnapshotError(f"{name}: cannot be read: {text}") from error

    def _note(self, run: _Run, text: str) -> None:
        with self._lock:
            self._damage[run.path] = min((run.first, text), self._damage.get(run.path, (run.first, text)))
            self._is_over = self._is_over or not self._to_the_end

    def _count(self, size: int) -> None:
        with self._lock:
            self._done += size
            if self._progress is not None:
                self._progress(self._done)

    def _work(self) -> None:
        scratch = memoryview(bytearray(self._piece))
        while not self._is_over:
            try:
                run = self._runs.popleft()
            except IndexError:
                return
            if self._is_needed(run):
                self._read(run, scratch)

    def _is_needed(self, run: _Run) -> bool:
        needed = self.partly.get(run.path)
        end = len(run.entry.crc32) if run.count is None else run.first + run.count
        return needed is None or not needed.isdisjoint(range(run.first, end))

    def _pass_on(self, path: str, offset: int, data: memoryview, verifier: Verifier) -> None:
        verifier.feed(data)
        if self._sink is not None:
            self._sink(path, offset, data)
        self._count(len(data))

    def _read(self, run: _Run, scratch: memoryview) -> None:
        start = run.first * BLOCK
        end = run.entry.size if run.count is None else min(run.entry.size, start + run.count * BLOCK)
        verifier = Verifier(run.entry, run.first, run.count)
        with self._noting(run), self._storage.open_read(run.path) as file:
            if start:
                file.seek(start)
            for block in range(start, end, BLOCK):
                if self._is_over:
                    return
                fault_injection.reach("restore.mid_load")
                for offset in range(block, min(block + BLOCK, end), len(scratch)):
                    self._pass_on(run.path, offset, _fill(file, scratch[: end - offset]), verifier)
            verifier.finish()
            if end == run.entry.size and file.read(1):
                raise _longer(run.entry)


def _cut(path: str, entry: FileEntry, needed: frozenset[int] | None) -> Iterator[_Run]:
    """Yield runs of the blocks that are *needed*; None: of all."""
    first, end = 0, len(entry.crc32)
    while first < end:
        after = first
        while after < min(end, first + _RUN) and (needed is None or after in needed):
            after += 1
        if after > first:
            yield _Run(path, entry, first, after - first)
        first = max(after, first + 1)


def _size(run: _Run) -> int:
    left = run.entry.size - run.first * BLOCK
    return left if run.count is None else min(left, run.count * BLOCK)


def _size_of(file: BinaryIO) -> int | None:
    """Return the bytes of an open file; None for a stream that can only be read from start to end."""
    try:
        return file.seek(0, os.SEEK_END)
    except ValueError:
        # fsspec's http of a server without ranges.
        return None


def _longer(entry: FileEntry) -> DamagedSnapshotError:
    return DamagedSnapshotError(f"is longer than the {entry.size} bytes that were written")


def _fill(file: BinaryIO, target: memoryview) -> memoryview:
    """Fill *target* as far as the file goes; return the part that was read."""
    done = 0
    while done < len(target) and (size := file.readinto(target[done:])):  # type: ignore[attr-defined]
        done += size
    return target[:done]
