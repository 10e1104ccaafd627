"""What a sink is, and what it is given: facts of the run, points by step, events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.events import EventRecord

Options = dict[str, Any]
"""The sink's table in the job file, as it was given: `[logging.mlflow]`."""
Remembered = dict[str, Any]
"""JSON values that a sink finds again when it continues: the id of the remote run, for instance."""


class SinkError(Exception):
    """A sink cannot do its part now; the text says why, in one line, for a person.

    Attributes:
        pause_s: It asks not to be tried again for so many seconds.
    """

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


@dataclass(frozen=True)
class RunFacts:
    """The run whose records are sent.

    Attributes:
        run_id: Its id.
        job: The job's name.
        folder: The run folder, absolute.
        project_root: What relative paths of the job start at, absolute.
        parameters: The resolved job by dotted key, secrets masked: `optimizer.args.lr`.
        tags: What the run is found by: `elasticflow.run_id`, `elasticflow.job`, `git.commit` if there is one.
    """

    run_id: str
    job: str
    folder: Path
    project_root: Path
    parameters: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """What was measured or logged after a step: one line of metrics.jsonl, one of a hook's, or figures of an event.

    Attributes:
        step: Finished steps.
        time: Unix time at which it was written.
        generation: The worker group that wrote it.
        values: Numbers by name; NaN where one is not finite: `loss`, `lr`, `eval/accuracy`, `elasticflow/restarts`.
        texts: Texts that hooks logged, by name.
        images: PNG files that hooks logged, by name; absolute.
    """

    step: int
    time: float
    generation: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Path] = field(default_factory=dict)


class Sink(ABC):
    """Sends a run's points and events somewhere; one object serves one run, in one thread.

    Any method may block and may raise anything: the follower tells that once, makes a new object after a pause and goes
    on where the last call that returned had left off. What was given in a call that raised, or that did not return
    before the process was killed, is given again: a sink that can tell what has arrived should leave that out.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin, or continue, the remote run.

        Args:
            run: The run.
            remembered: What `remember` returned last, for this run and these options; empty at first.
        """

    def remember(self) -> Remembered:
        """Return what the next process has to know to continue; kept together with how far deliveries have got."""
        return {}

    @abstractmethod
    def points(self, batch: Sequence[Point]) -> None:
        """Deliver *batch*, in order of its steps; it counts as delivered once this returns."""

    look_every_s = 1.0
    """Seconds between two looks at what is new."""
    events_at_once = 100
    """How many events one call is given at most. 1: none that was delivered comes again because a later one failed."""

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Deliver *batch*, events of the run in order, as they stand in events.jsonl. A sink may leave this out."""
        return

    def close(self) -> None:
        """Flush and let go: the process ends, or the launch did. The run may continue later."""
        return


def takes_events(sink: Sink) -> bool:
    """Return whether the sink delivers events."""
    return type(sink).events is not Sink.events
