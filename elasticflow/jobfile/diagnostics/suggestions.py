"""The name that was most likely meant, and the list of valid names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SHORT_MODULES = {
    "F": "torch.nn.functional", "nn": "torch.nn", "nn.functional": "torch.nn.functional", "optim": "torch.optim",
    "optim.lr_scheduler": "torch.optim.lr_scheduler", "lr_scheduler": "torch.optim.lr_scheduler",
}  # fmt: skip
"""Modules by the names that scripts give them."""


def nearest(word: str, words: Iterable[str], likeness: float = 0.6) -> list[str]:
    """Return the word that *word* was most likely meant to be; [] if all are less alike than *likeness* (0 to 1)."""
    import difflib  # most files hold no mistake

    words = list(words)
    if same := [each for each in words if each.lower() == word.lower()]:
        return same[:1]
    return difflib.get_close_matches(word, words, 1, likeness)


def is_table(value: object) -> bool:
    """Return whether a value is a table or an array of tables."""
    return isinstance(value, dict) or (isinstance(value, list) and bool(value) and isinstance(value[0], dict))


def listing(names: list[str], prefix: str = "") -> str | None:
    """Return the valid names as a shortened list; None if there are none."""
    if not names:
        return None
    shown = ", ".join(f"{prefix}{name}" for name in names[:8])
    return f"there are: {shown}{', ...' if len(names) > 8 else ''}"
