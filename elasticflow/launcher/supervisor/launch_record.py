"""One start of a run, as its supervisor receives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.launcher.rendezvous.invitation import Invitation, versions
from elasticflow.launcher.supervisor.scale_schedule import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.launcher.journal.post_mortem import Ending
    from elasticflow.launcher.journal.run_lock import RunLock
    from elasticflow.launcher.rendezvous.leadership import LaunchStore
    from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.format.writer_config import WriterStart
    from elasticflow.snapshots.store.catalog import Catalog


@dataclass(frozen=True)
class Launch:
    """One start of a run; its launch folder is written, its run is locked by the caller.

    Attributes:
        launch_id: Tells the launch from every other, on any machine.
        node_rank: Rank of this machine's first node, where the rendezvous is static.
        sources: Digests of the job's own code, by path from the project's root.
        lost: The end of the launch before, if its supervisor could not record it.
        follower: Command of the process that follows the run's files (`follower.py`); empty: there is none.
        accept_drift: A script's loop may differ from the run's launch before in ways that change the trajectory.
    """

    plan: LaunchPlan
    job: Job
    folder: RunFolder
    number: int
    launch_id: str
    project_root: Path
    catalog: Catalog
    writer: WriterStart
    store: LaunchStore
    lock: RunLock
    is_resumed: bool = False
    is_edited: bool = False
    scale: tuple[ScaleChange, ...] = ALONE
    node_rank: int = 0
    drift: tuple[Difference, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    lost: Ending | None = None
    follower: tuple[str, ...] = ()
    accept_drift: bool = False

    def invitation(self) -> Invitation:
        """Return the invitation to other machines that take part."""
        entry_point = self.folder.launch(self.number) / "train.py"
        return Invitation(
            run_id=self.folder.run_id,
            job=job_to_json(self.job),
            entry_point="" if self.plan.script is not None else entry_point.read_text(encoding="utf-8"),
            versions=versions(),
            launch_id=self.launch_id,
            sources=dict(self.sources),
        )
