"""Standard streams of a node's workers: kept in the generation's own folder, and shown where `[torchrun] tee` says."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, TextIO

from elasticflow import events
from elasticflow.protocol.messages import report
from elasticflow.system.json_lines import FollowedLines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.launcher.fork_server.protocol import TorchrunOptions
    from elasticflow.run_folder import RunFolder


# A progress bar begins each line with a carriage return; the last byte may be half of a line end.
_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")
# Bytes that are kept waiting for the end of their line.
_LONGEST = 1 << 16
MOST_BYTES = 64 << 20
"""Of a stream's file: once it has more, only its first `HEAD` and its last `TAIL` bytes stay."""
HEAD, TAIL = 8 << 20, 1 << 20
_PIECE = 1 << 20


class WorkerStreams:
    """The files of one generation's streams on one node; their folder exists.

    torch names the folder after its restart count, which a membership change does not raise, and removes it before
    use: logs are lost (torch 2.13, multiprocessing/api.py `reify`). Everything is kept here, whatever is redirected.

    Args:
        options: Which streams are also shown, in the agent's own, each line after its worker's name, as torchrun does.

    Attributes:
        stdouts: Path of each local rank's standard output.
        stderrs: Path of each local rank's standard error.
    """

    def __init__(
        self,
        folder: RunFolder,
        generation: int,
        ranks: Mapping[int, int],
        options: TorchrunOptions,
        node: str,
    ) -> None:
        folder.generation_logs(generation).mkdir(parents=True, exist_ok=True)
        self.stdouts = {local: folder.rank_log(generation, rank, "stdout") for local, rank in ranks.items()}
        self.stderrs = {local: folder.rank_log(generation, rank, "stderr") for local, rank in ranks.items()}
        self._bounded = [
            BoundedFile(path, node, ranks[local], stream)
            for stream, paths in (("stdout", self.stdouts), ("stderr", self.stderrs))
            for local, path in paths.items()
        ]
        self._shown = [
            _Shown(f"[{options.role}{local}]:", paths[local], stream)
            for paths, shown, stream in (
                (self.stdouts, options.shown_stdouts, sys.stdout),
                (self.stderrs, options.shown_stderrs, sys.stderr),
            )
            for local in shown
            if local in paths
        ]

    def show(self) -> None:
        """Show the lines that were completed since the last call."""
        for shown in self._shown:
            shown.show()

    def cut(self) -> list[EventRecord]:
        """Take out the middle of files that have grown too large; return the cuts to be reported."""
        return [left_out for file in self._bounded if (left_out := file.cut()) is not None]

    def untold(self) -> list[EventRecord]:
        """Return the counts that `cut` has not returned yet; for use once no worker writes any more."""
        return [left_out for file in self._bounded if (left_out := file.untold()) is not None]

    def close(self) -> None:
        """Show the remaining lines; no worker writes any more."""
        for shown in self._shown:
            shown.close()
        self._shown = []


class _Shown:
    """A stream that is copied to another one, line by line."""

    def __init__(self, prefix: str, path: Path, to: TextIO) -> None:
        self._prefix, self._file, self._to = prefix.encode(), FollowedLines(path, _ENDS, _LONGEST), to

    def show(self) -> None:
        self._write(self._file.lines())

    def close(self) -> None:
        self.show()
        self._write(self._file.unended())
        self._file.close()

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            # Bytes as they are: text that this stream's locale cannot write is no reason to end.
            data = b"".join(self._prefix + line + b"\n" for line in lines)
            # A full disk: the stream itself is kept elsewhere.
            with contextlib.suppress(OSError):
                self._to.flush()
                self._to.buffer.write(data)
                self._to.buffer.flush()


class BoundedFile:
    """A file to which a worker appends, and of which only the beginning and the end stay once it is large.

    The worker keeps its descriptor and never waits. What it writes in the very moment in which the file is cut is lost without
    being counted. Of a worker that writes faster than can be read here, bytes are counted, and not all lines.
    """

    def __init__(self, path: Path, node: str, rank: int, stream: str) -> None:
        self._path, self._node, self._rank, self._stream = path, node, rank, stream
        self._lines = self._bytes = self._told = 0

    def cut(self) -> EventRecord | None:
        """Take out the middle if the file is too large; return the total taken out, each time that it has grown tenfold."""
        with contextlib.suppress(OSError):  # not there yet, or damaged: then it does not grow either
            if os.stat(self._path).st_size > MOST_BYTES:  # noqa: PTH116  many times a second
                self._take_out_middle()
        return self.untold() if self._bytes >= 10 * self._told else None

    def untold(self) -> EventRecord | None:
        """Return the total taken out, unless it was returned before."""
        if self._bytes == self._told:
            return None
        self._told = self._bytes
        return report(
            events.LOG_LEFT_OUT,
            node=self._node,
            rank=self._rank,
            stream=self._stream,
            lines=self._lines,
            bytes=self._bytes,
        )

    def _take_out_middle(self) -> None:
        with self._path.open("rb") as file, self._path.open("ab", buffering=0) as end:
            head = _after_line(os.pread(file.fileno(), HEAD, 0))
            # The line that an earlier cut wrote here is not the worker's.
            before = _marker(self._lines, self._bytes)
            has_marker = self._bytes and os.pread(file.fileno(), len(before), head) == before
            start = at = head + (len(before) if has_marker else 0)
            kept = b""
            # Until the worker is caught up with: what it writes from there until the file is cut is lost uncounted.
            most = os.fstat(file.fileno()).st_size + MOST_BYTES
            while piece := os.pread(file.fileno(), _PIECE, at):
                if at > most:  # it writes as fast as that
                    at = max(at, os.fstat(file.fileno()).st_size - TAIL)
                    kept = os.pread(file.fileno(), TAIL, at)
                    at += len(kept)
                    break
                at += len(piece)
                kept += piece
                self._lines += kept[:-TAIL].count(b"\n")
                kept = kept[-TAIL:]
            os.ftruncate(end.fileno(), head)
            partial = kept.find(b"\n") + 1
            self._lines += kept.count(b"\n", 0, partial)
            self._bytes += at - start - len(kept) + partial
            end.write(_marker(self._lines, self._bytes) + kept[partial:])


def _after_line(text: bytes) -> int:
    """Return where the last whole line of *text* ends; its length if it has none."""
    return text.rfind(b"\n") + 1 or len(text)


def _marker(lines: int, size: int) -> bytes:
    return (
        f"... {lines:,} lines ({size:,} bytes) are left out here: a stream's file keeps its first {HEAD >> 20} MiB "
        f"and its end once it has more than {MOST_BYTES >> 20} MiB ...\n"
    ).encode()
