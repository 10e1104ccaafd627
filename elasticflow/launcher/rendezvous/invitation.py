"""The invitation of a launch to another machine that is to take part."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.provenance.drift import compare
from elasticflow.compiler.provenance.job_json import job_from_json
from elasticflow.compiler.provenance.origins import digest_of
from elasticflow.errors import NodeRefusedError
from elasticflow.system.installation import VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


@dataclass(frozen=True)
class Invitation:
    """The facts that a joining machine has to know; no secrets: each machine has its own.

    Attributes:
        job: The resolved job, as job.json has it.
        entry_point: Text of train.py, which may have been edited by hand.
        versions: Result of `versions` on the machine that leads.
        launch_id: Id of the launch, which stands beside the snapshots and in the launch's folder.
        sources: SHA-256 of each file of the job's own code, by path from the project's root.
    """

    run_id: str
    job: dict[str, Any]
    entry_point: str
    versions: dict[str, str]
    launch_id: str = ""
    sources: dict[str, str] = field(default_factory=dict)

    def check(self, job: Job, project_root: Path) -> None:
        """Raise NodeRefusedError if this machine, with *job* and its code under *project_root*, would train something else."""
        own_versions = versions()
        for name, version_there in self.versions.items():
            if (own := own_versions.get(name)) != version_there:
                raise NodeRefusedError(
                    f"the run uses {name} {version_there}, this machine has {own}",
                    f"install {name} {version_there} here",
                )
        differences = [d for d in compare(job_from_json(self.job), job) if d.weight != "harmless"]
        if differences:
            listed = "; ".join(f"{d.key} is {d.old!r} there, {d.new!r} here" for d in differences)
            raise NodeRefusedError(
                f"the job file here is not the run's: {listed}",
                "check the same commit out on all machines, and give the same --set to all",
            )
        changed = [name for name, digest in self.sources.items() if digest_of(project_root / name) != digest]
        if changed:
            raise NodeRefusedError(
                f"the job's code here is not the run's: {', '.join(changed)}",
                "check the same commit out on all machines, with the same changes",
            )


def versions() -> dict[str, str]:
    """Return the versions, by name, that must be the same on all nodes of a run."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"elasticflow": VERSION, "torch": version("torch"), "python": python}
