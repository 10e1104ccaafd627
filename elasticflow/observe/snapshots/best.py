"""The metric that ranks a run's snapshots, and steps with a better value than any snapshot."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from elasticflow.observe import records
from elasticflow.system.records import float_of, int_of

if TYPE_CHECKING:
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.observe.snapshots.locate import SnapshotSource
    from elasticflow.observe.snapshots.rows import SnapshotRow


class BetterStep(NamedTuple):
    """A step whose evaluation gave a better value than a snapshot has.

    Attributes:
        step: Finished steps.
        value: Value of the metric that ranks snapshots.
    """

    step: int
    value: float


def ranking_metric(job: Job | None) -> str | None:
    """Return the metric in `evaluation.best` by its name in metrics.jsonl: `accuracy`, `val.loss`; None if unset."""
    from elasticflow.jobfile.tables.evaluation import ranking_set

    ranking = None if job is None else ranking_set(job.evaluation)
    if ranking is None:
        return None
    name, table = ranking
    metric = (table.best or "").partition(" ")[2]
    return f"{name}.{metric}" if name else metric


def better_step(source: SnapshotSource, row: SnapshotRow) -> BetterStep | None:
    """Return the run's best measured step, if its value is better than that of snapshot *row*.

    None if this machine has no folder of the run: snapshots alone do not tell.
    """
    metric, rules = ranking_metric(source.job), source.rules
    has = None if row.manifest is None else row.manifest.metric
    if source.folder is None or metric is None or has is None or rules is None:
        return None
    best, measured = None, {}
    for line in records.read(source.folder.metrics):
        values = line.get("eval")
        if isinstance(values, dict) and (value := float_of(values, metric)) is not None:
            # Among equal values, the newest step counts. `best` forgets values that another evaluation measured.
            measured[value] = int_of(line, "step")
            best = float_of(line, "best")
    if best is None or best not in measured or not (best > has if rules.best_mode == "max" else best < has):
        return None
    return BetterStep(measured[best], best)
