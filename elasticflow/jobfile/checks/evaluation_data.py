"""A job that is evaluated on its own training data, as far as its file tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import evaluation_sets, path_of_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.tables.job import Args, DatasetTable, EvaluationTable, ValidTables
    from elasticflow.jobfile.text.source import Source


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
