"""What a launch tells another machine that is to take part in it."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import elasticflow
from elasticflow.compiler.drift.compare import compare
from elasticflow.compiler.inputs.job_json import job_from_json
from elasticflow.compiler.inputs.provenance import digest_of
from elasticflow.errors import NodeRefusedError

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.jobfile.tables.job import Job


@dataclass(frozen=True)
class Invitation:
    """Read by a machine that joins; holds no secret: each machine has its own.

    Attributes:
        run_id: The run's.
        job: The resolved job, as job.json has it.
        entry_point: Text of train.py, which may have been edited by hand.
        versions: Of what must be the same on all nodes, by name.
        sources: SHA-256 of the job's own code, by path from the project's root.
    """

    run_id: str
    job: dict[str, Any]
    entry_point: str
    versions: dict[str, str]
    sources: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Return the form that is sent."""
        return json.dumps(asdict(self))

    def check(self, job: Job, project_root: Path) -> None:
        """Return if a machine with *job*, its code under *project_root*, may take part.

        Raises:
            NodeRefusedError: it would train something else, or with other code.
        """
        here = versions()
        for name, there in self.versions.items():
            if here.get(name) != there:
                raise NodeRefusedError(
                    f"the run uses {name} {there}, this machine has {here.get(name)}",
                    f"install {name} {there} here",
                )
        differences = [d for d in compare(job_from_json(self.job), job) if d.weight != "harmless"]
        if differences:
            told = "; ".join(f"{d.key} is {d.old!r} there, {d.new!r} here" for d in differences)
            raise NodeRefusedError(
                f"the job file here is not the run's: {told}",
                "check the same commit out on all machines, and give the same --set to all",
            )
        other = [name for name, digest in self.sources.items() if digest_of(project_root / name) != digest]
        if other:
            raise NodeRefusedError(
                f"the job's code here is not the run's: {', '.join(other)}",
                "check the same commit out on all machines, with the same changes",
            )


def versions() -> dict[str, str]:
    """Return the versions that all nodes of a run have in common."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return {"elasticflow": elasticflow.__version__, "torch": version("torch"), "python": python}
