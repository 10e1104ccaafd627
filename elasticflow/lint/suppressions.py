"""Comments that suppress findings: `# noqa: EF601` on a line, `# elasticflow: noqa: EF601` for the file."""

from __future__ import annotations

import io
import re
import tokenize
from dataclasses import dataclass, field

_LINE = re.compile(
    r"#\s*noqa\b(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?(?P<more>\s*:)?", re.IGNORECASE
)
_FILE = re.compile(
    r"#\s*elasticflow\s*:\s*noqa\b(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[,\s]+[A-Z]+[0-9]+)*)?", re.IGNORECASE
)
_CODE = re.compile(r"[A-Z]+[0-9]+")
_ALL = frozenset({"all"})


@dataclass
class Suppressions:
    """The suppressed codes of a file.

    Attributes:
        lines: The suppressed codes of each line, from 1; `all` for every code.
        file: The codes that are suppressed in the whole file.
    """

    lines: dict[int, frozenset[str]] = field(default_factory=dict)
    file: frozenset[str] = frozenset()

    def covers(self, code: str, first: int, last: int) -> bool:
        """Return whether a finding from line *first* to line *last* is suppressed."""
        wanted = {code, *_ALL}
        return bool(wanted & self.file) or any(
            wanted & self.lines.get(line, frozenset()) for line in range(first, last + 1)
        )


def suppressions_in(text: str) -> Suppressions:
    """Return the suppressions in the comments of a valid Python file; strings that look like comments do not count."""
    found = Suppressions()
    if "noqa" not in text.lower():
        return found
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if match := _FILE.search(token.string):
            found.file |= _codes(match)
        elif (match := _LINE.search(token.string)) and (match["codes"] or not match["more"]):
            found.lines[token.start[0]] = _codes(match)
    return found


def _codes(match: re.Match[str]) -> frozenset[str]:
    return frozenset(_CODE.findall(match["codes"].upper())) if match["codes"] else _ALL
