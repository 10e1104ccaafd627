"""Shared memory for snapshots: the writer owns it, workers map it, and it is kept over restarts."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from dataclasses import dataclass

from elasticflow.system.free_memory import available
from elasticflow.system.shared_memory import memory_file

_HUGE_PAGE = 2 << 20


class LimitError(Exception):
    """A worker needs more than `staging_limit` allows; the text has the figures."""


@dataclass(eq=False)
class Buffer:
    """A piece of shared memory.

    Attributes:
        number: Unique in this writer.
        descriptor: Of the memory file.
        size: Bytes.
        view: The writer's mapping of it.
        busy: A shard in it is being written to the store.
        owned: A connected worker may write into it, or the memory tier holds it.
        is_slot: It is a slot of the memory tier, and locked while it is busy (`slots.Slot`).
    """

    number: int
    descriptor: int
    size: int
    view: mmap.mmap
    busy: bool = False
    owned: bool = True
    is_slot: bool = False


class BufferPool:
    """All buffers of a node; those of dead workers are used again, since touching memory for the first time is slow.

    Args:
        limit: Most bytes of all buffers; None: what the machine can give.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._free: list[Buffer] = []
        self._made = 0

    def take_up_to(
        self, most: int, size: int, *, least: int, workers: int
    ) -> tuple[list[Buffer], str | None]:
        """Return *most* buffers, or as many as fit; and why they are fewer, if they are.

        Args:
            most: How many are wanted.
            size: Bytes of each, at least.
            least: How many are needed.
            workers: Workers of this node; each may take an equal part of the limit.

        Raises:
            LimitError: the limit does not allow *least* for each worker.
            OSError: the machine has no memory for *least*.
        """
        wanted, short = most, None
        if self._limit is not None:
            whole = _whole(size)
            most = min(most, self._limit // workers // whole)
            if most < least:
                times = {1: "once", 2: "twice"}.get(least, f"{least} times")
                raise LimitError(
                    f"{least * workers * whole} bytes are needed to stage this node's part of a snapshot {times}, "
                    f"{self._limit} are allowed"
                )
            if most < wanted:
                short = f"the limit of {self._limit} bytes allows no more"
        buffers: list[Buffer] = []
        try:
            while len(buffers) < most:
                buffers.append(self.take(size))
        except OSError as error:
            if len(buffers) < least:
                for buffer in buffers:
                    self.disown(buffer)
                raise
            short = error.strerror
        return buffers, short

    def take(self, size: int) -> Buffer:
        """Return a buffer of at least *size* bytes, all its pages present.

        Raises:
            OSError: the machine has no memory for it.
        """
        with self._lock:
            widest = 2 * size + _HUGE_PAGE if self._limit is None else _whole(size)
            fitting = [b for b in self._free if size <= b.size <= widest]
            if fitting:
                buffer = min(fitting, key=lambda b: b.size)
                self._free.remove(buffer)
                buffer.owned, buffer.is_slot = True, False
                return buffer
            self._made += 1
            number = self._made
            stale, self._free = self._free, []
        # The free buffers are of another size: their memory is given back before more is taken.
        for buffer in stale:
            buffer.view.close()
            os.close(buffer.descriptor)
        return _make(number, size)

    def disown(self, buffer: Buffer) -> None:
        """Take *buffer* back from a worker that is gone or has larger ones; it is free once it is written."""
        with self._lock:
            buffer.owned = False
            if not buffer.busy:
                self._free.append(buffer)

    def written(self, buffer: Buffer) -> bool:
        """Mark *buffer* as written; True if its worker waits for the message that it may be filled again."""
        with self._lock:
            buffer.busy = False
            if buffer.is_slot:
                fcntl.lockf(buffer.descriptor, fcntl.LOCK_UN)
            if not buffer.owned:
                self._free.append(buffer)
            return buffer.owned and not buffer.is_slot


def map_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map shared memory with its pages present, so that the first snapshot costs what the others do."""
    return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))


def _make(number: int, size: int) -> Buffer:
    whole = _whole(size)
    # Without this check, the kernel would kill a process to make room.
    if whole > (left := available()):
        raise OSError(errno.ENOMEM, f"{left >> 20} MiB of memory are left, {whole >> 20} MiB are needed")
    descriptor = memory_file("staging")
    try:
        os.ftruncate(descriptor, whole)
        if hasattr(os, "posix_fallocate"):
            # Fails now if there is no memory; without it, a later touch would end the process by SIGBUS.
            os.posix_fallocate(descriptor, 0, whole)
        return Buffer(number, descriptor, whole, map_memory(descriptor, whole))
    except BaseException:
        os.close(descriptor)
        raise


def _whole(size: int) -> int:
    """Return what a buffer of *size* bytes takes: whole huge pages, or whole pages if it is small."""
    page = _HUGE_PAGE if size >= _HUGE_PAGE else mmap.PAGESIZE
    return max(1, -(-size // page)) * page
