"""Settings of snapshot writing: one record, passed whole from the job to the node's writer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from elasticflow.snapshots.format.digests import Integrity  # noqa: TC001  # pydantic reads the fields' types
from elasticflow.snapshots.format.policy import Keep

# Keys of the fields of `Keep` in JSON, as plan.json has had them from the first version on.
_KEEP_KEYS = {
    "last": "keep_last",
    "best": "keep_best",
    "every": "keep_every",
    "within": "keep_within",
    "best_mode": "best_mode",
}


@dataclass(frozen=True)
class WriterConfig:
    """Settings of a job's snapshots.

    Attributes:
        keep: Which snapshots stay.
        integrity: Digest of every file.
        staging_limit: Most bytes of staging memory on each node; None: what the machine can give.
        options: For the file system.
    """

    keep: Keep = field(default_factory=Keep)
    integrity: Integrity = "crc32"
    staging_limit: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the record as one flat object: `keep_last`, `keep_best` ..., `integrity` ..."""
        keep = {_KEEP_KEYS[name]: value for name, value in asdict(self.keep).items()}
        return {
            **keep,
            "integrity": self.integrity,
            "staging_limit": self.staging_limit,
            "options": self.options,
        }

    @staticmethod
    def nested(flat: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of WriterConfig, and in `keep` those of Keep, from what `to_json` gave; unchecked."""
        keep = {name: flat[key] for name, key in _KEEP_KEYS.items() if key in flat}
        return {"keep": keep, **{key: value for key, value in flat.items() if key not in _KEEP_KEYS.values()}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the record that `to_json` gave; absent keys have their defaults.

        Raises:
            TypeError: a key is unknown.
        """
        arguments = cls.nested(content)
        return cls(**{**arguments, "keep": Keep(**arguments["keep"])})


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
        uri: Snapshot URI.
        run_id: For the manifest.
        config: How snapshots are written.
        prefix: The run's folder under the URI.
        limits: How long the writer waits.
        parent: Process id of the process that started the writer.
    """

    uri: str
    run_id: str
    config: WriterConfig = field(default_factory=WriterConfig)
    prefix: str = ""
    limits: Limits = field(default_factory=Limits)
    parent: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the record as one flat object; `limits` and `parent` only where they are set."""
        content = {
            "uri": self.uri,
            "run_id": self.run_id,
            "prefix": self.prefix,
            **self.config.to_json(),
        }
        if self.limits != Limits():
            content["limits"] = asdict(self.limits)
        if self.parent is not None:
            content["parent"] = self.parent
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the record that `to_json` gave; absent keys but `uri` and `run_id` have their defaults.

        Raises:
            KeyError: one of these two is absent.
            TypeError: a key is unknown.
        """
        own = {"uri", "run_id", "prefix", "limits", "parent"}
        return cls(
            content["uri"],
            content["run_id"],
            WriterConfig.from_json({key: value for key, value in content.items() if key not in own}),
            content.get("prefix", ""),
            Limits(**content.get("limits", {})),
            content.get("parent"),
        )

    def started_by(self, pid: int, uri: str) -> Self:
        """Return the record for a writer that process *pid* starts, with the absolute *uri*."""
        return replace(self, parent=pid, uri=uri)
