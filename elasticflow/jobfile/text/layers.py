"""Texts that contribute keys to a job, files and `--set`, and how their keys are laid over each other."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.diagnostic import diagnostic_at
from elasticflow.jobfile.diagnostics.positions import KeyPath, Span, Spot, spots_in
from elasticflow.jobfile.text.read import MOST_LEVELS, UnreadableError, depth

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from elasticflow.jobfile.text.read import TomlTable

Place = tuple["Layer", Spot]
"""A text, and where a key stands in it."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One text that contributes keys.

    Attributes:
        name: Name in messages: the file as the user wrote it, or `--set`.
        text: The text, newlines normalised.
        find_spots: Finds the places of the keys; called for messages only, as most jobs have no mistakes.
        is_file: The text is a file, not `--set`.
        removes: The key that the text removes from the layers below, if any.
    """

    name: str
    text: str
    raw: TomlTable
    find_spots: Callable[[], dict[KeyPath, Spot]]
    is_file: bool = False
    removes: tuple[str, ...] = ()

    @cached_property
    def spots(self) -> dict[KeyPath, Spot]:
        """The place of each key of the text."""
        return self.find_spots()

    def look(self, path: KeyPath) -> Place | None:
        """Return the place of *path* in this text."""
        spot = self.spots.get(path)
        return None if spot is None else (self, spot)


@dataclass(frozen=True, eq=False)
class MovedLayer:
    """Keys of a job whose real place is elsewhere: the keys of a case, in [matrix].

    Attributes:
        moves: The places of the keys, by the beginnings of their paths.
        look_there: Returns the place of a moved key.
    """

    raw: TomlTable
    moves: Mapping[KeyPath, KeyPath]
    look_there: Callable[[KeyPath], Place | None]
    is_file: bool = False
    removes: tuple[str, ...] = ()

    def look(self, path: KeyPath) -> Place | None:
        """Return the real place of *path*."""
        for length in range(len(path), -1, -1):
            moved = self.moves.get(path[:length])
            if moved is not None:
                return self.look_there((*moved, *path[length:]))
        return None


def lay_over(below: TomlTable, layer: Layer | MovedLayer) -> TomlTable:
    """Return the keys of *below* with those of *layer* over them; both stay as they are."""
    return without(below, layer.removes) if layer.removes else merge(below, layer.raw)


def merge(weak: TomlTable, strong: TomlTable) -> TomlTable:
    """Return both tables as one: inner tables merge key by key; other values of *strong* win.

    Tables that only one side has are shared with the result, not copied.
    """
    merged = dict(weak)
    for key, value in strong.items():
        below = merged.get(key)
        both_tables = isinstance(below, dict) and isinstance(value, dict)
        merged[key] = merge(below, value) if both_tables else value  # type: ignore[arg-type]  # just checked
    return merged


def without(raw: TomlTable, names: tuple[str, ...]) -> TomlTable:
    """Return a table without the key at *names*, if it is there."""
    first, *rest = names
    inner = raw.get(first)
    if not rest:
        return {key: value for key, value in raw.items() if key != first}
    return {**raw, first: without(inner, tuple(rest))} if isinstance(inner, dict) else raw


def value_at(path: KeyPath, raw: Any) -> Any:
    """Return the value at a path of unvalidated keys; None (TOML has no null) if there is no value."""
    for part in path:
        if isinstance(raw, dict):
            raw = raw.get(part)
        else:
            raw = raw[part] if isinstance(raw, list) and isinstance(part, int) else None
    return raw


def content_of(value: object) -> object:
    """Return a key that is equal only for values that are equal and of the same type."""
    try:
        return repr(value)
    except ValueError:  # a number of thousands of digits
        return object()


def table_at(raw: TomlTable, *names: str) -> TomlTable:
    """Return a table of unvalidated keys; empty if it is missing."""
    table = value_at(names, raw)
    return table if isinstance(table, dict) else {}


def span_of(spot: Spot, *, at_key: bool) -> Span:
    """Return the span of a key or of its value; if only one of the two has a span, that span."""
    first, second = (spot.key, spot.value) if at_key else (spot.value, spot.key)
    span = first or second
    assert span is not None  # every spot has one of the two
    return span


_KEY_PART = r"""[ \t]*(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\\n])*"|'[^'\n]*')[ \t]*"""
_ASSIGNMENT = re.compile(rf"(?P<key>{_KEY_PART}(?:\.{_KEY_PART})*)=", re.DOTALL)
FLAG = "--set"


def flag_layer(text: str) -> Layer:
    """Return the layer of one `--set`; an empty value removes the key from the layers below.

    Raises:
        UnreadableError: the text is not of the form key=value, or its value is not TOML.
    """
    match = _ASSIGNMENT.match(text)
    if not match:
        remedy = "write --set key=value, for example --set train.epochs=3"
        raise _unreadable(codes.BAD_SET, "not of the form key=value", text, 0, remedy)
    start = match.end()
    value = text[start:].strip()
    spots = spots_in(f"{match[0]}0")
    path = max(spots, key=len)
    names = tuple(str(name) for name in path)
    if not value:
        return Layer(FLAG, text, {}, dict, removes=names)
    leaf = _leaf(text, value, start)
    raw: TomlTable = {names[-1]: leaf}
    for name in reversed(names[:-1]):
        raw = {name: raw}

    def find_spots() -> dict[KeyPath, Spot]:
        all_spots = dict(spots if isinstance(leaf, str) else spots_in(text))
        all_spots[path] = Spot(all_spots[path].key, Span(start, len(text)))
        return all_spots

    return Layer(FLAG, text, raw, find_spots)


# --set nodes.endpoint=[fd00::1]:29400, which begins like a list
_IPV6_ENDPOINT = re.compile(r"\[[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]:[0-9]+")


def _leaf(text: str, value: str, start: int) -> Any:
    import tomli

    try:
        parsed = tomli.loads(f"v = {value}")
    except (ValueError, RecursionError) as error:
        if value[0] in "[{\"'" and not _IPV6_ENDPOINT.fullmatch(value):
            remedy = "quote it for your shell, for example --set 'dataset.args={ split = \"train\" }'"
            raise _unreadable(codes.BAD_SET, "the value is not valid TOML", text, start, remedy) from error
        return value  # a bare word: --set job.name=mnist
    if set(parsed) != {"v"}:
        return value
    if depth(parsed) > MOST_LEVELS:
        raise _unreadable(codes.NOT_TOML, "the value is nested too deeply", text, start)
    return parsed["v"]


def _unreadable(code: str, message: str, text: str, start: int, remedy: str | None = None) -> UnreadableError:
    return UnreadableError(
        diagnostic_at(code, message, file=FLAG, text=text, span=Span(start, len(text)), remedy=remedy)
    )


def leaves(table: Mapping[str, Any], path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value in a table of tables, with its path."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value
