"""Line and column of every key and value of a valid TOML document.

tomli owns syntax errors and values but tells no positions; this index only walks text that tomli has accepted.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

_BLANK = re.compile(r"[ \t]*")
_SKIP = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE = re.compile(r"[A-Za-z0-9_-]+")
# Numbers, booleans, dates; "1979-05-27 07:32:00" has a space inside.
_ATOM = re.compile(r"[^\s,\]}#]+(?: \d[^\s,\]}#]*)?")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}(?!")|\'\'\'.*?\'{3,5}(?!\')|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'', re.DOTALL
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_PLAIN = {"b": "\b", "t": "\t", "n": "\n", "f": "\f", "r": "\r", "e": "\x1b"}

KeyPath = tuple["str | int", ...]
"""Where something stands: table names, keys and positions in arrays."""


class Span(NamedTuple):
    """Half-open range of code points in a text."""

    start: int
    end: int


class Spot(NamedTuple):
    """The places of a key and of its value.

    Attributes:
        key: Span of the last part of the key; None for an element of an array.
        value: Span of the value; None for a table made by a header or by a dotted key.
    """

    key: Span | None
    value: Span | None


def spots_in(text: str) -> dict[KeyPath, Spot]:
    """Return the spot of every key and value of *text*, which tomli has accepted."""
    return _SpotFinder(text).spots


def line_and_column(text: str, at: int) -> tuple[int, int]:
    """Return line and column of an offset, both from 1, the column in code points."""
    line = bisect_left(offsets_of(text, "\n"), at)
    return line + 1, at - text.rfind("\n", 0, at)


# A file may have thousands of findings, each of which looks up its place: none reads the text again from its beginning.
@lru_cache(maxsize=16)
def offsets_of(text: str, part: str) -> list[int]:
    """Return the offsets of a part within a text, in order; parts that overlap count once."""
    return [match.start() for match in re.finditer(re.escape(part), text)]


class _SpotFinder:
    def __init__(self, text: str) -> None:
        self.text = text
        self.spots: dict[KeyPath, Spot] = {}
        self.counts: dict[KeyPath, int] = {}  # newest element of each array of tables
        at, table = 0, KeyPath()
        while (at := self._after(_SKIP, at)) < len(text):
            if text[at] == "[":
                table, at = self._header(at)
            else:
                at = self._pair(table, at)

    def _after(self, pattern: re.Pattern[str], at: int) -> int:
        match = pattern.match(self.text, at)
        assert match is not None, "tomli accepted what this index cannot read"
        return match.end()

    def _header(self, at: int) -> tuple[KeyPath, int]:
        is_array = self.text.startswith("[[", at)
        parts, end = self._key(at + 1 + is_array)
        end += 1 + is_array
        if not is_array:
            return self._down((), parts), end
        name, span = parts[-1]
        path = (*self._down((), parts[:-1]), name)
        self.counts[path] = self.counts.get(path, -1) + 1
        self.spots.setdefault(path, Spot(span, None))
        element = (*path, self.counts[path])
        self.spots[element] = Spot(span, None)
        return element, end

    def _key(self, at: int) -> tuple[list[tuple[str, Span]], int]:
        parts: list[tuple[str, Span]] = []
        while True:
            at = self._after(_BLANK, at)
            quote = self.text[at]
            end = self._after(_STRING if quote in "\"'" else _BARE, at)
            name = self.text[at:end]
            if quote == "'":
                name = name[1:-1]
            elif quote == '"':
                name = _ESCAPE.sub(_unescaped, name[1:-1])
            parts.append((name, Span(at, end)))
            at = self._after(_BLANK, end)
            if self.text[at] != ".":
                return parts, at
            at += 1

    def _down(self, base: KeyPath, parts: list[tuple[str, Span]]) -> KeyPath:
        for name, span in parts:
            base = (*base, name)
            self.spots.setdefault(base, Spot(span, None))
            if base in self.counts:
                base = (*base, self.counts[base])
        return base

    def _pair(self, base: KeyPath, at: int) -> int:
        parts, at = self._key(at)
        name, span = parts[-1]
        path = (*self._down(base, parts[:-1]), name)
        at = self._after(_BLANK, at + 1)
        end = self._value(path, at)
        self.spots[path] = Spot(span, Span(at, end))
        return end

    def _value(self, path: KeyPath, at: int) -> int:
        first = self.text[at]
        if first not in "[{":
            return self._after(_STRING if first in "\"'" else _ATOM, at)
        close, number = "]" if first == "[" else "}", 0
        at = self._after(_SKIP, at + 1)
        while self.text[at] != close:
            if first == "[":
                end = self._value((*path, number), at)
                self.spots[*path, number] = Spot(None, Span(at, end))
                number += 1
            else:
                end = self._pair(path, at)
            at = self._after(_SKIP, end)
            if self.text[at] == ",":
                at = self._after(_SKIP, at + 1)
        return at + 1


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _PLAIN.get(match[4], match[4])
