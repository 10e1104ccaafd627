"""An event's name with all that is known of it."""

from __future__ import annotations

from typing import Literal, Self

Level = Literal["debug", "info", "warning", "error"]
Emitter = Literal["supervisor", "worker"]


class Event(str):
    """An event's name, with all that is known of it: the one record of an event, used wherever its name is.

    Attributes:
        meaning: What it says, as a sentence.
        fields: Its own fields, beside those of every line; what they hold says `telemetry/fields.py`.
        optional: Those of them that a line may lack; written with a `?` in the table below.
        level: The level of its lines.
        emitter: Who writes it. What workers write the supervisor reads in their logs.
        is_kept: It stands in events.jsonl; of several workers one writes it, by convention.
        may_be_supervisors: The supervisor writes it too, of what it or a snapshot writer did: without a worker's fields.
    """

    __slots__ = ("emitter", "fields", "is_kept", "level", "may_be_supervisors", "meaning", "optional")
    meaning: str
    fields: tuple[str, ...]
    optional: frozenset[str]
    level: Level
    emitter: Emitter
    is_kept: bool
    may_be_supervisors: bool

    def __new__(
        cls,
        name: str,
        meaning: str,
        fields: tuple[str, ...],
        *,
        level: Level = "info",
        emitter: Emitter = "supervisor",
        is_kept: bool = True,
        may_be_supervisors: bool = False,
    ) -> Self:
        """Return the event called *name*."""
        event = super().__new__(cls, name)
        event.meaning, event.level, event.emitter = meaning, level, emitter
        event.fields = tuple(name.removesuffix("?") for name in fields)
        event.optional = frozenset(name[:-1] for name in fields if name.endswith("?"))
        event.is_kept, event.may_be_supervisors = is_kept, may_be_supervisors
        return event

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Have copies, and what other processes get, be the plain name."""
        return str, (str(self),)
