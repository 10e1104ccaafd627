"""Files of JSON lines: appended whole, mended where a crash tore their end, read, followed while they grow."""

from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticflow.system.records import BadJsonError, Damage, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

# Bytes at the end of a file in which damage is looked for.
_LOOKED_AT = 1 << 20
# Bytes that `lines_from_end` reads at once; a longer line is read in growing pieces.
_BLOCK = 1 << 18
_NEWLINE = re.compile(rb"\n")


class AppendedLines:
    """A file of JSON lines with one writer; each call is one `write`, so no reader sees half a line.

    Opening the file moves aside damaged lines that a power cut or a bad disk left at its end.

    Args:
        is_right: Returns True if a record may stand in the file.

    Attributes:
        damage: Damaged lines and their new place; None if all lines at the end were whole.
        damaged_at: Offset of the first line that was moved aside.
    """

    def __init__(self, path: Path, is_right: Callable[[dict[str, Any]], bool] = bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.damage: Damage | None = None
        self.damaged_at: int | None = None
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._mend(is_right)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Append *records*, one line each."""
        if records:
            data = "".join(json.dumps(record) + "\n" for record in records).encode()
            while data:
                data = data[os.write(self._fd, data) :]

    def sync(self) -> None:
        """Return when the lines are on disk."""
        os.fsync(self._fd)

    def truncate(self, size: int) -> None:
        """Keep the first *size* bytes."""
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _mend(self, is_right: Callable[[dict[str, Any]], bool]) -> None:
        start, lines = self._last_lines()
        is_whole = [_is_whole(line, is_right) for line in lines]
        if all(is_whole):
            if lines and not lines[-1].endswith(b"\n"):
                os.write(self._fd, b"\n")
            return
        first = is_whole.index(False)
        bad = [line for line, good in zip(lines, is_whole, strict=True) if not good]
        good = [line for line, good in zip(lines[first:], is_whole[first:], strict=True) if good]
        aside = self.path.with_name(f"{self.path.name}.damaged")
        with aside.open("ab") as file:
            file.writelines(line if line.endswith(b"\n") else line + b"\n" for line in bad)
            file.flush()
            os.fsync(file.fileno())
        self.damaged_at = start + sum(map(len, lines[:first]))
        self.truncate(self.damaged_at)
        for line in good:
            os.write(self._fd, line if line.endswith(b"\n") else line + b"\n")
        self.sync()
        size = sum(map(len, bad))
        why = f"had {size} bytes at its end that are no whole record; they are in {aside.name} now"
        self.damage = Damage(str(self.path), why)

    def _last_lines(self) -> tuple[int, list[bytes]]:
        """Return the offset of the file's last lines, and these lines."""
        size = os.fstat(self._fd).st_size
        reach = _LOOKED_AT
        while True:
            start = max(0, size - reach)
            data = _read_at(self._fd, start, size - start)
            skipped = data.find(b"\n") + 1 if start else 0
            if not start or 0 < skipped < len(data):
                return start + skipped, data[skipped:].splitlines(keepends=True)
            reach *= 4


class FollowedLines:
    """The lines of a file that grows, and that may not be there yet; if the file is cut, the lines after its new end.

    Args:
        path: Path of the file, which may not exist yet.
        longest: Most bytes of a line; a longer line comes in pieces. None: lines come whole.
        begins_at: Bytes at its beginning that are left out; the first line may be the rest of one.
    """

    def __init__(
        self,
        path: Path,
        ends: re.Pattern[bytes] = _NEWLINE,
        longest: int | None = None,
        begins_at: int = 0,
    ) -> None:
        self._path, self._ends, self._longest = path, ends, longest
        self._fd: int | None = None
        self._offset = begins_at
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Return the lines completed since the last call, without their ends; the file stays open."""
        if self._fd is None:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        if (size := os.fstat(self._fd).st_size) < self._offset:
            self._offset, self._rest = size, b""
        chunks = [self._rest]
        # Not beyond that size: the end of a file that grows as fast as it is read is never reached.
        while chunk := os.pread(self._fd, min(size - self._offset, 1 << 20), self._offset):
            self._offset += len(chunk)
            chunks.append(chunk)
        *whole, self._rest = self._ends.split(b"".join(chunks))
        if self._longest is not None and len(self._rest) > self._longest:
            whole.append(self._rest)
            self._rest = b""
        return whole

    def look(self) -> list[bytes]:
        """Return what `lines` does, and close the file: many may be followed. No lines of a file that cannot be read."""
        try:
            return self.lines()
        except OSError:  # damaged
            return []
        finally:
            self.close()

    def unended(self) -> list[bytes]:
        """Return the line that has no end yet, if any; for use once no process writes any more."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []

    def close(self) -> None:
        """Close the file; `lines` opens it again, and continues where it was."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of *path* with their ends, as far as it can be read; none if it is absent."""
    with suppress(OSError), path.open("rb") as file:
        yield from file


def lines_from_end(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of *path* from the last to the first, each with the offset of its end; reads only as far as they are taken.

    If the file is cut meanwhile, the lines end where bytes are missing.
    """
    # No mmap: where a file was cut behind its back, a look at the lost bytes kills the process by SIGBUS.
    with path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""
        while start > 0:
            size = min(start, max(_BLOCK, len(rest)))
            start -= size
            block = os.pread(file.fileno(), size, start)
            if len(block) < size:
                return
            data = block + rest
            end = len(data)
            while begin := data.rfind(b"\n", 0, end - 1) + 1:
                yield start + end, data[begin:end]
                end = begin
            rest = data[:end]
        if rest:
            yield len(rest), rest


def append_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append *records* to the file at *path*, as `AppendedLines` does; they are on disk afterwards."""
    if records:
        lines = AppendedLines(path)
        lines.append(records)
        lines.sync()
        lines.close()


def _read_at(descriptor: int, start: int, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := os.pread(descriptor, size - len(data), start + len(data))):
        data += chunk
    return data


def _is_whole(line: bytes, is_right: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return is_right(parse(line))
    except BadJsonError:
        return False
