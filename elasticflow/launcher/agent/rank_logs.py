"""Rank logs, followed line by line: the way of worker lines to the supervisor (floor 3)."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, Std

from elasticflow import events, logs

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.run_folder import RunFolder

FOLLOWED = events.FROM_WORKERS | {
    *(events.STEP, events.EVALUATION, events.WORKER_RAISED, events.ENVIRONMENT_FOUND),
}
_MARKS = tuple(f'"{name}"'.encode() for name in sorted(FOLLOWED))


class RankLog:
    """One growing JSON-lines file."""

    def __init__(self, folder: RunFolder, generation: int, rank: int) -> None:
        self._path = folder.rank_log(generation, rank)
        self._fd: int | None = None
        self._rest = b""

    def lines(self) -> list[dict[str, Any]]:
        """Return the followed records among the lines completed since the last call."""
        if self._fd is None:
            if not self._path.exists():
                return []
            self._fd = os.open(self._path, os.O_RDONLY)
        data = self._rest
        while chunk := os.read(self._fd, 1 << 20):
            data += chunk
        *whole, self._rest = data.split(b"\n")
        return [record for line in whole if (record := _followed(line)) is not None]

    def close(self) -> None:
        """Stop following."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _followed(line: bytes) -> dict[str, Any] | None:
    if not any(mark in line for mark in _MARKS):
        return None
    try:
        record = json.loads(line)
    except ValueError:  # not ours: user code may write anything into its own log
        return None
    is_ours = isinstance(record, dict) and record.get("origin") == logs.OURS
    return record if is_ours and record.get("event") in FOLLOWED else None


def tail(path: Path, size: int = 8192) -> str:
    """Return the end of a worker's standard error: all there is of one that died before it could log.

    Nothing if it died even before it had opened that.
    """
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - size))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


class GenerationLogs(LogsSpecs):
    """Standard streams of each worker in the generation's own folder.

    torch's `DefaultLogsSpecs` names the folder after the restart count, which a membership change does
    not raise, and removes it before use: logs are lost (torch 2.13, multiprocessing/api.py `reify`).
    """

    def __init__(
        self,
        folder: RunFolder,
        tee: Std | dict[int, Std] = Std.NONE,
        local_ranks_filter: set[int] | None = None,
    ) -> None:
        super().__init__(tee=tee, local_ranks_filter=local_ranks_filter)
        self._folder = folder
        self.generation = 0

    @classmethod
    def like(cls, specs: LogsSpecs, folder: RunFolder) -> GenerationLogs:
        """Return what shows as much as torch's *specs* ask for; everything is kept, whatever is redirected."""
        return cls(folder, specs._tee, specs._local_ranks_filter)  # noqa: SLF001  torch offers no public way

    @property
    def root_log_dir(self) -> str:
        """Folder of all generations' logs."""
        return str(self._folder.path / "logs")

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each local rank's streams go; the folder exists afterwards."""
        self._folder.generation_logs(self.generation).mkdir(parents=True, exist_ok=True)
        paths = {
            suffix: {
                r: str(self._folder.rank_log(self.generation, int(e["RANK"]), suffix))
                for r, e in envs.items()
            }
            for suffix in ("stdout", "stderr")
        }
        tees = {
            r: self._tee if isinstance(self._tee, Std) else self._tee.get(r, Std.NONE)
            for r in envs
            if not self._local_ranks_filter or r in self._local_ranks_filter
        }
        return LogsDest(
            stdouts=paths["stdout"],
            stderrs=paths["stderr"],
            tee_stdouts={r: paths["stdout"][r] for r, std in tees.items() if std & Std.OUT},
            tee_stderrs={r: paths["stderr"][r] for r, std in tees.items() if std & Std.ERR},
            error_files=dict.fromkeys(envs, ""),
        )
