"""Standard streams of a node's workers: kept in the generation's own folder, and shown where `[torchrun] tee` says."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, TextIO

from elasticflow.system.json_lines import FollowedLines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elasticflow.launcher.fork_server.torchrun_arguments import TorchrunOptions
    from elasticflow.run_folder import RunFolder


# A progress bar begins each line with a carriage return; the last byte may be half of a line end.
_ENDS = re.compile(rb"\r\n|\n|\r(?!\Z)")
# Bytes that are kept waiting for the end of their line.
_LONGEST = 1 << 16


class WorkerStreams:
    """The files of one generation's streams on one node; their folder exists.

    torch names the folder after its restart count, which a membership change does not raise, and removes it before
    use: logs are lost (torch 2.13, multiprocessing/api.py `reify`). Everything is kept here, whatever is redirected.

    Args:
        folder: The run's.
        generation: Its number.
        ranks: Global ranks by local rank.
        options: Which streams are also shown, in the agent's own, each line after its worker's name, as torchrun does.

    Attributes:
        stdouts: Path of each local rank's standard output.
        stderrs: Path of each local rank's standard error.
    """

    def __init__(
        self, folder: RunFolder, generation: int, ranks: Mapping[int, int], options: TorchrunOptions
    ) -> None:
        folder.generation_logs(generation).mkdir(parents=True, exist_ok=True)
        self.stdouts = {local: folder.rank_log(generation, rank, "stdout") for local, rank in ranks.items()}
        self.stderrs = {local: folder.rank_log(generation, rank, "stderr") for local, rank in ranks.items()}
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

    def close(self) -> None:
        """Show what is left; nobody writes any more."""
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
