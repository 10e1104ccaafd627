"""Changes to a text that leave every other line as it is, and what they are as a patch."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterable


class Edit(NamedTuple):
    """A piece of a text and what takes its place.

    Attributes:
        start: Of the piece, in characters.
        end: Behind it; the same for an insertion.
        text: What stands there afterwards.
    """

    start: int
    end: int
    text: str


class Editor:
    """Collects changes to a file.

    Args:
        text: The file, with line feeds as newlines.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._lines = text.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)
        self._edits: list[Edit] = []

    def replace(self, node: ast.expr | ast.stmt, text: str) -> None:
        """Put *text* in the place of an expression."""
        self._edits.append(Edit(*self.span(node), text))

    def insert_at(self, offset: int, text: str) -> None:
        """Put *text* before the character at an offset."""
        self._edits.append(Edit(offset, offset, text))

    def insert_before(self, line: int, lines: Iterable[str]) -> None:
        """Put whole lines before a line, counted from 1."""
        start = min(self._starts[line - 1], len(self.text))
        text = "".join(f"{each}\n" for each in lines)
        if line > len(self._lines):
            text = "\n" + text.removesuffix("\n")
        self._edits.append(Edit(start, start, text))

    def insert_after(self, line: int, lines: Iterable[str]) -> None:
        """Put whole lines behind a line, counted from 1."""
        self.insert_before(line + 1, lines)

    def replace_lines(self, first: int, last: int, lines: Iterable[str]) -> None:
        """Put whole lines in the place of those from *first* to *last*."""
        text = "".join(f"{each}\n" for each in lines)
        end = self._starts[last]
        if end > len(self.text):  # the last line, without a newline
            end, text = len(self.text), text.removesuffix("\n")
        self._edits.append(Edit(self._starts[first - 1], end, text))

    def span(self, node: ast.expr | ast.stmt | ast.arg) -> tuple[int, int]:
        """Return where a node begins and ends, in characters."""
        return (
            self._offset(node.lineno, node.col_offset),
            self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0),
        )

    def source(self, node: ast.expr | ast.stmt) -> str:
        """Return a node as it is written."""
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, line: int) -> str:
        """Return the blanks that a line begins with."""
        text = self._lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    def line(self, number: int) -> str:
        """Return a line, counted from 1."""
        return self._lines[number - 1]

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - 1]
        return self._starts[line - 1] + (
            column if text.isascii() else len(text.encode()[:column].decode(errors="replace"))
        )

    def result(self) -> str:
        """Return the changed text.

        Raises:
            ValueError: two changes overlap.
        """
        parts, at = [], 0
        for edit in sorted(self._edits, key=lambda each: (each.start, each.end > each.start)):
            if edit.start < at:
                raise ValueError(f"two changes at character {edit.start}")
            parts += [self.text[at : edit.start], edit.text]
            at = edit.end
        return "".join([*parts, self.text[at:]])


def unified(before: str, after: str, name: str) -> str:
    """Return a unified diff of a file that `git apply` and `patch -p1` take; empty where nothing has changed."""
    lines = difflib.unified_diff(
        _lines(before),
        _lines(after),
        f"a/{name}",
        f"b/{name}",
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
