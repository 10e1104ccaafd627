"""Results of checks (state, consequence and remedy), and the needs that they are checked against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        topic: Heading above the result: "python", "torch", "machine", "network", "storage", "project".
        name: Subject of the check, in a word or two.
        meaning: Consequence for a run; empty when all is well.
        remedy: Advice; empty when no action is needed.
    """

    topic: str
    name: str
    verdict: Literal["ok", "warning", "problem"]
    fact: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Needs:
    """Needs of the jobs that the machine is to run.

    Attributes:
        root: The project's root, or a folder in its place.
        workers: Training processes that one node starts.
        loaders: Loader processes of each worker; None: unknown without a job.
        job: The job to run; None: any job.
        job_file: File of the job; None without a job.
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


class Topic(NamedTuple):
    """A heading, and its results."""

    title: str

    def ok(self, name: str, fact: str) -> CheckResult:
        """Return the result of a check that has found nothing wrong."""
        return CheckResult(self.title, name, "ok", fact)

    def warning(self, name: str, fact: str, meaning: str, remedy: str = "") -> CheckResult:
        """Return a finding that makes runs worse."""
        return CheckResult(self.title, name, "warning", fact, meaning, remedy)

    def problem(self, name: str, fact: str, meaning: str, remedy: str) -> CheckResult:
        """Return a finding that makes runs fail."""
        return CheckResult(self.title, name, "problem", fact, meaning, remedy)
