"""The line of a file that a diagnostic shows, secrets masked, and the carets under it."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left

from elasticflow.jobfile.diagnostics.positions import offsets_of
from elasticflow.system.redaction import is_secret, with_starred_users, with_stars

_WIDTH = 110
_TAB = "    "
# Patterns are compiled when a line is shown; most files have no diagnostics.
# Values of secret-looking keys and passwords in URLs must never reach a terminal or a CI log.
_VALUE = (
    r"(?<![\w-])(?P<key>[\w-]{1,200})(?P<equals>[\"']?[ \t]*=[ \t]*)"
    r"(?:(?P<quote>\"\"\"|'''|[\"'])(?P<value>.*?)(?P<end>(?P=quote)|$)|(?P<bare>[^\s\"',{}\[\]]+))"
)
_QUERY = r"(?<=[?&])(?P<key>[\w-]{1,200})=(?P<value>[^&#\s\"']+)"
_ADDRESS = r"(?<![\w-])url[\"']?[ \t]*=[ \t]*[\"']?https?://[^\"'\s]*"
_NUMBER = r"[+-]?[0-9][0-9_.eE+-]*|true|false"


def line_at(text: str, start: int) -> str:
    """Return the line of *text* at an offset, secrets masked."""
    begin, end = text.rfind("\n", 0, start) + 1, text.find("\n", start)
    line = text[begin : end if end >= 0 else len(text)]
    for quotes in ('"""', "'''"):
        offsets = offsets_of(text, quotes)
        number = bisect_left(offsets, begin)
        if number % 2:  # the line begins inside a text of several lines
            opened = offsets[number - 1]
            first = text[text.rfind("\n", 0, opened) + 1 : opened + 3] + "x"
            inside, close, rest = line.partition(quotes)
            if mask_secrets(first) != first:
                return "*" * len(inside) + close + mask_secrets(rest)
    return mask_secrets(line)


# Many problems of one long line need the same text.
@functools.lru_cache(maxsize=64)
def mask_secrets(line: str) -> str:
    """Return *line* with each secret-looking value replaced by as many stars."""
    line = with_starred_users(line)
    line = re.sub(
        _QUERY, lambda m: f"{m['key']}={'*' * len(m['value'])}" if is_secret(m["key"]) else m[0], line
    )
    return re.sub(_VALUE, _masked, re.sub(_ADDRESS, lambda address: with_stars(address[0]), line))


def _masked(match: re.Match[str]) -> str:
    key = match["key"].lower()
    if not (key == "key" or is_secret(key)) or "tokeniz" in key or re.fullmatch(_NUMBER, match["bare"] or ""):
        return match[0]
    before = match["key"] + match["equals"]
    if match["bare"] is not None:
        return before + "*" * len(match["bare"])
    return f"{before}{match['quote']}{'*' * len(match['value'])}{match['end']}"


def printable(text: str) -> str:
    """Return *text* with replacement characters for control characters and for characters that no encoding can write."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def excerpt_and_carets(line: str, column: int, end_column: int | None) -> tuple[str, str]:
    """Return the part of a line around a span, and the blanks and carets for the line below.

    Args:
        line: The line; it may hold anything.
        column: First column of the span, from 1, in code points.
        end_column: Column after the span; None: the span ends at the end of the line or later.
    """
    first = max(0, column - 1 - _WIDTH // 2) if len(line) > _WIDTH else 0
    last = min(len(line), first + _WIDTH)
    lead, tail = "..." * (first > 0), "..." * (last < len(line))
    begin = lead + _as_printed(line[first : column - 1])
    meant = _as_printed(line[column - 1 : last if end_column is None else min(last, end_column - 1)])
    carets = " " * _width(begin) + "^" * max(1, _width(meant))
    return f"{lead}{_as_printed(line[first:last])}{tail}", carets


def _as_printed(text: str) -> str:
    return printable(text.replace("\t", _TAB))


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
