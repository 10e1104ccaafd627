"""How many lines of a script change from rung to rung; that each of them trains is an end-to-end test's."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples/rungs"
NAMES = ("tutorial", "mingpt", "nanogpt")


def _changed(old: str, new: str) -> int:
    """Return how many lines of *new* that are not blank are no lines of *old*: changed ones and further ones."""
    lines = [(FOLDER / f"{name}.py").read_text().splitlines() for name in (old, new)]
    matcher = difflib.SequenceMatcher(None, lines[0], lines[1], autojunk=False)
    hunks = [
        new for tag, _, _, low, high in matcher.get_opcodes() if tag != "equal" for new in lines[1][low:high]
    ]
    return sum(1 for line in hunks if line.strip())


@pytest.mark.parametrize("name", NAMES)
def test_at_most_ten_lines_lead_to_rung_1(name: str) -> None:
    """What is deleted beside is what elasticflow does instead: a script gets shorter."""
    assert _changed(f"{name}_0", f"{name}_1") <= 10
    sizes = [len((FOLDER / f"{name}_{rung}.py").read_text().splitlines()) for rung in (0, 1)]
    assert sizes[1] < sizes[0] - 10


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_more_lead_to_the_same_bits(name: str) -> None:
    """Of the loop only the backward changes."""
    assert _changed(f"{name}_1", f"{name}_2") <= 5
