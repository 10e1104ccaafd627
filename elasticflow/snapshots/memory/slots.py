"""Slots of the memory tier: a shard in shared memory with a label that says what it is.

A worker fills a slot and the writer reads it without a message. Whoever fills the slot, or writes it to the store, has
its lock; the kernel takes the lock from a process that dies. A slot whose copy was cut short has no label.

There is no digest of the content. To make one at every step would take twice as long as the copy, and would find only
what other code of the same workers wrote over it, which could hit the model as well: no other process has this memory.
The store's digests are made from the content of the slot.
"""

from __future__ import annotations

import fcntl
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mmap

_MARK = 0x656C_6173_7469_6366
# Mark, generation, step, number of the layout, bytes of metadata.
_LABEL = struct.Struct("<QQQQQ")
# Bytes at the end of a slot for the label and its metadata.
TAIL = 16 << 10
MOST_METADATA = TAIL - _LABEL.size
_NO_LABEL = bytes(_LABEL.size)


@dataclass(frozen=True)
class Label:
    """What lies in a slot.

    Attributes:
        generation: Of the worker that filled it.
        step: Finished steps.
        layout: Number of the `Describe` that says how the shard is laid out.
        metadata: On rank 0, JSON: the snapshot's name, and what of the record differs from the described one.
    """

    generation: int
    step: int
    layout: int
    metadata: bytes = b""


class Slot:
    """A buffer of the writer, as one process sees it; lock and label are used in the memory tier only.

    Args:
        number: Of the buffer.
        descriptor: Of the memory file, open as long as the slot is used.
        size: Bytes of the buffer.
        memory: This process' mapping of it.
    """

    def __init__(self, number: int, descriptor: int, size: int, memory: mmap.mmap) -> None:
        self.number, self.descriptor, self.memory = number, descriptor, memory
        self._tail = size - TAIL

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
        fields = (label.generation, label.step, label.layout, len(label.metadata))
        _LABEL.pack_into(self.memory, self._tail, 0, *fields)
        # The mark is written last, for a reader that has no lock.
        _LABEL.pack_into(self.memory, self._tail, _MARK, *fields)

    def label(self) -> Label | None:
        """Return the label, or None if the content is not whole."""
        mark, generation, step, layout, length = _LABEL.unpack_from(self.memory, self._tail)
        if mark != _MARK or length > MOST_METADATA:
            return None
        begin = self._tail + _LABEL.size
        return Label(generation, step, layout, self.memory[begin : begin + length])
