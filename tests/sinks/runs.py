"""Run folders written by hand, and sinks that remember what they were given."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.run_folder import RunFolder
from elasticflow.sinks.sink import RunFacts, Sink

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from elasticflow.sinks.sink import Point, Remembered


def step_line(step: int, generation: int = 1, **more: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl; its loss tells step and generation."""
    loss = step + generation / 1000
    return {
        "generation": generation,
        "world_size": 2,
        "step": step,
        "epoch": 0,
        "samples": 6 * step,
        "loss": loss,
        "lr": 0.01,
        "time": 1_700_000_000.0 + step,
        **more,
    }


def event_line(name: str, generation: int = 1, **fields: Any) -> dict[str, Any]:
    """Return a line of events.jsonl."""
    return {
        "timestamp": f"2026-11-23T03:00:{generation:02d}.000000Z",
        "level": "info",
        "event": name,
        "job": "toy",
        "run_id": "r1",
        "generation": generation,
        **fields,
    }


@dataclass(frozen=True)
class Written:
    """A run folder that a test writes.

    Attributes:
        folder: The run folder.
    """

    folder: RunFolder

    @classmethod
    def under(cls, root: Path) -> Written:
        """Make the folder of run r1 of the job toy in the project *root*."""
        folder = RunFolder.of(root, "toy", "r1")
        folder.path.mkdir(parents=True)
        return cls(folder)

    def metrics(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append lines to metrics.jsonl."""
        _append(self.folder.metrics, lines)

    def cut_metrics(self, step: int) -> None:
        """Take the lines beyond *step* away, as where a generation continues after it."""
        kept = [
            line
            for line in self.folder.metrics.read_bytes().splitlines(keepends=True)
            if json.loads(line)["step"] <= step
        ]
        with self.folder.metrics.open("r+b") as file:
            file.truncate(sum(map(len, kept)))

    def events(self, *lines: dict[str, Any]) -> None:
        """Append lines to events.jsonl."""
        _append(self.folder.events, lines)

    def logged(self, generation: int, lines: Iterable[dict[str, Any]], rank: int = 0) -> None:
        """Append lines to what hooks of a rank logged."""
        path = self.folder.path / "logged" / f"g{generation:04d}-rank{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        _append(path, lines)

    @property
    def facts(self) -> RunFacts:
        """The facts of the run."""
        path = self.folder.path
        parameters: dict[str, str | int | float | bool] = {"optimizer.args.lr": 0.01, "job.name": "toy"}
        tags = {"elasticflow.run_id": "r1", "elasticflow.job": "toy", "git.commit": "c0ffee"}
        return RunFacts("r1", "toy", path, path.parents[2], parameters, tags)


def _append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with path.open("ab") as file:
        for line in lines:
            file.write(json.dumps(line).encode() + b"\n")


def losses(points: Iterable[Point]) -> list[tuple[int, float]]:
    """Return step and loss of each point that has a loss."""
    return [(point.step, point.values["loss"]) for point in points if "loss" in point.values]


@dataclass
class Remote:
    """What arrived at the other end.

    Attributes:
        points: Points, in the order in which they came.
        events: Names of events.
        opened: What each `open` was given to remember.
        failures: So many of the next calls raise.
    """

    points: list[Point] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    opened: list[Remembered] = field(default_factory=list)
    failures: int = 0


class Collecting(Sink):
    """Gives everything to a `Remote`, which is its option `remote`."""

    events_at_once = 1

    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin."""
        self._remote: Remote = self.options["remote"]
        self._remote.opened.append(remembered)
        self._count = remembered.get("count", 0)

    def remember(self) -> Remembered:
        """Return how many points were given."""
        return {"count": self._count}

    def points(self, batch: Sequence[Point]) -> None:
        """Take all of them, or fail before."""
        self._fail()
        self._remote.points += batch
        self._count += len(batch)

    def events(self, batch: Sequence[dict[str, Any]]) -> None:
        """Take their names."""
        self._fail()
        self._remote.events += [event["event"] for event in batch]

    def _fail(self) -> None:
        if self._remote.failures:
            self._remote.failures -= 1
            raise ConnectionError("nobody  answers\nat all")
