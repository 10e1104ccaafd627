"""The base class of sinks, and the records they receive: facts of the run, points by step, events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.events import EventRecord

Options = dict[str, Any]
"""The sink's table in the job file as written there: `[logging.mlflow]`."""
Remembered = dict[str, Any]
"""JSON values that a sink gets back when it continues, such as the id of the remote run."""


class SinkError(Exception):
    """A sink cannot deliver now; the text gives the reason in one line, for a person.

    Attributes:
        pause_s: Seconds for which the sink must not be tried again.
    """

    def __init__(self, text: str, pause_s: float = 0.0) -> None:
        super().__init__(text)
        self.pause_s = pause_s


@dataclass(frozen=True)
class RunFacts:
    """The run whose records are sent.

    Attributes:
        folder: The run folder, absolute.
        project_root: Absolute path of the folder that the job's relative paths start from.
        parameters: The resolved job by dotted key, secrets masked: `optimizer.args.lr`.
        tags: Tags to find the run by: `elasticflow.run_id`, `elasticflow.job`, and `git.commit` in a checkout.
    """

    run_id: str
    job: str
    folder: Path
    project_root: Path
    parameters: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """Values measured or logged after a step: a line of metrics.jsonl, a line of a hook's log, or numbers of an event.

    Attributes:
        step: Finished steps.
        time: Unix time at which it was written.
        values: Numbers by name, such as `loss`, `lr`, `eval/accuracy`, `elasticflow/restarts`; NaN where a number is
            not finite.
        texts: Texts that hooks logged, by name.
        images: Absolute paths of PNG files that hooks logged, by name.
    """

    step: int
    time: float
    generation: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Path] = field(default_factory=dict)


class Sink(ABC):
    """Sends a run's points and events somewhere; one object serves one run, in one thread.

    Any method may block and may raise any exception: the follower reports it once, makes a new object after a pause and
    continues after the last call that returned. The batch of a call that raised, or did not return before the process
    was killed, is given again: a sink that can tell which points have arrived should leave them out.
    """

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def open(self, run: RunFacts, remembered: Remembered) -> None:
        """Begin or continue the remote run.

        Args:
            remembered: The last result of `remember` for this run and these options; empty at first.
        """

    def remember(self) -> Remembered:
        """Return values that the next process needs to continue; they are kept with the position of the deliveries."""
        return {}

    @abstractmethod
    def points(self, batch: Sequence[Point]) -> None:
        """Deliver *batch*, which is in order of steps; it counts as delivered once this method returns."""

    look_every_s = 1.0
    """Seconds between two looks for new points."""
    events_at_once = 100
    """Most events in one call. 1: a delivered event never comes again because a later event failed."""

    def events(self, batch: Sequence[EventRecord]) -> None:
        """Deliver *batch*: events of the run, in the order and form of events.jsonl. A sink need not define this method."""
        return

    def close(self) -> None:
        """Flush and release resources: the process or the launch ends. The run may continue later."""
        return


def takes_events(sink: Sink) -> bool:
    """Return True if the sink delivers events."""
    return type(sink).events is not Sink.events
