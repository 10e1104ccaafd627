"""What a job file says to a script that calls `elasticflow.join`: one environment variable, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from elasticflow.protocol.json_codec import from_json


@dataclass(frozen=True)
class KeptSnapshots:
    """Which snapshots stay, as `snapshots.keep` has it.

    Attributes:
        last: The newest ones.
        best: The best ones; None: none for that.
        every: One at each of these intervals.
        within: Those at most this much older than the newest.
    """

    last: int = 3
    best: int | None = None
    every: str | None = None
    within: str | None = None


@dataclass(frozen=True)
class LoopSnapshots:
    """When snapshots are taken, where they go and which stay; as the job file has it.

    Attributes:
        uri: A folder's absolute path or a URL; None: the run folder.
        every: Any of these intervals.
        keep: Which stay.
        integrity: Digest of every file.
        memory: When they are also held in the node's memory; None: never.
        staging_limit: Most bytes each node takes for snapshots; None: as it has.
        options: For the file system; secrets stay as `${env:NAME}`.
        ignore: What no snapshot holds.
    """

    uri: str | None
    every: tuple[str, ...]
    keep: KeptSnapshots
    integrity: str
    memory: str | None = None
    staging_limit: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoopSettings:
    """What a script's own loop takes from the job file.

    Attributes:
        job: The job's name.
        digest: Identifies the resolved job.
        seed: Of the data order and every random stream.
        snapshots: When, where to, which stay.
        log_every: Steps between two lines of the log.
        log_level: Lines below it are left out.
        threads: CPU threads of each worker; None: the node's cores shared out.
    """

    job: str
    digest: str
    seed: int
    snapshots: LoopSnapshots
    log_every: int = 1
    log_level: str = "info"
    threads: int | None = None

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LoopSettings:
        """Return the settings that `to_json` wrote.

        Raises:
            ValueError: they are no JSON, or of another version of elasticflow.
        """
        content = json.loads(text)
        if not isinstance(content, dict) or content.keys() != {each.name for each in fields(cls)}:
            raise ValueError("not the settings that this version of elasticflow writes")
        return cls(**{**content, "snapshots": from_json(LoopSnapshots, content["snapshots"])})
