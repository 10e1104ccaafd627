"""The `[snapshots]` table as every process of a run has it: one record, from the job file to the writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Self

from elasticflow.system.units import parse_size

AUTO = "auto"
"""Value of `snapshots.memory`: the state is held as often as that takes no more than a fixed share of the time."""
HELD_STATES, HELD_STATES_AUTO = 3, 2
"""States that the memory of a node has room for, at an interval and with `AUTO`."""
HELD_MOST_OF_FREE = 1 / 2
"""Part of the free memory that they take at most, with `AUTO`."""
BestMode = Literal["max", "min"]
Integrity = Literal["crc32", "sha256"]
# Keys of the fields of `Keep` in JSON.
_KEEP_KEYS = {
    "last": "keep_last",
    "best": "keep_best",
    "every": "keep_every",
    "within": "keep_within",
    "best_mode": "best_mode",
}


@dataclass(frozen=True)
class Keep:
    """The job file's rules for keeping committed snapshots; a snapshot stays if any rule keeps it.

    Attributes:
        last: Number of newest snapshots to keep.
        best: Number of snapshots with the best metric to keep, among those measured like the newest; of equal ones, the newer.
        every: The first snapshot at or after each multiple of this interval; a time counts from 1970 on.
        within: Keep snapshots that are at most this much older than the newest, like "2 h".
        best_mode: "max" if the largest metric is the best, "min" if the smallest; None: `best` keeps nothing.
    """

    last: int = 3
    best: int | None = None
    every: str | None = None
    within: str | None = None
    best_mode: BestMode | None = None


@dataclass(frozen=True)
class SnapshotSettings:
    """When snapshots are taken, where they go, which stay; texts are as the job file has them.

    Attributes:
        uri: Any fsspec URL or path; None: the run folder. A relative path starts at the project root.
        every: Intervals, any of which makes a snapshot due: "500 steps", "10 min", "1 epoch".
        memory: Interval at which the state is also held in the node's memory, or `AUTO`; None: never.
        staging_limit: Most memory that each node takes for snapshots, like "4 GiB"; None: what the machine can give.
        options: Arguments of the file system; secrets stay as `${env:NAME}`.
        ignore: Paths of state that no snapshot holds: the job says that no step depends on it.
    """

    uri: str | None = None
    every: tuple[str, ...] = ("10 min", "1 epoch")
    memory: str | None = AUTO
    keep: Keep = field(default_factory=Keep)
    integrity: Integrity = "crc32"
    staging_limit: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()

    @property
    def staging_bytes(self) -> int | None:
        """The staging limit in bytes."""
        return None if self.staging_limit is None else parse_size(self.staging_limit)

    @property
    def is_held_at_interval(self) -> bool:
        """True if the state is held in memory at an interval that the job gives, so that a run without room for it fails."""
        return self.memory not in {None, AUTO}

    @property
    def held_states(self) -> int:
        """States that the memory of a node has room for."""
        if self.memory is None:
            return 0
        return HELD_STATES_AUTO if self.memory == AUTO else HELD_STATES

    def to_json(self) -> dict[str, Any]:
        """Return the record as one flat object, as it stands in plan.json; `ignore` only where it is not empty."""
        content: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name == "keep":
                content |= {_KEEP_KEYS[key]: kept for key, kept in vars(self.keep).items()}
            elif name != "ignore" or value:
                content[name] = list(value) if isinstance(value, tuple) else value
        return content

    @staticmethod
    def arguments(flat: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of SnapshotSettings from what `to_json` gave; `keep` has those of Keep. Unchecked."""
        own = {key: value for key, value in flat.items() if key not in _KEEP_KEYS.values()}
        own |= {key: tuple(own[key]) for key in ("every", "ignore") if key in own}
        return {**own, "keep": {name: flat[key] for name, key in _KEEP_KEYS.items() if key in flat}}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Self:
        """Return the record that `to_json` gave; absent keys have their defaults.

        Raises:
            TypeError: a key is unknown.
        """
        arguments = cls.arguments(content)
        return cls(**{**arguments, "keep": Keep(**arguments["keep"])})
