"""Slots of the memory tier: a shard in shared memory with a label that says what it is.

A worker fills a slot and the writer reads it without a word between them: a slot is locked by whoever fills or writes
it, by a lock that the kernel takes back from a process that dies, and its label is worth something only while whole.

There is no digest of the content. Reading it for one takes twice as long as copying it, at every step, and finds only
what other code of the same workers wrote where it may not, which can hit the model as well: nobody else has this memory.
A copy that was cut short has no label, one that is being made has the lock, and the store's digests are made from here.
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
# At the end of a buffer: the label and its metadata.
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
        metadata: JSON of what is another than in the layout; rank 0's only.
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
        """Take the slot, unless another process has it; it is given back at this process' death at the latest."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self) -> None:
        """Give the slot back."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def clear_label(self) -> None:
        """Take the label off: what lies here is not whole from now on."""
        self.memory[self._tail : self._tail + _LABEL.size] = _NO_LABEL

    def set_label(self, label: Label) -> None:
        """Put the label on: what lies here is whole. Metadata may have MOST_METADATA bytes."""
        begin = self._tail + _LABEL.size
        self.memory[begin : begin + len(label.metadata)] = label.metadata
        fields = (label.generation, label.step, label.layout, len(label.metadata))
        _LABEL.pack_into(self.memory, self._tail, 0, *fields)
        # The mark is written last, for a reader that has no lock.
        _LABEL.pack_into(self.memory, self._tail, _MARK, *fields)

    def label(self) -> Label | None:
        """Return the label, or None if what lies here is not whole."""
        mark, generation, step, layout, length = _LABEL.unpack_from(self.memory, self._tail)
        if mark != _MARK or length > MOST_METADATA:
            return None
        begin = self._tail + _LABEL.size
        return Label(generation, step, layout, self.memory[begin : begin + length])
