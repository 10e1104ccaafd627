"""LaunchPlan -> what the job file says to a script that calls `elasticflow.join`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.protocol.loop_settings import KeptSnapshots, LoopSettings, LoopSnapshots

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan


def loop_settings(plan: LaunchPlan, project_root: Path) -> LoopSettings:
    """Return what the job file says to a script that calls `elasticflow.join`, on a machine with its project there."""
    snapshots, keep = plan.snapshots, plan.snapshots.writer.keep
    uri = snapshots.uri
    if uri is not None and "://" not in uri:
        uri = str(project_root.absolute() / uri)
    limit = snapshots.writer.staging_limit
    script = plan.script
    assert script is not None, "a generated train.py has what the job file says"
    return LoopSettings(
        job=plan.job_name,
        digest=plan.job_digest,
        seed=plan.seed,
        snapshots=LoopSnapshots(
            uri=uri,
            every=snapshots.every,
            keep=KeptSnapshots(keep.last, keep.best, keep.every, keep.within),
            integrity=snapshots.writer.integrity,
            memory=snapshots.memory,
            staging_limit=limit,
            options=dict(snapshots.writer.options),
            ignore=script.ignore,
        ),
        log_every=script.log_every,
        log_level=plan.log_level,
        threads=None,
    )
