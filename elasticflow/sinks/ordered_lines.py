"""Reads a file of JSON lines, which another process appends to and truncates, from a bookmark that survives both."""

from __future__ import annotations

import os
import zlib
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.system.json_lines import lines_from_end
from elasticflow.system.records import BadJsonError, parse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# Bytes to read at once; a longer line is read whole.
_CHUNK = 1 << 20
Record = dict[str, Any]
Key = tuple[Any, ...]
# Items of a key that tell its place; an item after them is a name.
_PLACE = 2


@dataclass(frozen=True)
class Bookmark:
    """The position up to which a file was read.

    Attributes:
        offset: Position in bytes.
        length: Bytes of the last line that was read, with its newline.
        crc: CRC-32 of that line: if another line stands there now, the file was truncated.
        key: The highest key of a line that was read, with the names of all lines read at its place; empty before the first.
    """

    offset: int = 0
    length: int = 0
    crc: int = 0
    key: Key = ()


@dataclass(frozen=True)
class OrderedLines:
    """Reads the lines of a file whose keys ascend, each key once, even if its end is cut off and written again.

    A key is a place of up to two items; after two may stand a name, by which several lines of one place are told apart.
    A line that is damaged when a later line is read is left out for good, even if it is repaired.

    Attributes:
        path: The file; it may be absent.
        key_of: Returns a record's key; None for a line that is no record.
        is_strict: True: a line is left out if its place is not higher than all before, unless its name is new there: it was
            read before or is damaged. False: keys only help to find the place again after the end of the file was replaced.
    """

    path: Path
    key_of: Callable[[Record], Key | None]
    is_strict: bool = True

    def read(self, mark: Bookmark, most: int) -> tuple[list[Record], Bookmark]:
        """Return at most *most* records after *mark*, and the mark after them; no records if none are written yet.

        Raises:
            OSError: the file is there and cannot be read.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return [], mark
        try:
            if not _stands(descriptor, mark):
                mark = self._found_again(mark)
            return self._after(descriptor, mark, most)
        finally:
            os.close(descriptor)

    def _after(self, descriptor: int, mark: Bookmark, most: int) -> tuple[list[Record], Bookmark]:
        records: list[Record] = []
        while len(records) < most and (lines := _whole_lines(descriptor, mark.offset)):
            for line in lines:
                record, key = self._parsed(line)
                highest = mark.key
                if record is not None and key is not None and (not self.is_strict or _is_new(key, highest)):
                    records.append(record)
                    is_same_place = key[:_PLACE] == highest[:_PLACE]
                    highest = (*highest, *key[_PLACE:]) if is_same_place else max(key, highest)
                mark = Bookmark(mark.offset + len(line), len(line), zlib.crc32(line), highest)
                if len(records) == most:
                    break
        return records, mark

    def _found_again(self, mark: Bookmark) -> Bookmark:
        """Return *mark* moved past the last line that was read, in a file whose end was cut and perhaps written again."""
        if not mark.key:
            return Bookmark()
        by_key: Bookmark | None = None
        # The file may be truncated at this moment: the next read finds the place.
        with suppress(OSError, ValueError):
            for end, line in lines_from_end(self.path):
                if len(line) == mark.length and zlib.crc32(line) == mark.crc:
                    return Bookmark(end, len(line), mark.crc, mark.key)
                key = self._parsed(line)[1]
                # In a strict file the lines of the same place are read again, and told apart by their names.
                if by_key is None and key is not None and _is_before(key, mark.key, same=not self.is_strict):
                    by_key = Bookmark(end, len(line), zlib.crc32(line), mark.key)
                    if self.is_strict:
                        break
        return by_key or Bookmark(key=mark.key)

    def _parsed(self, line: bytes) -> tuple[Record | None, Key | None]:
        try:
            record = parse(line)
        except BadJsonError:
            return None, None
        return record, self.key_of(record)


def _is_new(key: Key, highest: Key) -> bool:
    is_named = key[:_PLACE] == highest[:_PLACE] and key[_PLACE:] and key[_PLACE] not in highest[_PLACE:]
    return bool(is_named) or key[:_PLACE] > highest[:_PLACE]


def _is_before(key: Key, other: Key, *, same: bool) -> bool:
    return key[:_PLACE] < other[:_PLACE] or (same and key == other)


def _stands(descriptor: int, mark: Bookmark) -> bool:
    """Return True if the last line that was read is still in its place."""
    if mark.offset == 0:
        return not mark.key
    line = os.pread(descriptor, mark.length, mark.offset - mark.length)
    return len(line) == mark.length and zlib.crc32(line) == mark.crc


def _whole_lines(descriptor: int, offset: int) -> list[bytes]:
    """Return the complete lines that begin at *offset*: a chunk of lines, or one long line."""
    size = _CHUNK
    while True:
        data = os.pread(descriptor, size, offset)
        end = data.rfind(b"\n") + 1
        if end or len(data) < size:
            return [line + b"\n" for line in data[:end].split(b"\n")[:-1]]
        size *= 4
