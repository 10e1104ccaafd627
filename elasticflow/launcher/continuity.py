"""Whether a run may go on with the job as it is now (floor 3)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from elasticflow.compiler.drift import Difference, compare
from elasticflow.compiler.materialize import TRAIN_PY, entry_point_is_edited, read_job
from elasticflow.compiler.resolved import job_from_json, job_to_json
from elasticflow.errors import DriftRefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.compiler.plan import LaunchPlan
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.catalog import Catalog
    from elasticflow.spec.job import Job


def earlier_job(folder: RunFolder, catalog: Catalog) -> Job | None:
    """Return the job of the run's newest launch here, else the one recorded under its snapshot URI, if any."""
    numbers = folder.launch_numbers()
    if numbers:
        return read_job(folder.launch(numbers[-1]))
    record = catalog.read_job_record()
    return None if record is None else job_from_json(record["job"])


def record_job(folder: RunFolder, catalog: Catalog, plan: LaunchPlan, job: Job) -> None:
    """Leave the job under the snapshot URI, for launches on machines that have no run folder; the first one stays."""
    record = {
        "format": 1,
        "run_id": folder.run_id,
        "digest": plan.job_digest,
        "job": job_to_json(job),
        "created": time.time(),
    }
    catalog.write_job_record(record)


def carried_entry_point(
    folder: RunFolder, catalog: Catalog, now: Job, warn: Callable[[str], None], *, accept_drift: bool
) -> str | None:
    """Return the train.py to carry forward, if one was edited by hand; None for a run that is new as well.

    Raises:
        DriftRefusedError: the run must not go on with the job as it is now.
    """
    before = earlier_job(folder, catalog)
    if before is None:
        return None
    differences = check_drift(folder, before, now, warn, accept_drift=accept_drift)
    return edited_entry_point(folder, differences, warn)


def check_drift(
    folder: RunFolder, before: Job, now: Job, warn: Callable[[str], None], *, accept_drift: bool
) -> list[Difference]:
    """Return what differs between the run's job and the one it is to go on with; each is said.

    Raises:
        DriftRefusedError: some difference corrupts, or changes the trajectory without consent.
    """
    differences = compare(before, now)
    for weight, remedy in (
        ("corrupting", "start a new run of the changed job: elasticflow run"),
        ("trajectory", "undo the change, or say that you want it: --accept-drift"),
    ):
        found = [d for d in differences if d.weight == weight]
        if found and not (weight == "trajectory" and accept_drift):
            raise DriftRefusedError(_told(folder, found, weight), remedy)
    for difference in differences:
        warn(f"{difference.key} was {difference.old!r}, is now {difference.new!r} ({difference.weight})")
    return differences


def edited_entry_point(
    folder: RunFolder, differences: Sequence[Difference], warn: Callable[[str], None]
) -> str | None:
    """Return the newest launch's train.py if it was edited by hand and still fits the job."""
    numbers = folder.launch_numbers()
    before = folder.launch(numbers[-1]) if numbers else None
    if before is None or not entry_point_is_edited(before):
        return None
    if differences:
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    return (before / TRAIN_PY).read_text(encoding="utf-8")


def _told(folder: RunFolder, differences: Sequence[Difference], weight: str) -> str:
    what = "would corrupt it" if weight == "corrupting" else "changes its trajectory"
    lines = [f"  {d.key}: was {d.old!r}, is now {d.new!r}" for d in differences]
    return "\n".join([f"run {folder.run_id} cannot go on: the job changed in a way that {what}", *lines])
