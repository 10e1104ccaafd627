"""Memory that the processes of a node share: the writer owns it, workers fill it, and it is kept over restarts.

A worker hands a staging buffer over by a message. A slot of the memory tier has a label that says what lies in it: a
worker fills the slot and the writer reads it without a message. The process that fills such a slot, or writes it to the store, has
its lock; the kernel takes the lock from a process that dies. A slot whose copy was cut short has no label.

The label has a digest of the content, which is checked before the content is used: it may have lain there for a while. It is a
sum over words, which takes a third of the time of a checksum such as CRC-32. The store's digests are made from the content of the
slot.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from dataclasses import dataclass

from elasticflow.system.free_memory import available
from elasticflow.system.shared_memory import memory_file

_HUGE_PAGE = 2 << 20
_MARK = 0x656C_6173_7469_6366
# Mark, generation, step, number of the layout, digest of the content, bytes of metadata.
_LABEL = struct.Struct("<QQQQQQ")
# A digest gives each part a weight of its own, so that swapped parts are noticed.
_PARTS = 64
# Bytes at the end of a slot for the label and its metadata.
TAIL = 16 << 10
MOST_METADATA = TAIL - _LABEL.size
_NO_LABEL = bytes(_LABEL.size)


@dataclass(frozen=True)
class Label:
    """The label of a slot's content.

    Attributes:
        layout: Number of the `Describe` that says how the shard is laid out.
        digest: `digest_of` the shard's bytes.
        metadata: On rank 0, JSON: the snapshot's name, and the parts of the record that differ from the described one.
    """

    generation: int
    step: int
    layout: int
    digest: int
    metadata: bytes = b""

    @property
    def age(self) -> tuple[int, int]:
        """Generation and step: the newer is greater."""
        return self.generation, self.step


@dataclass(eq=False)
class Slot:
    """A piece of shared memory, as one process sees it; lock and label are used in the memory tier only.

    Attributes:
        number: Unique in the writer.
        descriptor: Descriptor of the memory file, open as long as the slot is used.
        memory: This process' mapping of it.
    """

    number: int
    descriptor: int
    size: int
    memory: mmap.mmap

    @property
    def _tail(self) -> int:
        return self.size - TAIL

    def lock(self) -> bool:
        """Lock the slot; False if another process has locked it."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        """Unlock the slot."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def clear_label(self) -> None:
        """Remove the label: the content is not whole from now on."""
        self.memory[self._tail : self._tail + _LABEL.size] = _NO_LABEL

    def set_label(self, label: Label) -> None:
        """Label the slot: its content is whole. Metadata may have MOST_METADATA bytes."""
        begin = self._tail + _LABEL.size
        self.memory[begin : begin + len(label.metadata)] = label.metadata
        fields = (label.generation, label.step, label.layout, label.digest, len(label.metadata))
        _LABEL.pack_into(self.memory, self._tail, 0, *fields)
        # The mark is written last, for a reader that has no lock.
        _LABEL.pack_into(self.memory, self._tail, _MARK, *fields)

    def label(self) -> Label | None:
        """Return the label, or None if the content is not whole."""
        mark, generation, step, layout, digest, length = _LABEL.unpack_from(self.memory, self._tail)
        if mark != _MARK or length > MOST_METADATA:
            return None
        begin = self._tail + _LABEL.size
        return Label(generation, step, layout, digest, self.memory[begin : begin + length])


@dataclass(eq=False)
class Buffer(Slot):
    """A slot of the writer's own.

    Attributes:
        is_busy: The shard in it is being written to the store.
        is_owned: A connected worker may write into it, or the memory tier holds it.
        is_held: It is a slot of the memory tier, and locked while it is busy.
    """

    is_busy: bool = False
    is_owned: bool = True
    is_held: bool = False


class LimitError(Exception):
    """A worker needs more than `staging_limit` allows; the text has the figures."""


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

    def available(self) -> int:
        """Return the bytes that new buffers may take: what the machine can give, and the buffers that are free."""
        with self._lock:
            return available() + sum(buffer.size for buffer in self._free)

    def take_up_to(
        self, most: int, size: int, *, least: int, workers: int, besides: int = 0
    ) -> tuple[list[Buffer], str | None]:
        """Return *most* buffers, or as many as fit; if they are fewer, also the reason.

        Args:
            most: Number wanted.
            size: Bytes of each, at least.
            workers: Workers of this node; each may take an equal part of the limit.
            besides: Number of buffers of this size that the worker keeps.

        Raises:
            LimitError: the limit does not allow *least* for each worker.
            OSError: the machine has no memory for *least*.
        """
        wanted, short = most, None
        if self._limit is not None:
            whole = _whole(size)
            most = min(most, self._limit // workers // whole - besides)
            if most < least:
                count = least + besides
                times = {1: "once", 2: "twice"}.get(count, f"{count} times")
                raise LimitError(
                    f"{count * workers * whole} bytes are needed to stage this node's part of a snapshot {times}, "
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
                buffer.is_owned, buffer.is_held = True, False
                return buffer
            self._made += 1
            number = self._made
            stale, self._free = self._free, []
        # The free buffers are of another size: their memory is given back before more is taken.
        for buffer in stale:
            # If the thread that wrote it still refers to it, it goes with that reference.
            with contextlib.suppress(BufferError):
                buffer.memory.close()
            os.close(buffer.descriptor)
        return _make(number, size)

    def disown(self, buffer: Buffer) -> None:
        """Take *buffer* back from a worker that is gone or has larger ones; it is free once its content is written."""
        with self._lock:
            buffer.is_owned = False
            if not buffer.is_busy:
                self._free.append(buffer)

    def release(self, buffer: Buffer) -> None:
        """Forget *buffer*: its memory is free once no process maps it any more."""
        os.close(buffer.descriptor)

    def written(self, buffer: Buffer) -> bool:
        """Mark *buffer* as written; True if its worker waits for the message that it may be filled again."""
        with self._lock:
            buffer.is_busy = False
            if buffer.is_held:
                buffer.unlock()
            if not buffer.is_owned:
                self._free.append(buffer)
            return buffer.is_owned and not buffer.is_held


def digest_of(content: memoryview | mmap.mmap, nbytes: int) -> int:
    """Return a sum modulo 2**64 over the words of the first *nbytes* of *content*, weighted by their place; never slower than a copy."""
    # The writer needs it rarely, and takes less memory without it.
    import numpy as np

    words = np.frombuffer(content, np.uint64, nbytes // 8)
    length = len(words) // _PARTS
    parts = words[: length * _PARTS].reshape(_PARTS, length).sum(axis=1, dtype=np.uint64)
    begin = 8 * length * _PARTS
    rest = np.frombuffer(content, np.uint8, nbytes - begin, begin)
    # Products and sums of these words wrap around at 2**64.
    total = (parts * np.arange(1, 2 * _PARTS, 2, dtype=np.uint64)).sum()
    return int(total + (rest * np.arange(1, len(rest) + 1, dtype=np.uint64)).sum())


def map_memory(descriptor: int, size: int) -> mmap.mmap:
    """Map shared memory with its pages present, so that the first snapshot is no slower than the others."""
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
    """Return the memory that a buffer of *size* bytes takes: whole huge pages, or whole pages if it is small."""
    page = _HUGE_PAGE if size >= _HUGE_PAGE else mmap.PAGESIZE
    return max(1, -(-size // page)) * page
