"""The metric of an evaluation that a learning-rate schedule goes by, and the evaluation that measures it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.schedules import ENTRY
from elasticflow.jobfile.checks.stop_when import unmeasured
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import (
    StopRule,
    better_of,
    evaluation_sets,
    metric_names,
    path_of_set,
)
from elasticflow.system.units import intervals, parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.evaluation import Evaluation
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.training import LrSchedulerTable
    from elasticflow.jobfile.text.source import Source

_INTERVAL, _METRIC = ("lr_scheduler", "interval"), ("lr_scheduler", "metric")
_PLATEAU = "ReduceLROnPlateau"


def check_schedule_metric(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of a schedule that goes by a metric, or would have to."""
    scheduler = tables.get("lr_scheduler")
    if scheduler is None or "evaluation" not in tables:
        return
    evaluation, metric = tables["evaluation"], scheduler.metric
    names = list(metric_names(evaluation))
    mode = scheduler.args.get("mode", "min")
    fitting = [each for each in names if better_of(StopRule(each, None), evaluation) == mode]
    unknown = [each for each in names if better_of(StopRule(each, None), evaluation) is None]
    example = next(iter([*fitting, *unknown, *names]), "loss")
    needs_data = "" if names else "; and [evaluation] with the data that is held back"
    name = scheduler.entry.rpartition(":")[2].rpartition(".")[2]
    if name == _PLATEAU and metric is None:
        message = "ReduceLROnPlateau goes by a metric of the evaluations, and lr_scheduler names none"
        remedy = f'add to [lr_scheduler]: interval = "evaluation" and metric = "{example}"{needs_data}'
        yield source.problem(codes.NEEDS_METRIC, message, ("lr_scheduler", "entry"), remedy=remedy)
    elif metric is None and scheduler.interval == "evaluation":
        message = 'lr_scheduler.interval = "evaluation" needs the metric that the schedule goes by'
        remedy = f'add to [lr_scheduler]: metric = "{example}"{needs_data}'
        yield source.problem(codes.NEEDS_METRIC, message, _INTERVAL, remedy=remedy)
    elif metric is not None and scheduler.interval != "evaluation":
        message = f'lr_scheduler.metric is measured by evaluations, and lr_scheduler.interval is "{scheduler.interval}"'
        remedy = 'set interval = "evaluation", or leave metric out'
        yield source.problem(codes.NEEDS_METRIC, message, _METRIC, remedy=remedy)
    elif metric is None:
        return
    elif (problem := unmeasured("lr_scheduler.metric", metric, evaluation, metric)) is not None:
        message, remedy_of_name = problem
        yield source.problem(codes.NEEDS_METRIC, message, _METRIC, remedy=remedy_of_name)
    else:
        yield from _of_schedule(source, scheduler, metric, evaluation)


def _of_schedule(
    source: Source, scheduler: LrSchedulerTable, metric: str, evaluation: Evaluation | None
) -> Iterator[Diagnostic]:
    """Yield the problems of a schedule whose metric is measured."""
    known = re.fullmatch(ENTRY, scheduler.entry)
    if known is not None and known[1] != _PLATEAU:
        message = f"{known[1]} counts steps or epochs, and takes no metric"
        remedy = 'leave metric out, with interval = "step" or "epoch"; ReduceLROnPlateau goes by a metric'
        yield source.problem(codes.NEEDS_METRIC, message, ("lr_scheduler", "entry"), remedy=remedy)
        return
    name = metric.rpartition(".")[0]
    every = evaluation_sets(evaluation)[name].every
    for text in intervals(every):
        if parse_interval(text).unit == "s":
            where = (*path_of_set(name), "every")
            message = (
                f'{dotted(where)} = "{text}" goes by the clock, and the learning rate by this evaluation: '
                "no two runs would be alike"
            )
            remedy = 'evaluate by "steps", "samples" or "epochs"'
            yield source.problem(codes.NEEDS_METRIC, message, where, remedy=remedy)
    better, mode = better_of(StopRule(metric, None), evaluation), scheduler.args.get("mode", "min")
    if known is not None and better is not None and mode in ("min", "max") and mode != better:
        smaller, given = ("larger", "smaller") if better == "max" else ("smaller", "larger")
        message = (
            f"{metric} is better where it is {smaller}, and ReduceLROnPlateau takes {given} values for better"
        )
        remedy = f'set lr_scheduler.args.mode = "{better}"'
        yield source.problem(codes.NEEDS_METRIC, message, _METRIC, severity="warning", remedy=remedy)
