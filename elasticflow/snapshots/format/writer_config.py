"""The configuration of a writer process: it says how the snapshots of a run are written."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

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
    """

    uri: str
    run_id: str
    settings: SnapshotSettings = field(default_factory=SnapshotSettings)
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)
    parent: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as an object."""
        return {**vars(self), "settings": self.settings.to_json(), "limits": asdict(self.limits)}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the record that `to_json` gave.

        Raises:
            TypeError: a key is unknown.
        """
        settings, limits = SnapshotSettings.from_json(content["settings"]), Limits(**content["limits"])
        return cls(**{**content, "settings": settings, "limits": limits})

    def started_by(self, pid: int, uri: str) -> Self:
        """Return the record for a writer that process *pid* starts, with the absolute *uri*."""
        return replace(self, parent=pid, uri=uri)
