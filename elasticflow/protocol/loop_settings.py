"""Settings of a job file for a script that calls `elasticflow.join`: one environment variable, as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

from elasticflow.protocol.snapshot_settings import SnapshotSettings


@dataclass(frozen=True)
class LoopSettings:
    """The settings that a script's own loop takes from the job file.

    Attributes:
        job: The job's name.
        digest: Identifies the resolved job.
        seed: Seed of the data order and every random stream.
        snapshots: The URI is an absolute path or a URL.
        log_every: Steps between two lines of the log.
        log_level: Lines below it are left out.
        threads: CPU threads of each worker; None: the node's cores shared out.
    """

    job: str
    digest: str
    seed: int
    snapshots: SnapshotSettings
    log_every: int = 1
    log_level: str = "info"
    threads: int | None = None

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
