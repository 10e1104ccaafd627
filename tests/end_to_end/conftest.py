"""Fixtures of the end-to-end tests; what they give is in harness.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.harness import Project, project_at

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts real processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("e2e")


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """Yield a project with the example job; afterwards nothing of its launches is alive."""
    with project_at(tmp_path) as made:
        yield made
