"""Decides whether a run may resume with the job, its code and the machine as they are now."""

from __future__ import annotations

import ast
import hashlib
import time
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.launch_folder import (
    TRAIN_PY,
    LaunchRecord,
    digest_as_written,
    job_record,
    newest_record,
    record_from,
)
from elasticflow.compiler.provenance.drift import compare_made, lines_of, weighed_anew
from elasticflow.compiler.provenance.origins import JOB_JSON, Made
from elasticflow.errors import DriftRefusedError, RecordError
from elasticflow.launcher.restarts.failure_classes import FAILURES
from elasticflow.system import records
from elasticflow.system.records import Damage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.run_folder import RunFolder
    from elasticflow.snapshots.store.catalog import Catalog

_REMEDIES = {
    "corrupting": "start a new run of the changed job: elasticflow run",
    "trajectory": "undo the change, or say that you want it: --accept-drift",
}
# The function that the last line of a generated train.py calls, now and in launches of earlier versions.
_MAIN_CALLS = {"program", "run"}


def made_before(
    folder: RunFolder, catalog: Catalog, warn: Callable[[str], None], *, accept_drift: bool = False
) -> Made | None:
    """Return the sources of the run's newest launch, made on any machine; None for a new run.

    JOB.json beside the snapshots tells of the newest launch on any machine; if that launch was made on this machine, its
    own folder tells more. Where the newest record is damaged, the next best record is taken, and *warn* is told.

    Raises:
        RecordError: no record of the run can be read, and drift is not accepted.
        OSError: the snapshot URI does not answer.
    """
    content = catalog.inspect_job_record()
    path = f"{catalog.storage.uri.rstrip('/')}/{catalog.prefix}JOB.json"
    beside = record_from(content, path) if isinstance(content, dict) else content
    newest, damages = newest_record(folder)
    if isinstance(beside, Damage):
        damages.insert(0, beside)
    elif beside is not None and not (newest and _is_of_one_launch(folder, newest, beside.made)):
        newest = beside if newest is None or beside.made.origins.launch_id else newest
    if newest is None and damages and not accept_drift:
        raise RecordError(
            f"nothing tells what run {folder.run_id} was made from: {'; '.join(map(str, damages))}",
            "put one of these files back; or, if the job is as it was, continue without comparing: --accept-drift",
        )
    instead = f"{newest.place} is used instead" if newest else "nothing is compared, as accepted"
    for damage in damages:
        warn(f"{damage}; {instead}")
    return None if newest is None else newest.made


def _is_of_one_launch(folder: RunFolder, record: LaunchRecord, beside: Made) -> bool:
    """Return whether *record*, the newest whole one of the run folder, tells of the launch that JOB.json tells of."""
    newest = folder.launch(folder.launch_numbers()[-1]) / JOB_JSON
    is_newest = record.place == str(newest)
    return is_newest and record.made.origins.launch_id == beside.origins.launch_id


def record_job(
    folder: RunFolder, catalog: Catalog, plan: LaunchPlan, made: Made, overrides: Sequence[str] = ()
) -> None:
    """Record the launch's sources beside the snapshots, for launches on machines that have no run folder."""
    before = catalog.read_job_record() or {}
    now = time.time()
    dates = {"created": before.get("created", now), "updated": now}
    catalog.write_job_record({"run_id": folder.run_id, **job_record(plan, made, overrides), **dates})


def last_state(folder: RunFolder) -> dict[str, Any]:
    """Return state.json as the last launch here left it; empty if there was none, or if it cannot be read."""
    state = records.read(folder.state)
    return state if isinstance(state, dict) else {}


def check_drift(
    folder: RunFolder,
    catalog: Catalog,
    before: Made,
    now: Made,
    warn: Callable[[str], None],
    *,
    accept_drift: bool,
) -> list[Difference]:
    """Return the differences between the run's sources and those it is to continue with; *warn* gets a table of them.

    Raises:
        DriftRefusedError: some difference corrupts, or changes the trajectory without consent.
        OSError: the snapshot URI does not answer.
    """
    differences = compare_made(before, now, after_user_error=_expects_changed_code(folder))
    if any(each.weight != "harmless" for each in differences):
        # A script may have checkpoints of its own; a snapshot that is damaged or set aside may be mended.
        is_kept = now.job.script is not None or any(catalog.scan()) or bool(catalog.quarantined())
        differences = weighed_anew(differences, has_snapshots=is_kept)
    weights = {difference.weight for difference in differences}
    lines = list(lines_of(differences))
    for weight, remedy in _REMEDIES.items():
        if weight in weights and not (weight == "trajectory" and accept_drift):
            title = f"run {folder.run_id} cannot continue with what changed since its last launch:"
            raise DriftRefusedError("\n".join([title, *lines]), remedy)
    if differences:
        consent = ", as accepted" if "trajectory" in weights else ""
        warn(
            "\n".join(
                [f"run {folder.run_id} continues with what changed since its last launch{consent}:", *lines]
            )
        )
    return differences


def _expects_changed_code(folder: RunFolder) -> bool:
    """Return whether the run's last launch ended with a failure after which the job's own code is mended."""
    verdict = last_state(folder).get("verdict")  # none: a first launch, or one that was killed
    if not isinstance(verdict, dict):
        return False
    return any(name == verdict.get("class") and row.excuses_drift for name, row in FAILURES.items())


def edited_entry_point(
    folder: RunFolder, differences: Sequence[Difference], warn: Callable[[str], None]
) -> str | None:
    """Return the newest launch's train.py if it was edited by hand and still fits the job.

    Where it is not known what was written, the file counts as edited: training continues with what it has trained with.

    Raises:
        RecordError: the file is no program that trains, perhaps by mistake.
    """
    numbers = folder.launch_numbers()
    if not numbers:
        return None
    before = folder.launch(numbers[-1])
    path = before / TRAIN_PY
    text = records.read_text(path)
    if text is None:
        warn(f"{path} is absent; it is made anew from the job")
        return None
    if not isinstance(text, Damage):
        written = digest_as_written(before)
        if hashlib.sha256(text.encode()).hexdigest() == written:
            return None
        if isinstance(written, Damage):
            warn(f"{written}; whether train.py was edited is not known, so it is used as it is")
    problem = text.why if isinstance(text, Damage) else _problem_of(text)
    if problem is not None:
        raise RecordError(
            f"{path} {problem}",
            "mend it; or remove it, and the same command makes it anew from the job",
        )
    assert isinstance(text, str)
    if any(difference.is_of_the_job for difference in differences):
        warn(f"the job changed, so train.py is made anew; the edited one stays in {before}")
        return None
    return text


def _problem_of(text: str) -> str | None:
    """Return why *text* is no program that trains, as the rest of a sentence; None if it may be one."""
    try:
        program = ast.parse(text)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        return f"is no Python: {getattr(error, 'msg', error)} in line {getattr(error, 'lineno', None) or 1}"
    except RecursionError:
        return "is no Python: nested too deeply"
    calls = (node.func for node in ast.walk(program) if isinstance(node, ast.Call))
    if any(getattr(call, "attr", getattr(call, "id", "")) in _MAIN_CALLS for call in calls):
        return None
    return "does not call worker.program, so it trains nothing"
