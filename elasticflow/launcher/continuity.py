"""Whether a run may go on with the job, its code and the machine as they are now (floor 3)."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from elasticflow.compiler import drift_table
from elasticflow.compiler.materialize import TRAIN_PY, entry_point_is_edited
from elasticflow.compiler.origin_drift import compare_made
from elasticflow.compiler.origins import Made, made_from, made_in
from elasticflow.compiler.resolved import job_to_json
from elasticflow.errors import DriftRefusedError, StorageError
from elasticflow.launcher.supervisor.ledger import Ledger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.compiler.drift import Difference
    from elasticflow.compiler.plan import LaunchPlan
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.catalog import Catalog

_REMEDIES = {
    "corrupting": "start a new run of the changed job: elasticflow run",
    "trajectory": "undo the change, or say that you want it: --accept-drift",
}


def made_before(folder: RunFolder, catalog: Catalog) -> Made | None:
    """Return what the run's newest launch was made from, on whatever machine; None for a run that is new.

    JOB.json beside the snapshots tells the newest launch anywhere; if that is the newest one here, its own folder tells
    more.

    Raises:
        LaunchFolderError: the record of the newest launch here cannot be read.
        StorageError: JOB.json cannot be read.
    """
    numbers = folder.launch_numbers()
    here = made_in(folder.launch(numbers[-1])) if numbers else None
    record = catalog.read_job_record()
    if record is None or (here is not None and not record.get("launch_id")):
        return here
    try:
        there = made_from(record)
    except (KeyError, TypeError, ValueError) as error:
        raise StorageError(
            f"JOB.json at {catalog.storage.uri} is not what this version writes: {error}",
            "go on with the version of elasticflow that began the run",
        ) from error
    is_ours = here is not None and here.origins.launch_id == there.origins.launch_id
    return here if is_ours else there


def record_job(folder: RunFolder, catalog: Catalog, plan: LaunchPlan, made: Made) -> None:
    """Leave what the launch is made from beside the snapshots, for launches on machines that have no run folder."""
    before = catalog.read_job_record() or {}
    now = time.time()
    record = {
        "format": 1,
        "run_id": folder.run_id,
        "digest": plan.job_digest,
        "job": job_to_json(made.job),
        "created": before.get("created", now),
        "updated": now,
        **made.origins.to_json(),
    }
    catalog.write_job_record(record)


def take_in_failures(folder: RunFolder, catalog: Catalog) -> None:
    """Have the run folder's ledger hold what other machines charged to the budget since it was last written."""
    known = int(_last_state(folder).get("generation") or 0)
    Ledger(folder.ledger).take_in(catalog.generations(after=known).values())


def _last_state(folder: RunFolder) -> dict[str, Any]:
    """Return state.json as the last launch here left it; empty if there was none, or if it cannot be read."""
    try:
        state = json.loads(folder.state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def check_drift(
    folder: RunFolder, before: Made, now: Made, warn: Callable[[str], None], *, accept_drift: bool
) -> list[Difference]:
    """Return what differs between what the run was made from and what it is to go on with; a table of it is said.

    Raises:
        DriftRefusedError: some difference corrupts, or changes the trajectory without consent.
    """
    differences = compare_made(before, now, after_user_error=_ended_with_user_error(folder))
    weights = {each.weight for each in differences}
    lines = list(drift_table.lines_of(differences))
    for weight, remedy in _REMEDIES.items():
        if weight in weights and not (weight == "trajectory" and accept_drift):
            head = f"run {folder.run_id} cannot go on with what changed since its last launch:"
            raise DriftRefusedError("\n".join([head, *lines]), remedy)
    if differences:
        consent = ", as accepted" if "trajectory" in weights else ""
        warn(
            "\n".join(
                [f"run {folder.run_id} goes on with what changed since its last launch{consent}:", *lines]
            )
        )
    return differences


def edited_entry_point(
    folder: RunFolder, differences: Sequence[Difference], warn: Callable[[str], None]
) -> str | None:
    """Return the newest launch's train.py if it was edited by hand and still fits the job."""
    numbers = folder.launch_numbers()
    before = folder.launch(numbers[-1]) if numbers else None
    if before is None or not entry_point_is_edited(before):
        return None
    if any(each.is_of_the_job for each in differences):
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    return (before / TRAIN_PY).read_text(encoding="utf-8")


def _ended_with_user_error(folder: RunFolder) -> bool:
    verdict = _last_state(folder).get("verdict") or {}  # none: a first launch, or one that was killed
    return bool(verdict.get("class") == "user_error")
