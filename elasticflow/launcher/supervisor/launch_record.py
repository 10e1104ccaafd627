"""One start of a run: what a supervisor is given."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.inputs.job_json import job_to_json
from elasticflow.launcher.agent.agent_process import build_agent_process
from elasticflow.launcher.rendezvous.invitation import Invitation, versions
from elasticflow.launcher.restarts.restart_ledger import CLAIMED_FAILURES
from elasticflow.launcher.supervisor.scale_schedule import ALONE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from elasticflow.compiler.drift.compare import Difference
    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.launcher.agent.agent_process import AgentProcess
    from elasticflow.launcher.journal.post_mortem import Ending
    from elasticflow.launcher.rendezvous.leadership import LaunchStore
    from elasticflow.launcher.restarts.restart_ledger import RestartLedger
    from elasticflow.launcher.supervisor.scale_schedule import ScaleChange
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.format.writer_config import WriterStart
    from elasticflow.snapshots.store.catalog import Catalog


@dataclass(frozen=True)
class Launch:
    """One start of a run; its launch folder is written, its run is locked by the caller.

    Attributes:
        plan: What was written to plan.json.
        job: The resolved job.
        folder: The run folder.
        number: Number of the launch, from 1.
        project_root: Where the job's own code is found.
        catalog: The run's snapshots and generations.
        writer: What each node's snapshot writer is started with.
        store: The control store of its processes.
        is_resumed: The run existed before this launch.
        is_edited: train.py was edited by hand.
        scale: How many nodes this machine plays from when on.
        node_rank: Of this machine's first node, where the rendezvous is static.
        drift: What differs from the run's launch before.
        sources: Digests of the job's own code, by path from the project's root.
        lost: How the launch before ended, if its supervisor could not say so.
    """

    plan: LaunchPlan
    job: Job
    folder: RunFolder
    number: int
    project_root: Path
    catalog: Catalog
    writer: WriterStart
    store: LaunchStore
    is_resumed: bool = False
    is_edited: bool = False
    scale: tuple[ScaleChange, ...] = ALONE
    node_rank: int = 0
    drift: tuple[Difference, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    lost: Ending | None = None

    def agent(self, node: str) -> AgentProcess:
        """Return the agent of *node*, a node of this machine, not yet started."""
        return build_agent_process(
            self.plan,
            self.folder,
            self.folder.launch(self.number),
            node,
            self.store.address,
            self.project_root,
            self.writer,
            # Nodes of this machine are called n0, n1 and so on (`local_agents.py`).
            self.node_rank + int(node[1:]) if self.plan.rdzv_backend == "static" else None,
        )

    def invitation(self) -> Invitation:
        """Return what another machine has to know to take part."""
        entry_point = self.folder.launch(self.number) / "train.py"
        return Invitation(
            run_id=self.folder.run_id,
            job=job_to_json(self.job),
            entry_point=entry_point.read_text(encoding="utf-8"),
            versions=versions(),
            sources=dict(self.sources),
        )

    def claim(
        self, reason: str, last: int = 0, nodes: tuple[str, ...] = (), ledger: RestartLedger | None = None
    ) -> int | None:
        """Return the next generation's number, claimed at the snapshot URI: no other launch can have it.

        None if one has claimed a generation after *last*, the one this launch claimed last (0: none yet). The claim
        holds the failures since then that *ledger* has: those of an earlier launch, too, before its first one.
        """
        claim: dict[str, Any] = {
            "run_id": self.folder.run_id,
            "launch": self.number,
            "reason": reason,
            "nodes": nodes,
        }
        claim |= {"host": socket.gethostname(), "pid": os.getpid()}
        if ledger is not None:
            claim[CLAIMED_FAILURES] = ledger.since(last or self.catalog.newest_generation())
        if last == 0:
            return self.catalog.claim_generation(claim)
        return last + 1 if self.catalog.claim_after(last, claim) else None
