"""Counts the warnings of a job's code and its libraries: each kind is told at its first, and each time it is ten times as many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticflow.protocol.messages import Warned

# Kinds that are told apart; a loop may warn at another place each time.
_MOST_KINDS = 100
_FURTHER = ("", "further places")


@dataclass
class _Kind:
    first: Warned
    times: int = 0
    told: int = 0


class WarningTally:
    """Warnings by category and place, or by category and text where the place is not known."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], _Kind] = {}

    def add(self, warned: Warned) -> Warned | None:
        """Count a warning; return it with the times that were not told yet, if it is time to tell them."""
        kind = self._kind(warned)
        kind.times += warned.times
        is_due = not kind.told or kind.times >= 10 * kind.told
        return self._told(kind) if is_due else None

    def rest(self) -> list[Warned]:
        """Return the warnings whose times were not all told, with the times that are missing."""
        return [self._told(kind) for kind in self._kinds.values() if kind.times > kind.told]

    def _kind(self, warned: Warned) -> _Kind:
        name = (warned.category, warned.place or warned.text)
        if name not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            name, warned = _FURTHER, replace(warned, place=_FURTHER[1])
        return self._kinds.setdefault(name, _Kind(warned))

    def _told(self, kind: _Kind) -> Warned:
        times, kind.told = kind.times - kind.told, kind.times
        return replace(kind.first, times=times)
