"""What the recovery benchmark reports: medians out of tries, tables, bounds; pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow import events
from tests.measured.benchmarks.recovery_models import MODELS, split

if TYPE_CHECKING:
    from collections.abc import Iterable

WARM_STEPS = 30  # before anything happens

# What may happen on the way, in this order; each try keeps when it did.
MARKS = (
    events.WORKER_FAILED,
    events.NODE_LOST,
    events.DRAIN_REQUESTED,
    events.GENERATION_ENDED,
    events.GENERATION_STARTED,
    events.SNAPSHOT_CHOSEN,
    events.TRAINING_STARTED,
    events.TRAINING_FIRST_STEP,
)


@dataclass(frozen=True)
class Part:
    """What is measured.

    Attributes:
        title: What happens, in words.
        most_s: Most seconds that it may take.
        with_model: The same where the model's module imports more than torch.
    """

    title: str
    most_s: float
    with_model: float | None = None


PARTS = {
    "start": Part("command, to the first step", 10.0, 60.0),
    "worker": Part("worker killed, to the first step of the next group", 0.35, 0.5),
    "gpu": Part("the only worker killed, on a GPU, to the first step of the next group", 0.5),
    "node": Part("node lost, 2 to 1, to the survivor's first step", 4.0),
    "agent": Part("agent killed, its machine lives, to the survivor's first step", 4.0),
    "join": Part("node joins, 1 to 2, last step before to first step after", 1.5),
}


@dataclass(frozen=True)
class Try:
    """One try.

    Attributes:
        seconds: What is measured; None if training did not continue in time.
        outcome: In words, where more is to be said than the time.
        marks: When what happened on the way, in seconds from the beginning.
    """

    seconds: float | None
    outcome: str = ""
    marks: dict[str, float] = field(default_factory=dict)


Tries = dict[str, list[Try]]  # by part


@dataclass(frozen=True)
class Figures:
    """What the tries of one part say.

    Attributes:
        tries: How many.
        went_on: Those after which training continued in time.
        median: Of their seconds; None if there are none.
        least: Of their seconds.
        most: Of their seconds.
        outcomes: How many of the tries had each outcome that is to be told.
    """

    tries: int
    went_on: int
    median: float | None
    least: float | None
    most: float | None
    outcomes: dict[str, int]

    @classmethod
    def of(cls, tries: list[Try]) -> Figures:
        """Return what *tries* say."""
        seconds = sorted(t.seconds for t in tries if t.seconds is not None)
        outcomes: dict[str, int] = {}
        for found in tries:
            if found.outcome:
                outcomes[found.outcome] = outcomes.get(found.outcome, 0) + 1
        if not seconds:
            return cls(len(tries), 0, None, None, None, outcomes)
        middle = round(statistics.median(seconds), 3)
        return cls(len(tries), len(seconds), middle, seconds[0], seconds[-1], outcomes)

    def seconds_text(self) -> str:
        """Return the median and the range."""
        if self.median is None:
            return "never" if self.tries else ""
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"

    def outcomes_text(self) -> str:
        """Return how many of the tries continued, and what else there is to tell."""
        if not self.tries:
            return ""
        words = "; ".join(f"{count} x {outcome}" for outcome, count in self.outcomes.items())
        return f"{self.went_on} of {self.tries}" + (f" ({words})" if words else "")


def part_of(name: str) -> Part:
    """Return the part of a name such as `worker` or `worker-timm`."""
    return PARTS[split(name)[0]]


def names(parts: Iterable[str] = PARTS) -> list[str]:
    """Return the names of *parts*, and of the same with each of the models."""
    return [f"{part}-{model}" if model else part for model in MODELS for part in parts]


def table(tries: Tries) -> str:
    """Return the figures as a table of Markdown."""
    lines = ["| | s | continued |", "|---|---:|---|"]
    for name in names():
        if name in tries:
            found = Figures.of(tries[name])
            lines.append(
                "| " + " | ".join([_title(name), found.seconds_text(), found.outcomes_text()]) + " |"
            )
    return "\n".join(lines)


def way(tries: Tries) -> str:
    """Return when what happened on the way, medians in milliseconds, as a table of Markdown."""
    found = {name: tries[name] for name in names() if name in tries}
    marks = [mark for mark in MARKS if any(mark in t.marks for ours in found.values() for t in ours)]
    lines = ["| ms | " + " | ".join(marks) + " |", "|---|" + "---:|" * len(marks)]
    for name, ours in found.items():
        cells = []
        for mark in marks:
            times = [t.marks[mark] for t in ours if mark in t.marks]
            cells.append(f"{statistics.median(times) * 1000:.0f}" if times else "")
        lines.append(f"| {_title(name)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bounds(tries: Tries) -> dict[str, bool]:
    """Return each bound that the tries tell of, in words, and whether it is kept."""
    found: dict[str, bool] = {}
    for name in names():
        median = Figures.of(tries.get(name, [])).median
        part = part_of(name)
        most_s = part.with_model if part.with_model is not None and split(name)[1] else part.most_s
        if median is not None:
            found[f"{name}: {median:.2f} s, at most {most_s:g} s"] = median <= most_s
    return found


def to_json(tries: Tries) -> dict[str, Any]:
    """Return the tries and the figures as they are written; `from_json` takes the tries out again."""
    return {
        "figures": {name: vars(Figures.of(found)) for name, found in tries.items()},
        "bounds": bounds(tries),
        "tries": {name: [vars(t) for t in found] for name, found in tries.items()},
    }


def from_json(content: dict[str, Any]) -> Tries:
    """Return the tries that were written."""
    return {name: [Try(**fields) for fields in found] for name, found in content["tries"].items()}


def _title(name: str) -> str:
    _, model = split(name)
    return part_of(name).title + (f", {MODELS[model].words}" if model else "")
