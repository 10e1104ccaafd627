"""A machine joins a run by `--join` on loopback, and both come to the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.end_to_end import tiny_job
from tests.end_to_end.course import NodesCourse
from tests.end_to_end.harness import project_at

if TYPE_CHECKING:
    from pathlib import Path

    from tests.end_to_end.tiny_job import Reference

pytestmark = pytest.mark.integration


@pytest.mark.nightly
def test_machine_that_joined_knows_how_the_run_ended(tmp_path: Path, tiny_reference: Reference) -> None:
    """Its join costs one generation and no step; it ends with the run's exit code, though the store goes with the head."""
    with project_at(tmp_path / "project") as project:
        tiny_job.write_standard(project)
        course = NodesCourse(project, 0, pause_s=0.05)
        course.join()
        assert [] == [problem for done in course.end(tiny_reference.found) for problem in done.problems]
