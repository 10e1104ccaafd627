"""The metric of `train.stop_when`, which the evaluations must measure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.tables.evaluation import better_of, evaluation_sets, metric_names, parse_stop_when

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.evaluation import Evaluation
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.text.source import Source

_PATH = ("train", "stop_when")


def check_stop_when(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of the metric that ends training, at its place within the text."""
    train = tables.get("train")
    if train is None or train.stop_when is None or "evaluation" not in tables:
        return
    evaluation, rule = tables["evaluation"], parse_stop_when(train.stop_when)
    if (problem := unmeasured("train.stop_when", rule.metric, evaluation, train.stop_when)) is not None:
        message, remedy = problem
        yield source.problem(codes.STOP_WHEN, message, _PATH, remedy=remedy, part=rule.metric)
    elif better_of(rule, evaluation) is None:
        message = f"train.stop_when does not say which values of {rule.metric} are better"
        remedy = f'write "max {train.stop_when}", or "min ..." where smaller is better'
        yield source.problem(codes.STOP_WHEN, message, _PATH, remedy=remedy, part=rule.metric)


def unmeasured(
    key: str, metric: str, evaluation: Evaluation | None, text: str
) -> tuple[str, str | None] | None:
    """Return the message and the remedy for a metric that no evaluation measures; None if one does.

    Args:
        key: Key that names the metric, in *text*.
    """
    names = metric_names(evaluation)
    if evaluation is None:
        remedy = f"add [evaluation] or, for a set with a name, [evaluation.{metric.partition('.')[0]}]"
        remedy = remedy if "." in metric else "add [evaluation] with the data that is held back"
        return f"{key} goes by {metric}, and there is no [evaluation] that measures it", remedy
    if metric in names:
        return None
    message = f"{key} goes by {metric}, which no evaluation measures: there are {', '.join(names)}"
    last = metric.rpartition(".")[2]
    near = [name for name in names if name.rpartition(".")[2] == last] or nearest(metric, names)
    if not near and "." not in metric and list(evaluation_sets(evaluation)) != [""]:
        return message, "name the set, too: val.loss"
    return message, f'did you mean "{text.replace(metric, near[0], 1)}"?' if near else None
