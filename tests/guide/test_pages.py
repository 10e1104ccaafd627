"""The pages of the guide: all in the index, with links that lead somewhere, and what can be done with them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import tomli

from elasticflow.guide import pages
from elasticflow.jobfile.diagnostics.codes import CODES_PAGE
from tests.fenced_blocks import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MOST_LINES = 250
PAGES = [
    *(ROOT / name for name in ("README.md", "elasticflow/README.md")),
    *sorted(pages.GUIDE.glob("*.md")),
    *sorted(path for path in (ROOT / "examples").rglob("*.md") if "runs" not in path.parts),
    CODES_PAGE,
]
_CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Return where the links and pictures of a page lead."""
    plain = _CODE.sub("", text)
    return [
        *re.findall(r"\]\(([^()\s]+)\)", plain),
        *re.findall(r"(?:src|srcset|href)=\"([^\"]+)\"", plain),
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors that code hosts make of a page's headings."""
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ +(.*)$", text, re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{n}" if n else anchor for anchor, count in found.items() for n in range(count + 1)}


def broken(page: Path) -> list[str]:
    """Return the links of a page that lead to no file, or to no heading of one."""
    wrong = []
    for link in links(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """As they are, on any code host: relative, in the repository, to a heading that is there."""
    assert [] == broken(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    """To a file that is not there, and to a heading that is not there; code is no link."""
    page = tmp_path / "page.md"
    page.write_text(
        "# Two `[words]`, one\n\n[a](page.md#two-words-one) [b](#two) [c](none.md) `[d](x.md)` [e](https://x.org)\n"
    )
    assert ["#two", "none.md"] == broken(page)


def test_every_page_is_in_the_index() -> None:
    """`elasticflow guide` lists what is there, and nothing else; a line says more than the topic's name, and fits."""
    there = {path.stem for path in pages.GUIDE.glob("*.md")} - {"README"}
    assert there == set(pages.topics())
    assert [] == [topic for topic, about in pages.topics().items() if len(about.split()) < 4]
    column = 2 + max(map(len, pages.topics()))
    assert [] == [topic for topic, about in pages.topics().items() if column + len(about) > 80]


def test_the_wheel_takes_the_pages_along() -> None:
    """They lie in the package, which the wheel has as a whole."""
    wheel = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {"packages", "hooks"} == set(wheel)
    assert pages.GUIDE.is_relative_to(ROOT / "elasticflow")
    assert ["elasticflow"] == wheel["packages"]


def test_pages_begin_with_their_title_and_are_not_long() -> None:
    """One title, first; at most as many lines as one reads at once, but for references, which are looked up."""
    for topic in pages.topics():
        text = re.sub(r"^```.*?^```$", "", pages.text_of(topic), flags=re.MULTILINE | re.DOTALL)
        assert ["# "] == re.findall(r"^# ", text, re.MULTILINE), topic
        assert text.startswith("# "), topic
        if topic not in ("job-reference", "events"):
            assert pages.text_of(topic).count("\n") <= MOST_LINES, topic


def test_code_fits_a_terminal_of_80_columns() -> None:
    """Text is wrapped there, code must not be; the margin of a block takes two columns."""
    for topic in pages.topics():
        blocks = re.findall(r"^```\w*\n(.*?)^```$", pages.text_of(topic), re.MULTILINE | re.DOTALL)
        assert [] == [line for block in blocks for line in block.splitlines() if len(line) > 78], topic


def test_every_page_can_be_reached_from_the_readme() -> None:
    """README is the landing page: it leads to each page of the guide."""
    reached = links((ROOT / "README.md").read_text("utf-8"))
    assert [] == [topic for topic in pages.topics() if f"elasticflow/guide/{topic}.md" not in reached]


def test_a_word_is_found_under_its_heading() -> None:
    """Whatever its letters' case; a comment in an example is no heading."""
    found = [hit for hit in pages.search("BUDGET") if hit.topic == "restarts"]
    assert ("restarts", "The budget") in {(hit.topic, hit.section) for hit in found}
    assert all("budget" in hit.line.lower() for hit in found)
    assert [] == [hit for hit in pages.search("elasticflow") if hit.section.startswith("train.py: GPT")]
    assert [] == list(pages.search("no such word anywhere"))


@pytest.mark.parametrize(
    ("markdown", "shown"),
    [
        ("see [restarts](restarts.md#the-budget).", "see restarts (`guide restarts`)."),
        ("[\\[snapshots\\]](job-reference.md#snapshots)", "\\[snapshots\\] (`guide job-reference`)"),
        ("[a file](../../tests/x.md) and [a site](https://x.org)", "a file and [a site](https://x.org)"),
        ("![what it shows](tree.svg)", "*what it shows*"),
        ("```toml\n[a](b.md)\n```", "```toml\n[a](b.md)\n```"),
    ],
)
def test_a_terminal_follows_no_links(markdown: str, shown: str) -> None:
    """To another page: the command; to a file: its words; code is left as it is."""
    assert shown == pages.for_terminal(markdown)
