"""The explanation of each code, read from `codes.md`, which is written by hand."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

CODES_PAGE = Path(__file__).with_name("codes.md")
_GROUP = re.compile(r"^## (.+)\n\n\| code \| meaning \|\n\|---\|---\|\n((?:\|.+\n)+)", re.MULTILINE)
_TITLE = re.compile(r"^\| \[(EF\d{3})\]\(#ef\d{3}\) \| (.+) \|$", re.MULTILINE)
_EXAMPLE = re.compile(r"\n\n(Bad|Good):\n\n```\n(.*?)\n```", re.DOTALL)


class Explanation(NamedTuple):
    """A section of the page: the meaning of a code, and lines of a job file with and without the mistake.

    Attributes:
        reason: The reason and the remedy: one paragraph, as one line.
        markdown: Reason and examples as they stand on the page.
    """

    title: str
    reason: str
    bad: str
    good: str
    markdown: str

    @property
    def text(self) -> str:
        """Reason and examples as plain text."""
        return f"{self.reason}\n\nBad:\n{self.bad}\n\nGood:\n{self.good}"


def explanation_of(code: str) -> Explanation | None:
    """Return the page's section about a code; None if the page has no such code."""
    _, heading, rest = _page().partition(f"\n### {code}\n\n")
    if not heading:
        return None
    section = rest.partition("\n\n### ")[0].rstrip("\n")
    title, _, markdown = section.partition("\n\n")
    examples = dict(_EXAMPLE.findall(markdown))
    reason = " ".join(markdown.partition("\n\nBad:")[0].split("\n"))
    return Explanation(title.strip("*"), reason, examples["Bad"], examples["Good"], markdown)


def titles() -> dict[str, str]:
    """Return every code with its title, in the order of the page."""
    return {code: title for group in code_groups().values() for code, title in group.items()}


def code_groups() -> dict[str, dict[str, str]]:
    """Return the headings of the page, each with its codes and their titles."""
    return {heading: dict(_TITLE.findall(rows)) for heading, rows in _GROUP.findall(_page())}


@cache
def _page() -> str:
    return CODES_PAGE.read_text("utf-8")
