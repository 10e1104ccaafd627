"""Small files in which the kernel tells something, of control groups for instance."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def text_in(path: Path) -> str:
    """Return the content without the blanks around it; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def number_in(path: Path) -> int | None:
    """Return the number that the file holds; None if it holds something else, or cannot be read."""
    text = text_in(path)
    return int(text) if text.isdecimal() else None
