"""Facts from a run of a job that help to estimate its next run: samples, size of a snapshot, speed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.compiler.launch_folder import made_in
from elasticflow.compiler.plan.forecast import Known
from elasticflow.compiler.provenance.drift import compare_made, weighed_anew
from elasticflow.compiler.provenance.origins import Made, origins_now
from elasticflow.errors import LaunchFolderError
from elasticflow.observe.history import RunHistory, state_of
from elasticflow.observe.records import tail
from elasticflow.observe.runs import is_finished
from elasticflow.system.records import int_of, unix_time

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.compiler.plan.launch_plan import LaunchPlan
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.run_folder import RunFolder
    from elasticflow.system.records import Record

# Keys by kind of fact: facts about data, state or speed no longer hold once one of these keys has changed.
_OF_DATA = ("dataset.entry", "dataset.args", "dataset.mix", "dataset.shards")
_OF_STATE = (
    "model",
    "optimizer.entry",
    "optimizer.args",
    "lr_scheduler",
    "train.ema",
    "train.precision",
    "snapshots.include",
)
_OF_SPEED = (*_OF_DATA, *_OF_STATE, "dataset.global_batch_size", "train", "ddp")
# Exceptions: keys below them that change neither the size of the state nor the time of a step.
_NOT_OF_STATE = (
    *("optimizer.args.lr", "optimizer.args.weight_decay", "optimizer.args.eps", "optimizer.args.betas"),
    "lr_scheduler.args",
    "model.flops_per_sample",
)
_NOT_OF_SPEED = (*_NOT_OF_STATE, "train.epochs", "train.steps")


class RunFacts(NamedTuple):
    """Facts about a job that one of its runs measured.

    Attributes:
        drift: Changes since the run's newest launch; None if its record cannot be read.
        facts: Facts under the names in `Knowledge`.
        outdated: Names of facts that no longer hold, each with the key of the job file that changed.
    """

    run_id: str
    drift: list[Difference] | None
    facts: dict[str, Known]
    is_finished: bool
    outdated: dict[str, str]


def read_run_facts(run: RunFolder, job: Job, plan: LaunchPlan, project_root: Path) -> RunFacts:
    """Return the facts of *run*, which was launched before, for a run of *job* now."""
    history = RunHistory.read(run)
    facts, outdated = _facts(run, history), {}
    try:
        then = made_in(run.launch(run.launch_numbers()[-1]))
    except LaunchFolderError:
        return RunFacts(run.run_id, None, facts, is_finished(run), {})
    now = Made(job, origins_now(job, project_root, plan.job_files, "", then.origins))
    failed = (state_of(run).verdict or {}).get("class") == "user_error"
    drift = compare_made(then, now, after_user_error=failed)
    drift = weighed_anew(drift, has_snapshots=job.script is not None or history.snapshot is not None)
    changed = [difference.key for difference in drift]
    for names, keys, but in (
        (("samples",), _OF_DATA, ()),
        (("snapshot_bytes", "parameters"), _OF_STATE, _NOT_OF_STATE),
        (("step_s", "workers"), _OF_SPEED, _NOT_OF_SPEED),
    ):
        cause = next((key for key in changed if _is_under(key, keys) and not _is_under(key, but)), None)
        for name in names:
            if cause is not None and facts.pop(name, None) is not None:
                outdated[name] = cause
    return RunFacts(run.run_id, drift, facts, is_finished(run), outdated)


def _is_under(key: str, tables: tuple[str, ...]) -> bool:
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def _facts(run: RunFolder, history: RunHistory) -> dict[str, Known]:
    standbys = history.standbys_seen
    sizes = [each.num_bytes for each in history.snapshots if each.state == "committed" and each.num_bytes]
    facts = {
        "samples": history.samples,
        "parameters": history.parameters,
        "snapshot_bytes": sizes[-1] if sizes else None,
        "workers": None if history.group is None else history.group.world_size,
        "standby_bytes": None if standbys is None else standbys.memory_of_one,
        "standby_s": None if standbys is None else standbys.seconds,
        **history.compilation.facts(),
        "step_s": _step_s([line for line in tail(run.metrics) if "step" in line and "loss" in line]),
    }
    source = f"run {run.run_id}"
    return {name: Known(value, source) for name, value in facts.items() if value is not None}


def _step_s(steps: list[Record]) -> float | None:
    """Return the mean seconds from step to step in the newest generation of *steps*."""
    steps = [line for line in steps if line.get("generation") == steps[-1].get("generation")]
    if len(steps) < 2:
        return None
    seconds = (unix_time(steps[-1].get("time")) or 0.0) - (unix_time(steps[0].get("time")) or 0.0)
    count = int_of(steps[-1], "step") - int_of(steps[0], "step")
    return seconds / count if seconds > 0 and count > 0 else None
