"""Changes of a job file's text that leave all else of it as it is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics.positions import Edit, mentions_of
from elasticflow.jobfile.diagnostics.toml_literals import dotted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from elasticflow.jobfile.diagnostics.positions import KeyPath, Span
    from elasticflow.jobfile.text.layers import Layer

_BLANK_OR_COMMENT = re.compile(r"[ \t]*(#[^\n]*)?")


def apply(text: str, edits: Sequence[Edit]) -> str:
    """Return *text* with *edits*, of which no two touch the same range."""
    for edit in sorted(edits, reverse=True):
        text = f"{text[: edit.start]}{edit.text}{text[edit.end :]}"
    return text


def in_file(data: bytes, edits: Sequence[Edit]) -> bytes:
    """Return a file's bytes with *edits* of its text as it was read: a byte order mark and line ends stay as they are."""
    text = data.decode("utf-8")
    mark = "\ufeff" if text.startswith("\ufeff") else ""
    lines = text[len(mark) :].replace("\r\n", "\n")
    has_returns = "\r\n" in text
    # Where each letter of the text that was read stands in the file's.
    places, at = [], len(mark)
    for letter in lines:
        places.append(at)
        at += 2 if letter == "\n" and text.startswith("\r\n", at) else 1
    places.append(at)
    own = [
        Edit(places[start], places[end], new.replace("\n", "\r\n") if has_returns else new)
        for start, end, new in edits
    ]
    return apply(text, own).encode()


def rename(layer: Layer, path: KeyPath, name: str) -> tuple[Edit, ...]:
    """Return what gives the key at *path* another name, wherever the text names it; nothing if it does not."""
    if path not in layer.spots:
        return ()
    key = dotted((name,))
    return tuple(Edit(span.start, span.end, key) for span in mentions_of(layer.text, path))


def rewrite(layer: Layer, path: KeyPath, value: str) -> tuple[Edit, ...]:
    """Return what gives the key at *path* another value, as TOML; nothing where it is a table with a header, or refers to others."""
    spot = layer.spots.get(path)
    if spot is None or spot.value is None or "${" in layer.text[spot.value.start : spot.value.end]:
        return ()
    return (Edit(spot.value.start, spot.value.end, value),)


def move(layer: Layer, path: KeyPath, to: KeyPath, value: str) -> tuple[Edit, ...]:
    """Return what takes the line of the key at *path* to another table, below its last line, with this name and value.

    A table that is not there yet is added at the end. Nothing if the other table has no header of its own, the key no
    line of its own, or the value refers to others.
    """
    text, spot = layer.text, layer.spots.get(path)
    if (
        spot is None
        or spot.key is None
        or spot.value is None
        or "${" in text[spot.value.start : spot.value.end]
    ):
        return ()
    if path[:-1] == to[:-1]:
        return (*rename(layer, path, str(to[-1])), *_value_edit(text, spot.value, value))
    lines, place = _stands_alone(text, spot.key, spot.value), _end_of_table(layer, to[:-1])
    if lines is None or place is None:
        return ()
    start, end = lines
    own = [spot.key, spot.value]
    key, old = (type(each)(each.start - start, each.end - start) for each in own)
    pair = text[start:end].rstrip("\n")
    moved = apply(pair, [Edit(*key, dotted(to[-1:])), *_value_edit(pair, old, value)])
    before, header = place
    begin = "" if before == 0 or text[before - 1] == "\n" else "\n"
    return (Edit(start, end, ""), Edit(before, before, f"{begin}{header}{moved.lstrip()}\n"))


def _value_edit(text: str, span: Span, value: str) -> tuple[Edit, ...]:
    return () if text[span.start : span.end] == value else (Edit(span.start, span.end, value),)


def _stands_alone(text: str, key: Span, value: Span) -> tuple[int, int] | None:
    """Return where the lines of a pair begin and end; None if something else stands on them."""
    start = text.rfind("\n", 0, key.start) + 1
    rest = _BLANK_OR_COMMENT.match(text, value.end)
    assert rest is not None  # it matches nothing, too
    end = rest.end()
    if text[start : key.start].strip() or not (end == len(text) or text[end] == "\n"):
        return None
    return start, min(len(text), end + 1)


def _end_of_table(layer: Layer, table: KeyPath) -> tuple[int, str] | None:
    """Return where a line can be added to a table, and the header to write before it; None where neither can be."""
    text, spot = layer.text, layer.spots.get(table)
    if spot is None:
        blank = "" if not text or text.endswith("\n\n") else "\n"
        return (len(text), f"{blank}[{dotted(table)}]\n") if len(table) == 1 else None
    if spot.key is None or spot.value is not None:
        return None
    line = text.rfind("\n", 0, spot.key.start) + 1
    if not re.match(rf"[ \t]*\[[ \t]*{re.escape(dotted(table))}[ \t]*\]", text[line:]):
        return None
    pairs = [
        each.value.end
        for path, each in layer.spots.items()
        if len(path) == len(table) + 1
        and path[: len(table)] == table
        and each.value is not None
        and each.key is not None
        and _stands_alone(text, each.key, each.value) is not None
    ]
    last = max([spot.key.end, *pairs])
    end = text.find("\n", last)
    return (len(text) if end < 0 else end + 1), ""
