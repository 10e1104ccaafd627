"""One start of a run, as it is requested, and as its supervisor receives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticflow.compiler.provenance.job_json import job_to_json
from elasticflow.launcher.rendezvous.invitation import Invitation, versions
from elasticflow.launcher.supervisor.scale_schedule import ALONE

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.compiler.provenance.origins import Origins
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.launcher.journal.run_lock import RunLock
    from elasticflow.launcher.rendezvous.leadership import LaunchStore
    from elasticflow.launcher.restarts.restart_ledger import RestartLedger
    from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.client.writer_process import WriterStart
    from elasticflow.snapshots.store.catalog import Catalog


@dataclass(frozen=True)
class Request:
    """A launch to be made.

    Attributes:
        folder: The run folder; it need not exist.
        accept_drift: Differences that change the trajectory are wanted; those of a script's loop, too.
        node_rank: This machine's place among the nodes, where the rendezvous is static.
        case: The case of the job file's [matrix] that the job is.
        follower: Command of the process that follows the run's files (`follower.py`); empty: there is none.
    """

    job: Job
    files: tuple[Path, ...]
    overrides: tuple[str, ...]
    project_root: Path
    folder: RunFolder
    accept_drift: bool = False
    scale: tuple[ScaleChange, ...] = ALONE
    node_rank: int | None = None
    case: str | None = None
    follower: tuple[str, ...] = ()


@dataclass(frozen=True)
class Launch:
    """One start of a run; its launch folder is written, its run is locked by the caller."""

    request: Request
    plan: LaunchPlan
    number: int
    origins: Origins
    catalog: Catalog
    writer: WriterStart
    store: LaunchStore
    lock: RunLock
    is_resumed: bool
    is_edited: bool
    drift: tuple[Difference, ...]
    ledger: RestartLedger

    @property
    def launch_folder(self) -> Path:
        """Folder of the files of this launch."""
        return self.request.folder.launch(self.number)

    def invitation(self) -> Invitation:
        """Return the invitation to other machines that take part."""
        return Invitation(
            run_id=self.request.folder.run_id,
            job=job_to_json(self.request.job),
            entry_point=""
            if self.plan.script is not None
            else (self.launch_folder / "train.py").read_text(encoding="utf-8"),
            versions=versions(),
            launch_id=self.origins.launch_id,
            sources=self.origins.code,
        )
