"""A machine joins a run by `--join` on loopback, and both come to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.campaign import tiny_job
from tests.campaign.launching import NodesCourse
from tests.end_to_end.harness import project_at

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration

STEPS = 400


def test_machine_that_joined_knows_how_the_run_ended(tmp_path: Path) -> None:
    """Its join costs one generation and no step; it ends with the run's exit code, though the store goes with the head."""
    with project_at(tmp_path / "project") as project:
        tiny_job.write(project, STEPS, 10, 100)
        expected = tiny_job.undisturbed(project, STEPS)
        course = NodesCourse(project, 0)
        course.join()
        assert [] == [problem for done in course.end(expected) for problem in done.problems]
