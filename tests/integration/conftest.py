"""Projects with the example job, for runs whose snapshots lie on real servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end.harness import Project, copy_examples, wait_gone

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def projects(tmp_path: Path) -> Iterator[Callable[[str], Project]]:
    """Make projects with the example job; afterwards nothing of their launches is alive."""
    made: list[Project] = []

    def make(name: str) -> Project:
        root = tmp_path / name
        root.mkdir()
        (root / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "0"\n')
        copy_examples(root)
        made.append(Project(root))
        return made[-1]

    yield make
    started = [running for project in made for running in project.started]
    for running in started:
        running.process.kill()
        running.process.wait()
    left = [process for running in started for process in wait_gone(running.run.run_id)]
    assert left == [], f"left behind: {left}"
