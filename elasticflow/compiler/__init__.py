"""Job in, launch folder out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.origins import Origins
    from elasticflow.jobfile.tables.job import Job

__all__ = ["CompiledJob", "compile_job"]


@dataclass(frozen=True)
class CompiledJob:
    """A job and the plan of its launch; nothing is written yet.

    Attributes:
        overrides: The `--set` values the job was resolved with.
    """

    job: Job
    plan: LaunchPlan
    project_root: Path
    overrides: tuple[str, ...]

    def write(
        self,
        folder: Path,
        *,
        force: bool = False,
        entry_point: str | None = None,
        origins: Origins | None = None,
        drift: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Write a launch folder that `elasticflow run`, torchrun or python can start; arguments as for `materialize`.

        Raises:
            LaunchFolderError: the folder cannot be written, or holds edited or foreign files.
            JobRefusedError: an argument of the job has no Python literal.
        """
        from elasticflow.compiler.launch_folder.materialize import materialize

        materialize(
            self.plan,
            self.job,
            folder,
            project_root=self.project_root,
            overrides=self.overrides,
            force=force,
            entry_point=entry_point,
            origins=origins,
            drift=drift,
        )


def compile_job(
    job: Job,
    files: Sequence[Path],
    project_root: Path,
    overrides: Sequence[str] = (),
    case: str | None = None,
) -> CompiledJob:
    """Return a job with the plan of its launch, which `elasticflow plan -o` writes and `run` launches.

    Args:
        overrides: `key=value` texts that won over the file.
    """
    from elasticflow.compiler.plan.launch_plan import plan_job

    plan = plan_job(job, project_root=project_root, job_files=files, case=case)
    return CompiledJob(job, plan, project_root, tuple(overrides))
