"""What the supervisor knows of the generation that runs now (floor 3)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from elasticflow.launcher.failures import Report


@dataclass
class Generation:
    """One worker group.

    Attributes:
        number: Its number over the whole run, the same on every node.
        step: Last step that it is known to have finished, or None when it has finished none yet.
        epoch: Epoch of that step, where it was told.
        restored_from: Name of the snapshot that all ranks went on from, once they had verified it.
        is_finished: Rank 0 has said that training reached its end.
        stopped: Why the job's own code ended training before its length, if it did.
        raised: The `worker.raised` line of each rank that wrote one.
        hung: Phase of each rank that made no progress for too long.
    """

    number: int
    step: int | None = None
    epoch: int | None = None
    restored_from: str | None = None
    is_finished: bool = False
    stopped: str | None = None
    raised: dict[int, dict[str, Any]] = field(default_factory=dict)
    hung: dict[int, str] = field(default_factory=dict)

    def reports(self, node: str, workers: list[dict[str, Any]]) -> list[Report]:
        """Return how each worker ended, from an agent's message and what the workers themselves said."""
        return [
            Report(
                rank=w["rank"],
                exit_code=w["exit_code"],
                raised=self.raised.get(w["rank"]),
                time=w["at"],
                node=node,
                pid=w["pid"],
                ended_by_us=w["ended_by_us"] and w["rank"] not in self.hung,
                hung=w["rank"] in self.hung,
                stderr=w["stderr"],
            )
            for w in workers
        ]
