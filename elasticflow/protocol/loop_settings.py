"""Settings of a job file for a script that calls `elasticflow.join`: one environment variable, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.protocol import worker_environment
from elasticflow.protocol.snapshot_settings import Keep, SnapshotSettings
from elasticflow.run_folder import from_root

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class LoopSettings:
    """The settings that a script's own loop takes from the job file.

    Attributes:
        seed: Seed of the data order and every random stream.
        snapshots: The URI is an absolute path or a URL.
        log_every: Steps between two lines of the log.
        log_level: Lines below it are left out.
        threads: CPU threads of each worker; None: the node's cores shared out.
        device: Device type to train on, or "auto".
    """

    job: str
    digest: str
    seed: int
    snapshots: SnapshotSettings
    log_every: int = 1
    log_level: str = "info"
    threads: int | None = None
    device: str = "auto"

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return json.dumps({**vars(self), "snapshots": self.snapshots.to_json()}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LoopSettings:
        """Return the settings that `to_json` wrote.

        Raises:
            ValueError: *text* is not JSON, or comes from another version of elasticflow.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.keys() != {each.name for each in fields(cls)}:
            raise ValueError("not the settings that this version of elasticflow writes")
        return cls(**{**content, "snapshots": SnapshotSettings.from_json(content["snapshots"])})

    @classmethod
    def told(cls, environ: Mapping[str, str]) -> LoopSettings | None:
        """Return the settings of the job file; None if no agent of ours started this process for a script.

        Raises:
            ValueError: another version of elasticflow wrote them.
        """
        text = environ.get(worker_environment.LOOP)
        return None if text is None else cls.from_json(text)

    @classmethod
    def of_arguments(
        cls,
        job: str,
        seed: int,
        snapshots: str | None,
        every: str | Sequence[str],
        keep: int,
        ignore: str | Sequence[str],
        log_every: int,
        threads: int | None,
        log_level: str = "info",
    ) -> LoopSettings:
        """Return the settings that a script passes to `elasticflow.join`."""
        intervals, ignored = (
            (given,) if isinstance(given, str) else tuple(given) for given in (every, ignore)
        )
        # The script may go to another folder before it keeps its state.
        place = None if snapshots is None else from_root(snapshots, Path.cwd())
        policy = SnapshotSettings(place, intervals, keep=Keep(last=keep), ignore=ignored)
        return cls(job, "", seed, policy, log_every, log_level, threads)
