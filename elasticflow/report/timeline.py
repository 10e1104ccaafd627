"""When what happened: nodes as lanes, generations in them, and marks, over time without the pauses between launches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from elasticflow import events
from elasticflow.observe.terminal.formats import size, span
from elasticflow.system.records import float_of, int_of, text_of, unix_time

if TYPE_CHECKING:
    from collections.abc import Iterable

    from elasticflow.system.records import Record

MOST_LANES = 32
"""Lanes on a page: of a thousand nodes nobody reads a thousand."""
Tone = Literal["good", "note", "bad"]
_ENDS = frozenset({events.RUN_FINISHED, events.RUN_FAILED, events.RUN_INTERRUPTED})
_NODE_ENDS: dict[str, tuple[str, Tone]] = {
    events.NODE_LOST: ("lost", "bad"),
    events.NODE_LEFT: ("left", "note"),
    events.NODE_EXCLUDED: ("excluded", "bad"),
}


@dataclass(frozen=True)
class Span:
    """A stretch of time, in seconds of the timeline.

    Attributes:
        begin: When it begins.
        end: When it ends.
        generation: Of it.
        is_training: Steps are done in it; else the group is being started.
        text: What it is.
    """

    begin: float
    end: float
    generation: int
    is_training: bool
    text: str


@dataclass(frozen=True)
class Mark:
    """Something that happened at one time, in seconds of the timeline."""

    at: float
    tone: Tone
    text: str


@dataclass
class Lane:
    """One node: when it worked, and what happened to it."""

    node: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def troubles(self) -> int:
        """How often it was lost, excluded, or the node of a worker that failed."""
        return sum(mark.tone == "bad" for mark in self.marks)

    @property
    def course(self) -> tuple[int, ...]:
        """The generations that it was part of."""
        return tuple(span.generation for span in self.spans)


@dataclass(frozen=True)
class Pause:
    """Between two launches, left out of the timeline: where that is, and for how many seconds."""

    at: float
    seconds: float


@dataclass
class Timeline:
    """A run's time.

    Attributes:
        began: Unix time of its beginning.
        seconds: How long it lasted, pauses between launches left out.
        lanes: Nodes, in the order in which they came.
        snapshots: Committed, set aside, failed.
        pauses: Between launches.
    """

    began: float = 0.0
    seconds: float = 0.0
    lanes: list[Lane] = field(default_factory=list)
    snapshots: list[Mark] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)

    def shown_lanes(self, most: int = MOST_LANES) -> list[Lane]:
        """Return at most so many lanes: those of nodes to which more happened than to others first, in their order."""
        if len(self.lanes) <= most:
            return self.lanes
        usual = Counter(lane.course for lane in self.lanes)
        ranked = sorted(self.lanes, key=lambda lane: (-lane.troubles, usual[lane.course]))
        chosen = {id(lane) for lane in ranked[:most]}
        return [lane for lane in self.lanes if id(lane) in chosen]

    @classmethod
    def of(cls, happened: Iterable[Record]) -> Timeline:
        """Return the timeline of these events; those without a time are left out."""
        reader = _Reader()
        for event in happened:
            if (at := unix_time(event.get("timestamp"))) is not None:
                reader.take(event, at)
        return reader.finish()


class _Reader:
    def __init__(self) -> None:
        self._timeline = Timeline()
        self._lanes: dict[str, Lane] = {}
        self._present: dict[str, None] = {}
        self._left_out = 0.0
        self._newest: float | None = None
        self._generation: tuple[int, float, tuple[str, ...], str] | None = None
        self._first_step: float | None = None

    def take(self, event: Record, at: float) -> None:
        """Take one event in, at a Unix time."""
        timeline, name = self._timeline, str(event.get("event"))
        if self._newest is None:
            self._newest = timeline.began = at
        if name == events.RUN_STARTED:
            self._launch_began(at)
        self._newest = max(self._newest, at)  # a clock may have been set back
        now = self._newest - timeline.began - self._left_out
        timeline.seconds = now
        match name:
            case events.NODE_JOINED:
                node = str(event.get("node"))
                self._lane(node).marks.append(Mark(now, "good", f"joined ({event.get('host')})"))
                self._present[node] = None
            case events.NODE_LOST | events.NODE_LEFT | events.NODE_EXCLUDED:
                self._node_ended(event, name, now)
            case events.GENERATION_STARTED:
                self._end_generation(now)
                nodes = event.get("members")
                members = tuple(map(str, nodes)) if isinstance(nodes, list) else tuple(self._present)
                reason = str(event.get("reason"))
                self._generation = (int_of(event, "generation"), now, members, reason)
            case events.TRAINING_FIRST_STEP if self._first_step is None:
                self._first_step = now
            case events.WORKER_FAILED:
                words = f"rank {event.get('rank')}: {event.get('error')}"
                self._lane(str(event.get("node") or "n0")).marks.append(Mark(now, "bad", words))
            case events.GENERATION_ENDED:
                self._end_generation(now, f"{event.get('class')}: {event.get('reason')}")
            case _ if name in _ENDS:
                self._end_generation(now)
                self._present.clear()
            case _:
                self._snapshot(name, event, now)

    def finish(self) -> Timeline:
        """Return the timeline, a generation that runs still taken as far as it is."""
        self._end_generation(self._timeline.seconds, "it runs")
        self._timeline.lanes = list(self._lanes.values())
        return self._timeline

    def _launch_began(self, at: float) -> None:
        assert self._newest is not None
        timeline = self._timeline
        now = self._newest - timeline.began - self._left_out
        self._end_generation(now)
        self._present.clear()
        if (pause := at - self._newest) > 0 and now > 0:
            timeline.pauses.append(Pause(now, pause))
            self._left_out += pause

    def _lane(self, node: str) -> Lane:
        return self._lanes.setdefault(node, Lane(node))

    def _node_ended(self, event: Record, name: str, now: float) -> None:
        word, tone = _NODE_ENDS[name]
        reason = text_of(event, "reason")
        node = str(event.get("node"))
        self._lane(node).marks.append(Mark(now, tone, f"{word}: {reason}" if reason else word))
        self._present.pop(node, None)

    def _end_generation(self, now: float, why: str = "") -> None:
        if self._generation is None:
            return
        (number, begin, members, reason), self._generation = self._generation, None
        first, self._first_step = self._first_step, None
        for node in members:
            spans = self._lane(node).spans
            head = f"generation {number}, {reason}"
            middle = now if first is None else first
            spans.append(Span(begin, middle, number, is_training=False, text=f"{head}: starting"))
            if first is not None:
                took = f"{head}: training for {span(now - first)}"
                spans.append(
                    Span(first, now, number, is_training=True, text=f"{took}; {why}" if why else took)
                )

    def _snapshot(self, name: str, event: Record, now: float) -> None:
        marks, step = self._timeline.snapshots, event.get("step")
        match name:
            case events.SNAPSHOT_COMMITTED:
                facts = [f"step {step}", size(float_of(event, "bytes") or 0), str(event.get("trigger"))]
                marks.append(Mark(now, "good", ", ".join(facts)))
            case events.SNAPSHOT_REJECTED | events.SNAPSHOT_FAILED:
                word = "set aside" if name == events.SNAPSHOT_REJECTED else "not written"
                marks.append(Mark(now, "bad", f"{event.get('name')} {word}: {event.get('reason')}"))
            case _:
                pass
