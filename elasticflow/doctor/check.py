"""The result of a check: what was checked, how it is, what that means and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job

Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        topic: Heading it stands under: "python", "torch", "machine", "network", "storage", "project".
        name: Subject of the check, in a word or two.
        verdict: Whether it is as it should be.
        fact: How it is.
        meaning: Consequence for a run; empty when all is well.
        remedy: Advice; empty when nothing has to be done.
    """

    topic: str
    name: str
    verdict: Verdict
    fact: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Needs:
    """Needs of the jobs that the machine is to run.

    Attributes:
        root: The project's root, or the folder to stand for it.
        workers: Training processes that one node starts.
        loaders: Loader processes of each worker; None: no job tells.
        job: The job; None: any.
        job_file: Its file; None without a job.
    """

    root: Path
    workers: int
    loaders: int | None = None
    job: Job | None = None
    job_file: Path | None = None

    @property
    def is_for_several_machines(self) -> bool:
        """True if the job may have more than one node."""
        return self.job is not None and self.job.nodes.max > 1


def ok(topic: str, name: str, fact: str) -> CheckResult:
    """Return a result that all is well."""
    return CheckResult(topic, name, "ok", fact)
