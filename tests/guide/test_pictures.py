"""The pictures of README and the guide: well formed, with texts for those who do not see them, readable on light and on dark pages."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from tests.fenced_blocks import GUIDE_PAGES, ROOT
from tests.guide.kill_transcript import BLANK, KILLS, PICTURE, Cell, Kill, Screen, lines_of, svg

if TYPE_CHECKING:
    from pathlib import Path

PICTURES = sorted((ROOT / "elasticflow" / "guide" / "pictures").glob("*.svg"))
NAME = "{http://www.w3.org/2000/svg}"
LEAST_CONTRAST = 4.5
"""Of letters and what they stand on (WCAG 2, level AA)."""


def told(picture: str) -> str:
    """Return the description of a picture."""
    return str(ET.fromstring(picture).findtext(f"{NAME}desc"))


def test_a_page_shows_every_picture() -> None:
    """README or a page of the guide; none is left over, and each has a text instead."""
    shown = [
        picture
        for page in GUIDE_PAGES
        for picture in re.findall(
            r"!\[([^\]]+)\]\((?:elasticflow/guide/)?pictures/([^)]+)\)", page.read_text()
        )
    ]
    assert [path.name for path in PICTURES] == sorted(name for _, name in shown)
    assert all(len(text) > 80 for text, _ in shown)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_needs_nothing_else_and_tells_what_it_shows(path: Path) -> None:
    """Well formed, a title and a description, no script, nothing from elsewhere."""
    text = path.read_text("utf-8")
    picture = ET.fromstring(text)
    assert picture.get("role") == "img"
    assert picture.findtext(f"{NAME}title")
    assert len(told(text)) > 300
    assert "<script" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}


def luminance(colour: str) -> float:
    """Return how bright a colour is (WCAG 2)."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21 (WCAG 2)."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize(
    ("path", "is_dark"),
    list(product(PICTURES, [False, True])),
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_letters_can_be_read(path: Path, is_dark: bool) -> None:
    """Every colour of letters on every colour that letters may stand on, on light pages and on dark ones."""
    light, _, dark = path.read_text("utf-8").partition("prefers-color-scheme: dark")
    rules = dict(re.findall(r"([.\w]+) \{ [^}]*?fill: (#[0-9a-f]{6})", light))
    if is_dark:
        rules |= dict(re.findall(r"([.\w]+) \{ [^}]*?fill: (#[0-9a-f]{6})", dark))
    letters = {name for name in rules if re.fullmatch(r"\.plain|\.dim|\.c\d+|text|\.red|\.small", name)}
    grounds = set(rules) - letters - {".end", ".eye", ".drop", ".dot", ".olddot"}
    assert letters
    assert ".back" in grounds
    unreadable = [
        (name, ground)
        for name, ground in product(sorted(letters), sorted(grounds))
        # Red stands between the boxes only.
        if contrast(rules[name], rules[ground]) < LEAST_CONTRAST
        and not (name == ".red" and ground != ".back")
    ]
    assert [] == unreadable


def test_the_transcript_tells_of_both_kills_and_of_the_end() -> None:
    """In their order: each kill, what the run said to it, that it continued, that it finished."""
    lines = iter(told(PICTURE.read_text("utf-8")).splitlines())
    for words in (
        "$ elasticflow run jobs/mnist.toml",
        "# rank 1, from another terminal",
        "✗ worker killed",
        "✓ resuming",
        "# the agent, from another terminal",
        "✗ node lost",
        "✓ resuming",
        "✓ finished",
    ):
        assert any(words in line for line in lines), words


def shown(screen: Screen) -> list[str]:
    """Return the lines of a screen, without spaces at their ends."""
    return ["".join(cell.character for cell in line).rstrip() for line in screen.lines]


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        ("one\r\ntwo", ["one", "two"]),
        ("\r\x1b[Kstep 1\r\x1b[Kstep 22\r\x1b[Kdone\r\n", ["done", ""]),
        ("long line\rshort", ["shortline"]),
        ("a\r\nb\r\nc\x1b[2A\r\x1b[JX", ["X"]),
        ("a\r\nb\x1b[1A\r\x1b[2KX\x1b[1B\rY", ["X", "Y"]),
        ("\x1b[?25lhidden cursor\x1b[?25h", ["hidden cursor"]),
    ],
)
def test_the_screen_is_what_a_terminal_shows(written: str, lines: list[str]) -> None:
    """Lines that were written over or taken away are gone."""
    screen = Screen()
    screen.feed(written)
    assert lines == shown(screen)


def test_a_code_that_is_not_known_is_an_error() -> None:
    """Better no picture than a wrong one."""
    with pytest.raises(ValueError, match="5;1H"):
        Screen().feed("\x1b[5;1H")


def test_colours_are_kept_until_they_end() -> None:
    """Bold and red, then plain."""
    screen = Screen()
    screen.feed("\x1b[1m\x1b[31mx\x1b[0my")
    assert [Cell("x", frozenset({1, 31})), Cell("y", frozenset())] == screen.lines[0]


def test_the_picture_has_each_kill_before_its_answer_and_no_place_of_the_machine() -> None:
    """Pids in the order of the kills; lines about data and the run folder are left out; signs of XML are no XML."""
    screen = Screen()
    screen.feed("  0:01  · data  train: 3 samples of /home/x\r\n  0:02  ✗ <worker>\r\n  0:03  ✗ node\r\n")
    screen.feed(f"{'':27}runs/mnist/1\r\n")
    lines = lines_of(screen, [11, 22])
    text = ["".join(cell.character for cell in line).split() for line in lines]
    assert [words[:3] for words in text[1:]] == [
        ["$", "kill", "-9"],
        ["0:02", "✗", "<worker>"],
        ["$", "kill", "-9"],
        ["0:03", "✗", "node"],
    ]
    assert [(words[3], " ".join(words[5:7]).strip(",")) for words in text[1::2]] == [
        (pid, kill.whom) for pid, kill in zip(("11", "22"), KILLS, strict=True)
    ]
    picture = svg([*lines, [BLANK]])
    assert "<worker>" in told(picture)
    assert [Kill(50, "rank 1").whom, "the agent"] == [kill.whom for kill in KILLS]


@pytest.mark.timeout(300)
@pytest.mark.campaign
def test_the_transcript_can_be_made_again(tmp_path: Path) -> None:
    """The script kills, compares the weights, and writes a picture."""
    made = tmp_path / "kill.svg"
    subprocess.run([sys.executable, "tests/guide/kill_transcript.py", "-o", str(made)], cwd=ROOT, check=True)
    assert "✓ finished" in told(made.read_text("utf-8"))
