"""The calls that make a job's evaluation, of one set or of several, and the rule that ends training by a metric."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.compiler.entry_point.functions import of_set
from elasticflow.compiler.entry_point.source_code import (
    Call,
    Code,
    Display,
    Name,
    call,
    given,
    keywords,
    quoted,
)
from elasticflow.compiler.provenance.job_json import to_json
from elasticflow.jobfile.checks.evaluation import is_to_be_apart
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import (
    EvaluationTable,
    MetricTable,
    better_of,
    metric_entry,
    parse_stop_when,
    path_of_set,
)
from elasticflow.system.units import intervals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.compiler.entry_point.factories import CallForms
    from elasticflow.compiler.entry_point.functions import Function
    from elasticflow.jobfile.tables.job import Job


def evaluation(job: Job, functions: Mapping[str, Function], forms: CallForms) -> dict[str, Code | None]:
    """Return the lines of main that make the evaluation of one set or of several; none for a job without evaluation."""
    if job.evaluation is None:
        return {"test_set": None, "evaluation": None}
    step = "None" if forms.step_moves_optimizers else "training_step"
    stop_when = {} if job.train.stop_when is None else {"stop_when": _stop_when(job, job.train.stop_when)}
    if isinstance(job.evaluation, EvaluationTable):
        table = job.evaluation
        options = {**_options(job, "", table, functions, forms), **stop_when}
        return {
            "test_set": _test_set(job, "", table, functions),
            "evaluation": call("Evaluation", "worker", "model", step, "test_set", "run.schedule", **options),
        }
    made = []
    for name, table in job.evaluations.items():
        dataset, options = (
            _test_set(job, name, table, functions),
            _options(job, name, table, functions, forms),
        )
        given = (("", "worker"), ("", "model"), ("", step), ("", dataset), ("", "run.schedule"))
        options_of_set = keywords(options, dotted(path_of_set(name)))
        made.append((f"{quoted(name)}: ", Call("Evaluation", (*given, *options_of_set))))
    sets = Display("{", tuple(made), "}")
    rule = keywords(stop_when, "train.stop_when")
    several = Call("Evaluations", (("", "worker"), ("", "run.schedule"), ("", sets), *rule))
    return {"test_set": None, "evaluation": several}


def opened(build: Function, name: str, options: Mapping[str, Any]) -> Call:
    """Return the call that opens the data set called *name*, made by *build*."""
    arguments = (("", "worker"), ("", build.reference()), ("", quoted(name)))
    return Call("open_dataset", (*arguments, *keywords(options, name)))


def _test_set(job: Job, name: str, table: EvaluationTable, functions: Mapping[str, Function]) -> Call:
    apart = {"apart_from": Name("dataset")} if is_to_be_apart(job.dataset, table) else {}
    return opened(functions[of_set("build_evaluation_dataset", name)], dotted(path_of_set(name)), apart)


def _options(
    job: Job, name: str, table: EvaluationTable, functions: Mapping[str, Function], forms: CallForms
) -> dict[str, Any]:
    weights, best_of = measured_weights(job, table), _best_of(job, table)
    batch_size = table.batch_size or job.dataset.micro_batch_size
    metrics = functions.get(of_set("build_metrics", name))
    return {
        **({} if forms.step_moves_optimizers else {"precision": Name("PRECISION")}),
        "every": intervals(table.every),
        **({} if table.step is None else {"step": Name(of_set("evaluation_step", name))}),
        **({} if metrics is None else {"metrics": metrics.call()}),
        **({} if best_of is None else {"best": table.best, "best_of": best_of}),
        **({} if batch_size is None else {"batch_size": batch_size}),
        **_collate(functions.get(of_set("build_evaluation_collate", name)), functions),
        **({} if job.model.loss else {"uses_loss": False}),
        **({} if weights == "raw" else {"average": Name("average")}),
        **({"also_raw": True} if weights == "both" else {}),
        **({} if table.samples is None else {"samples": table.samples}),
    }


def _collate(own: Function | None, functions: Mapping[str, Function]) -> dict[str, Any]:
    if own is not None:
        return {"collate": own.call()}
    return {"collate": Name("collate")} if "build_collate" in functions else {}


def _stop_when(job: Job, text: str) -> Call:
    rule = parse_stop_when(text)
    options = given(evaluations=rule.evaluations, by=rule.by or None, bound=rule.bound)
    named = keywords(options, "train.stop_when")
    better = quoted(str(better_of(rule, job.evaluation)))
    return Call("StopWhen", (("", quoted(rule.metric)), ("", better), *named))


def _best_of(job: Job, table: EvaluationTable) -> str | None:
    """Return the entry that `best` names, with its arguments if it has any: a metric's, or that of the loss."""
    if table.best is None:
        return None
    metric = table.metrics.get(table.best.partition(" ")[2])
    if metric is None:
        return job.model.loss or job.model.step
    options = {} if table.step is None else {"step": table.step}
    if isinstance(metric, MetricTable):
        options |= metric.model_dump(include={"args", "over", "outputs", "targets"}, exclude_defaults=True)
    entry = metric_entry(metric)
    return f"{entry} {json.dumps(to_json(options))}" if options else entry


def measured_weights(job: Job, table: EvaluationTable) -> Literal["ema", "raw", "both"]:
    """Return the weights that an evaluation set measures; with both, `best` ranks by the metrics of the average."""
    return table.weights or ("raw" if job.train.ema is None else "ema")
