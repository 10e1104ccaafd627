"""A run folder as the supervisor leaves it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.observe.hand_made import make_run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run that was interrupted at step 47, with two generations of logs."""
    return make_run(tmp_path)
