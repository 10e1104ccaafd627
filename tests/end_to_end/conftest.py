"""Fixtures of the end-to-end tests; what they give is in harness.py."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.harness import ROOT, Project, wait_gone

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
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "trial"\nversion = "0"\n')
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    made = Project(tmp_path)
    yield made
    for running in made.started:
        if running.process.poll() is None:
            os.kill(running.process.pid, signal.SIGKILL)
            running.process.wait()
    left = [p for running in made.started for p in wait_gone(running.run.run_id)]
    assert left == [], f"left behind: {left}"
