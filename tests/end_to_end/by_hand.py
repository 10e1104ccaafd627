"""What a job comes to undisturbed, trained by its compiled entry point alone: no command, no agent, no import of torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from elasticflow.compiler.launch_folder import launch_files, materialize
from elasticflow.compiler.plan.launch_plan import plan_job
from elasticflow.jobfile.load import require_job
from elasticflow.snapshots.store.catalog import Catalog
from elasticflow.storage.storage import Storage
from tests.end_to_end.harness import LIMIT_S, ROOT, tensors
from tests.servers import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.forked import ForkedPrograms


def undisturbed(
    job_file: Path,
    forked: ForkedPrograms,
    *,
    workers: int,
    sets: Sequence[str] = (),
    place: Path | None = None,
) -> dict[str, bytes]:
    """Return the bytes of every tensor of the last snapshot of *workers* processes, by name.

    They resume from the last snapshot at *place*, if there is one, and leave theirs there; None: a folder of their own.
    """
    folder = Path(tempfile.mkdtemp(dir=job_file.parent))
    place = place or folder / "snapshots"
    given = (*sets, f"nodes.nproc_per_node={workers}", f"snapshots.uri={place}")
    loaded = require_job(job_file, given)
    plan = plan_job(loaded.job, project_root=loaded.project_root, job_files=loaded.files)
    materialize(
        folder / "compiled",
        launch_files(plan, loaded.job, folder / "compiled", project_root=loaded.project_root),
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ELASTICFLOW")}
    environment |= {"PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": str(workers), "LOCAL_WORLD_SIZE": str(workers)}
    ranks = [
        forked.start(
            folder / "compiled" / "train.py",
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            cwd=loaded.project_root,
        )
        for rank in range(workers)
    ]
    for rank in ranks:
        assert rank.wait(LIMIT_S) == 0, rank.stderr.read_text()
    return tensors(Catalog(Storage(str(place)), "by-hand/"))
