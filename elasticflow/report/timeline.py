"""The time of a run as lanes, one per node, with generations and marks but without pauses between launches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from elasticflow import events
from elasticflow.observe.history import GONE
from elasticflow.observe.terminal.formats import size, span
from elasticflow.system.records import text_of, unix_time

if TYPE_CHECKING:
    from elasticflow.observe.history import Generation, Pause, RunHistory, SnapshotEvent
    from elasticflow.system.records import Record

MOST_LANES = 32
"""Most lanes on a page: a thousand lanes cannot be read."""
Tone = Literal["good", "note", "bad"]


@dataclass(frozen=True)
class Span:
    """A stretch of time, in seconds of the timeline.

    Attributes:
        is_training: True: steps are done in it, or the job's own script runs; False: the group is being started.
    """

    begin: float
    end: float
    generation: int
    is_training: bool
    text: str


@dataclass(frozen=True)
class Mark:
    """An event at one point in time, in seconds of the timeline."""

    at: float
    tone: Tone
    text: str


@dataclass
class Lane:
    """One node: its stretches of work, and marks of events on it."""

    node: str
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def troubles(self) -> int:
        """Number of times that the node was lost or excluded, or that a worker failed on it."""
        return sum(mark.tone == "bad" for mark in self.marks)

    @property
    def course(self) -> tuple[int, ...]:
        """The generations that the node was part of."""
        return tuple(span.generation for span in self.spans)


@dataclass
class Timeline:
    """A run's time.

    Attributes:
        seconds: Duration of the run, without the pauses between launches.
        lanes: Lanes of the nodes, in the order in which they joined.
        snapshots: Marks of snapshots that were committed, set aside, or failed.
    """

    seconds: float = 0.0
    lanes: list[Lane] = field(default_factory=list)
    snapshots: list[Mark] = field(default_factory=list)
    pauses: list[Pause] = field(default_factory=list)

    def shown_lanes(self, most: int = MOST_LANES) -> list[Lane]:
        """Return at most *most* lanes, in their order: those with the most troubles, then those with a rare course."""
        if len(self.lanes) <= most:
            return self.lanes
        usual = Counter(lane.course for lane in self.lanes)
        ranked = sorted(self.lanes, key=lambda lane: (-lane.troubles, usual[lane.course]))
        chosen = {id(lane) for lane in ranked[:most]}
        return [lane for lane in self.lanes if id(lane) in chosen]

    @classmethod
    def of(cls, history: RunHistory, seconds: float = 0.0) -> Timeline:
        """Return the timeline of a run that has taken at least *seconds*: a running generation ends then.

        Events without a time are left out.
        """
        seconds = max(seconds, history.seconds)
        timeline = cls(seconds, pauses=history.pauses)
        lanes: dict[str, Lane] = {}

        def lane(node: str) -> Lane:
            return lanes.setdefault(node, Lane(node))

        for at, event in history.node_events:
            if unix_time(event.get("timestamp")) is not None:
                default = "n0" if event["event"] == events.WORKER_FAILED else "None"
                lane(str(event.get("node") or default)).marks.append(_node_mark(at, event))
        for generation in history.generations.values():
            for node in generation.members:
                lane(node.name).spans += _spans(generation, seconds)
        timeline.lanes = list(lanes.values())
        timeline.snapshots = [_snapshot_mark(each) for each in history.snapshots if each.at is not None]
        return timeline


def _node_mark(at: float, event: Record) -> Mark:
    name = event["event"]
    if name == events.NODE_JOINED:
        return Mark(at, "good", f"joined ({event.get('host')})")
    if name == events.WORKER_FAILED:
        return Mark(at, "bad", f"rank {event.get('rank')}: {event.get('error')}")
    word, reason = GONE[name], text_of(event, "reason")
    tone: Tone = "note" if name == events.NODE_LEFT else "bad"
    return Mark(at, tone, f"{word}: {reason}" if reason else word)


def _spans(generation: Generation, now: float) -> list[Span]:
    if generation.began_s is None:
        return []
    number, begin, first = generation.number, generation.began_s, generation.first_step_s
    work = "training"
    if first is None and generation.script_s is not None:
        first, work = generation.script_s, "the script runs"
    end, stop = generation.ended_s, generation.stop
    why = "it runs" if end is None else "" if stop is None else f"{stop.kind}: {stop.reason}"
    end = now if end is None else end
    head = f"generation {number}, {generation.reason}"
    starting = Span(
        begin, end if first is None else first, number, is_training=False, text=f"{head}: starting"
    )
    if first is None:
        return [starting]
    took = f"{head}: {work} for {span(end - first)}"
    return [starting, Span(first, end, number, is_training=True, text=f"{took}; {why}" if why else took)]


def _snapshot_mark(snapshot: SnapshotEvent) -> Mark:
    if snapshot.state == "committed":
        facts = [f"step {snapshot.step}", size(snapshot.num_bytes or 0), str(snapshot.trigger)]
        return Mark(snapshot.at_s, "good", ", ".join(facts))
    word = "set aside" if snapshot.state == "rejected" else "not written"
    return Mark(snapshot.at_s, "bad", f"{snapshot.name} {word}: {snapshot.reason}")
