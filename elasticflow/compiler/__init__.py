"""Job in, launch folder out."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.jobfile.load import LoadedJob

__all__ = ["Compiled", "compile_job"]

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


class Compiled(NamedTuple):
    """What a job file became on its way to a launch folder."""

    loaded: LoadedJob
    plan: LaunchPlan


def compile_job(
    path: Path,
    folder: Path,
    *,
    overrides: Sequence[str] = (),
    case: str | None = None,
    environment: Mapping[str, str] = _NO_VARIABLES,
    force: bool = False,
) -> Compiled:
    """Turn a job file into a launch folder that `elasticflow run`, torchrun or python can start.

    Args:
        path: The job file.
        folder: Where the launch folder's files go.
        overrides: `key=value` texts that win over the file.
        case: Which case of the file's [matrix].
        environment: Variables that `${env:NAME}` names.
        force: Replace files in *folder* that were edited or are not ours.

    Raises:
        JobRefusedError: the job has errors; the message shows them all.
        LaunchFolderError: the folder cannot be written, or holds edited or foreign files.
    """
    from elasticflow.compiler.launch_folder.materialize import materialize
    from elasticflow.compiler.plan.launch_plan import plan_job
    from elasticflow.jobfile.load import require_job

    loaded = require_job(path, overrides, case=case, environment=environment)
    assert loaded.job is not None  # else it would have raised
    root = loaded.project_root
    plan = plan_job(loaded.job, project_root=root, job_files=loaded.files, case=case)
    materialize(plan, loaded.job, folder, project_root=root, overrides=overrides, force=force)
    return Compiled(loaded, plan)
