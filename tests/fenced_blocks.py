"""The fenced blocks of the project's pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

from elasticflow.guide.pages import GUIDE, topics

ROOT = Path(__file__).resolve().parents[1]
GUIDE_PAGES = [ROOT / "README.md", *(GUIDE / f"{topic}.md" for topic in topics())]
"""README and what it leads to, in the order in which they are read: they share one project and its runs."""
PAGES = [*GUIDE_PAGES, *sorted((ROOT / "examples").rglob("README.md"))]


class Block(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}:{self.language or 'none'}"


@cache
def blocks() -> tuple[Block, ...]:
    """Return every fenced block of every page."""
    found = []
    for page in PAGES:
        text = page.read_text() if page.exists() else ""
        for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            content = "".join(row.removeprefix(match[1]) for row in match[3].splitlines(keepends=True))
            found.append(Block(page, line, match[2].strip(), content))
    return tuple(found)


def commands(block: Block) -> list[str]:
    """Return the command lines of a bash or console block, continued lines joined."""
    text = block.text.replace("\\\n", " ")
    if block.language == "console":
        return [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    return [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def parts(line: str) -> list[list[str]]:
    """Return the argument lists of the programs that a command line starts, those in `$(...)` too."""
    inner = [argv for text in re.findall(r"\$\(([^()]*)\)", line) for argv in parts(text)]
    lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "SUBSTITUTED", line), posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= set("|&;"):
            found.append([])
        else:
            found[-1].append(token)
    without_variables = [_strip_variables(argv) for argv in found]
    return [*inner, *(argv for argv in without_variables if argv)]


def _strip_variables(argv: list[str]) -> list[str]:
    while argv and re.fullmatch(r"[A-Z_]+=.*", argv[0]):
        argv = argv[1:]
    return argv[1:] if argv[:1] == ["export"] else argv
