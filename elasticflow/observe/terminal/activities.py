"""The present activity of a run, in words that a number of seconds can follow."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow import events
from elasticflow.observe.terminal.formats import span
from elasticflow.protocol.messages import LINGER
from elasticflow.system.records import float_of, int_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.system.records import Record

_STARTING, ENDING = "starting", "ending"
_WORDS = {
    "start": (_STARTING, "the workers come up"),
    "script": ("running", "the script"),
    "build": (_STARTING, "building model and data"),
    "restore": (_STARTING, "reading the snapshot"),
    "evaluate": ("evaluating", "after step {step}"),
    "snapshot": ("snapshot", "of step {step} is being taken"),
    "data": ("waiting", "for the data of step {next}"),
    "hook": ("hook", "of step {step} is running"),
    "leave": ("leaving", "after step {step}"),
    "step": ("training", "in step {next}"),
}
OF_PHASES: dict[str, tuple[str, str]] = {
    events.RUN_STARTED: (_STARTING, "importing torch"),
    events.NODE_JOINED: (_STARTING, "a group is formed"),
    events.GENERATION_STARTED: (_STARTING, "the workers come up"),
    events.SCRIPT_STARTED: ("running", "the script"),
    events.TRAINING_STARTED: (_STARTING, "the first step"),
    events.DRAIN_REQUESTED: ("leaving", "after the same step"),
    events.TRAINING_FINISHED: (ENDING, "the last snapshot is written"),
}
"""The activity of a run by the event that begins a phase of it; after `generation.ended` the next group is formed."""


class Doing(NamedTuple):
    """An activity of a run.

    Attributes:
        label: One word.
        since: Unix time of its beginning.
    """

    label: str
    text: str
    since: float

    def lasting(self, now: float) -> str:
        """Return the words with the duration so far: `importing torch, 3 s`."""
        return f"{self.text}, {whole_seconds(now - self.since)}"


def whole_seconds(seconds: float) -> str:
    """Return whole seconds, as a clock shows them: `3 s`, `1 min 5 s`."""
    return f"{max(0, int(seconds))} s" if seconds < 60 else span(int(seconds))


def doing_of(activity: Record, *, has_stepped: bool) -> Doing | None:
    """Return the activity of a node (`protocol/run_files.py`); None if it is unknown.

    Args:
        activity: Activity as in state.json.
        has_stepped: True if the node's workers have done a step: a compilation now is a recompilation.
    """
    since, step = float_of(activity, "since"), int_of(activity, "step")
    if since is None:
        return None
    phase, subject = str(activity.get("phase")), str(activity.get("subject") or "")
    if phase == "import":
        return Doing(_STARTING, f"importing {subject}", since)
    if phase == LINGER:
        return Doing(ENDING, f"waiting for {subject}", since)
    if phase == "compile":
        is_first = not has_stepped and not subject
        text = "the first step" if is_first else "compiling the model"
        return Doing("training" if has_stepped else _STARTING, text, since)
    label, text = _WORDS.get(phase, ("busy", phase))
    return Doing(label, text.format(step=step, next=step + 1), since)


def awaited_of(activities: Mapping[str, Record], *, has_stepped: bool) -> Doing | None:
    """Return the activity of the node that the others, which are in a step or have ended, seem to wait for."""
    known = [
        ((activity.get("phase") == LINGER, activity.get("phase") != "step"), doing)
        for activity in activities.values()
        if (doing := doing_of(activity, has_stepped=has_stepped)) is not None
    ]
    return max(known, key=lambda pair: (pair[0], -pair[1].since))[1] if known else None
