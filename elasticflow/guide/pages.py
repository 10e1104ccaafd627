"""The pages of the guide: which there are, their text, where a word stands in them.

`README.md` beside this module is the index: one line for each topic, in the order in which they are best read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

GUIDE = Path(__file__).parent
INDEX = GUIDE / "README.md"

_ENTRY = re.compile(r"^- \[(?P<topic>[a-z0-9-]+)\]\((?P=topic)\.md\): (?P<about>.+)$", re.MULTILINE)
_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>(?:\\.|[^\]\\])+)\]\((?P<target>[^()\s]+)\)")
_PAGE = re.compile(r"(?P<topic>[a-z0-9-]+)\.md(?:#.*)?")
_FENCE = re.compile(r"^ *```")


class Hit(NamedTuple):
    """A line of a page with the word that was looked for.

    Attributes:
        topic: Topic of the page, the word that `elasticflow guide` takes.
        section: The heading that the line stands under.
        line: Without the spaces around it.
    """

    topic: str
    section: str
    line: str


def topics() -> dict[str, str]:
    """Return the topics in the order of the index, and what each page is about."""
    index = INDEX.read_text(encoding="utf-8")
    return {entry["topic"]: entry["about"] for entry in _ENTRY.finditer(index)}


def text_of(topic: str) -> str:
    """Return the Markdown of a topic's page; the topic is one of `topics`."""
    return (GUIDE / f"{topic}.md").read_text(encoding="utf-8")


def search(word: str) -> Iterator[Hit]:
    """Yield the lines of all pages in which a word stands, capital letters or not."""
    sought = word.casefold()
    for topic in topics():
        section, is_code = "", False
        for line in text_of(topic).splitlines():
            if _FENCE.match(line):
                is_code = not is_code
            elif not is_code and line.startswith("#"):
                section = line.lstrip("#").strip()
            if sought in line.casefold():
                yield Hit(topic, section, line.strip())


def for_terminal(text: str) -> str:
    """Return a page's Markdown as it is of use where no link can be followed.

    A link to another page becomes the command that shows the page; a picture becomes its text. Links to files
    of the repository keep their words; links to other sites stay.
    """
    parts = re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(
        part if number % 2 else _LINK.sub(_without_target, part) for number, part in enumerate(parts)
    )


def _without_target(link: re.Match[str]) -> str:
    if link["picture"]:
        return f"*{link['text']}*"
    if page := _PAGE.fullmatch(link["target"]):
        return f"{link['text']} (`guide {page['topic']}`)"
    return link[0] if "://" in link["target"] else link["text"]
