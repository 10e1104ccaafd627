"""Evaluations: the metric of `train.stop_when`, and a job that is evaluated on its training data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.suggestions import nearest
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import (
    better_of,
    evaluation_sets,
    metric_names,
    parse_stop_when,
    path_of_set,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.evaluation import Evaluation, EvaluationTable
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.training import DatasetTable
    from elasticflow.jobfile.tables.types import Args
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


def check_evaluation_data(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield a warning if [evaluation] names the data of [dataset], and does not say that this is intended."""
    dataset, sets = tables.get("dataset"), evaluation_sets(tables.get("evaluation"))
    if dataset is None or not all(is_training_data(dataset, each) for each in sets.values()):
        return  # beside other data, the training data is there to be compared with it
    for name, table in sets.items():
        if table.overlap == "allowed":
            continue
        key = dotted(path_of_set(name))
        with_arguments = " with the same arguments" if dataset.args else ""
        what = "a set of dataset.mix" if dataset.mix else f"dataset.entry{with_arguments}"
        message = f"{key}.entry is {what}: metrics are of the training data"
        remedy = f"name the data that is held back, or give {key}.args; {allow(name)}"
        where = (*path_of_set(name), "entry")
        yield source.problem(codes.EVALUATES_TRAINING, message, where, severity="warning", remedy=remedy)


def allow(name: str) -> str:
    """Return the line by which the set *name* says that its samples may be trained on."""
    return f'if that is meant, say so with {dotted(path_of_set(name))}.overlap = "allowed"'


def is_training_data(dataset: DatasetTable, evaluation: EvaluationTable) -> bool:
    """Return whether both tables make the same call, which returns the same data."""
    made: list[tuple[str | None, Args]] = [(each.entry, each.args) for each in dataset.mix] or [
        (dataset.entry, dataset.args)
    ]
    return dataset.shards is None and (evaluation.entry, evaluation.args) in made


def is_to_be_apart(dataset: DatasetTable, evaluation: EvaluationTable | None) -> bool:
    """Return whether to look for samples of the evaluation in the training data: not if the file allows or implies them."""
    return (
        evaluation is not None
        and evaluation.overlap == "reported"
        and dataset.shards is None
        and not is_training_data(dataset, evaluation)
    )
