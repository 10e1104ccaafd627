"""A message that is tried out, of a job that does not run."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from elasticflow.notify.moments import Moment
from elasticflow.run_folder import RunFolder
from elasticflow.sinks.sink import RunFacts

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

RUN_ID = "test"


def facts_of(job: Job, project_root: Path) -> RunFacts:
    """Return the facts of a run of *job* that there is not."""
    folder = RunFolder.of(project_root, job.job.name, RUN_ID)
    return RunFacts(RUN_ID, job.job.name, folder.path.absolute(), project_root)


def moment() -> Moment:
    """Return what is told: that it is a test."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    return Moment(None, now, "is no run: this is a test of [notify], and this is how it would tell you")
