"""One sink's thread: reads the run folder, delivers, records its progress, and tries again after a failure."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from elasticflow.protocol.json_codec import from_json, to_json
from elasticflow.sinks.reader import Position, Reader
from elasticflow.sinks.sink import Remembered, SinkError, takes_events
from elasticflow.system import atomic_files, records

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.events import EventRecord
    from elasticflow.run_folder import RunFolder
    from elasticflow.sinks.sink import Options, RunFacts, Sink

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_PAUSE_AT_END_S = 0.5
_LONGEST_TEXT = 300
# Folder in a run folder for the records of the sinks.
_FOLDER = "sinks"
_FORMAT = 1


@dataclass(frozen=True)
class SinkRecord:
    """The progress of a sink.

    Attributes:
        position: Everything before it has been delivered.
        remembered: Values for the sink's next process (`Sink.remember`).
    """

    position: Position = field(default_factory=Position)
    remembered: Remembered = field(default_factory=dict)


def record_path(folder: RunFolder, name: str) -> Path:
    """Return the path of the record of the sink *name*."""
    return folder.path / _FOLDER / f"{name}.json"


def read_record(folder: RunFolder, name: str, options: Options) -> SinkRecord:
    """Return the record of a sink; an empty record if there is none, if it is damaged, or if the options have changed.

    A sink with other options sends to another place, to which nothing was sent yet.
    """
    values = records.read(record_path(folder, name))
    if not isinstance(values, dict) or values.get("format") != _FORMAT or values.get("options") != options:
        return SinkRecord()
    try:
        return from_json(SinkRecord, {name: values.get(name) for name in ("position", "remembered")})
    except ValueError:
        return SinkRecord()


def write_record(folder: RunFolder, name: str, options: Options, record: SinkRecord) -> None:
    """Replace the record of a sink; the new record is on the disk afterwards.

    Raises:
        OSError: the record cannot be written; the old record stands.
    """
    values: dict[str, Any] = {
        "format": _FORMAT,
        "sink": name,
        "options": options,
        "remembered": record.remembered,
        "position": record.position,
    }
    atomic_files.write(record_path(folder, name), [to_json(values).encode(), b"\n"])


class Report(Protocol):
    """Called to report on a sink, with the name of an event and its fields."""

    def __call__(self, event: str, /, **fields: Any) -> None:
        """Report the event."""


class Delivery:
    """Delivers one run to one sink, from the position that the run folder records.

    Args:
        make: Makes the sink; it may raise.
        report: Called once when deliveries begin to fail, and once when they work again.
        is_wanted: For sinks of events only: returns True for events to send. None: all events.

    Attributes:
        is_done: Set once `finish` was called and everything is delivered.
        unit: Word for the things that `unsent` counts.
        error: The reason that deliveries fail now; None while they work.
        busy_since: Monotonic time at which the present call of the sink began; None between calls.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Sink],
        options: Options,
        run: RunFacts,
        folder: RunFolder,
        report: Report,
        is_wanted: Callable[[EventRecord], object] | None = None,
    ) -> None:
        self.name = name
        self.unit = "point" if is_wanted is None else "message"
        self._is_wanted = is_wanted
        self._make, self._options, self._run, self._folder = make, options, run, folder
        self._report = report
        self._reader = Reader(folder)
        self._record = read_record(folder, name, options)
        self._ending = threading.Event()
        self.is_done = threading.Event()
        self.error: str | None = None
        self.busy_since: float | None = None
        self._failing_since: float | None = None
        self._takes_events = False

    def start(self) -> None:
        """Start the thread, which does not keep the process alive."""
        threading.Thread(target=self.run, daemon=True, name=f"sink {self.name}").start()

    def finish(self) -> None:
        """Have `run` return once everything that is written is delivered."""
        self._ending.set()

    def unsent(self) -> int:
        """Return the number of points and events, or of messages, that are not delivered.

        Raises:
            OSError: a file of the run cannot be read.
        """
        if self._is_wanted is not None:
            return self._reader.count_events(self._record.position, self._is_wanted)
        return self._reader.count(self._record.position, with_events=self._takes_events)

    @property
    def position(self) -> Position:
        """Everything before this position is delivered."""
        return self._record.position

    def why(self) -> str:
        """Return the reason that something is not delivered."""
        return self.error or "it was too slow"

    def run(self) -> None:
        """Deliver until `finish` was called and nothing is left; after failures try again, with growing pauses."""
        pause = _FIRST_PAUSE_S
        while not self.is_done.is_set():
            position = self._record.position
            try:
                self._deliver()
                self.is_done.set()
            except Exception as error:  # noqa: BLE001  # whatever a client library raises
                self.busy_since = None
                self._tell_failure(error)
                pause = _FIRST_PAUSE_S if self._record.position != position else pause
                asked_s = error.pause_s if isinstance(error, SinkError) else 0.0
                not_before = time.monotonic() + asked_s
                if self._ending.wait(max(pause, asked_s)):
                    time.sleep(max(_PAUSE_AT_END_S, not_before - time.monotonic()))
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _deliver(self) -> None:
        self._call_begins()
        sink = self._make()
        self._takes_events = takes_events(sink)
        try:
            sink.open(self._run, self._record.remembered)
            self._delivered(sink, self._record.position)
            while True:
                is_last = self._ending.is_set()
                while self._deliver_batch(sink):
                    pass
                if is_last:
                    break
                self._ending.wait(sink.look_every_s)
        except BaseException:
            with suppress(Exception):  # the first failure is the cause
                sink.close()
            raise
        self._call_begins()
        sink.close()
        self.busy_since = None

    def _deliver_batch(self, sink: Sink) -> bool:
        """Deliver everything that is written and record the position; return True if there was anything."""
        position = self._record.position
        if self._is_wanted is None:
            batch = self._reader.after(position)
            if batch.end != position:
                self._call_begins()
                if batch.points:
                    sink.points(batch.points)
                self._delivered(sink, batch.end)
        if takes_events(sink):
            told = self._reader.events_after(self._record.position, sink.events_at_once)
            if told.end != self._record.position:
                self._call_begins()
                if wanted := [
                    each for each in told.events if self._is_wanted is None or self._is_wanted(each)
                ]:
                    sink.events(wanted)
                self._delivered(sink, told.end)
        return self._record.position != position

    def _delivered(self, sink: Sink, position: Position) -> None:
        self.busy_since = None
        record = SinkRecord(position, sink.remember())
        if record != self._record:
            write_record(self._folder, self.name, self._options, record)
            self._record = record
            self._tell_recovery()

    def _call_begins(self) -> None:
        self.busy_since = time.monotonic()

    def _tell_failure(self, error: Exception) -> None:
        self.error = words_of(error)
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            self._report("sink.failed", sink=self.name, error=self.error)

    def _tell_recovery(self) -> None:
        if self._failing_since is not None:
            seconds = round(time.monotonic() - self._failing_since, 3)
            self._failing_since = self.error = None
            self._report("sink.recovered", sink=self.name, seconds=seconds)


def words_of(error: BaseException) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    whole = f"{kind}: {text}" if text and kind != "SinkError" else text or kind
    return whole if len(whole) <= _LONGEST_TEXT else f"{whole[:_LONGEST_TEXT]} ..."
