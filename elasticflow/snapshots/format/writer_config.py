"""The configuration of a writer process: it says how the snapshots of a run are written."""

from __future__ import annotations

from dataclasses import dataclass, field

from elasticflow.protocol.snapshot_settings import SnapshotSettings


@dataclass(frozen=True)
class Limits:
    """The writer's time limits, in seconds.

    Attributes:
        fence_grace_s: For the workers of the generation that fenced a whole snapshot off.
        settle_s: Before new workers are answered although older snapshots are open.
        shares_s: For other nodes' shares, and for their commit.
    """

    fence_grace_s: float = 10.0
    settle_s: float = 30.0
    shares_s: float = 600.0


@dataclass(frozen=True)
class WriterStart:
    """Configuration that a writer process reads from its standard input, as one line of JSON.

    Attributes:
        uri: Place of the snapshots, found from `settings.uri`.
        prefix: The run's folder under the URI.
        parent: Process with which the writer ends.
    """

    uri: str
    run_id: str
    settings: SnapshotSettings = field(default_factory=SnapshotSettings)
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)
    parent: int | None = None
