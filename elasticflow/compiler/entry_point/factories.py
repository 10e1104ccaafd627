"""How code calls the functions and classes that a job file names: its factories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.source_code import Call, Display, Name, keywords, quoted
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.entry_points.object_arguments import dataset_values, object_of
from elasticflow.jobfile.tables.evaluation import metric_entry, path_of_set
from elasticflow.jobfile.type_checks.annotations import DatasetValue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from elasticflow.compiler.entry_point.factory_calls import CallForms
    from elasticflow.compiler.entry_point.imports import Imports
    from elasticflow.jobfile.tables.job import Args, EvaluationTable, Job, MetricTable
    from elasticflow.jobfile.tables.sampling import SamplerTable
    from elasticflow.jobfile.tables.training import DatasetTable, GroupTable
    from elasticflow.jobfile.tables.types import CollateTable


def factories(
    job: Job, forms: CallForms, scope: Callable[[str], Imports], groups: str = "groups"
) -> dict[str, Call]:
    """Return the call of each factory by its name in the templates.

    Args:
        job: The job.
        forms: How its factories are called.
        scope: Returns what is imported where the call of a factory, given by name, stands.
        groups: Code of the groups of parameters where the optimizer's call stands, if the job has groups.
    """
    calls = {
        "model": factory(scope("model"), job.model.entry, args=job.model.args, where="model.args"),
        "step.call": _training_step(job, forms, scope("step")),
        "optimizer": _optimizer(job, forms, scope("optimizer"), groups),
        "dataset": training_data(job.dataset, scope("dataset"), job.dataset.args),
    }
    if job.lr_scheduler is not None:
        entry, args = job.lr_scheduler.entry, job.lr_scheduler.args
        given = "optimizers" if forms.step_moves_optimizers else "optimizer"
        given = f"optimizer={given}" if forms.schedule_by_name else given
        schedule = factory(scope("scheduler"), entry, given, args=args, where="scheduler.args")
        counted = Call("CountedSchedule", (("", schedule),))
        calls["scheduler"] = counted if forms.schedule_is_timms else schedule
    for name, table in job.evaluations.items():
        key = dotted(path_of_set(name))
        calls[key] = factory(scope(key), table.entry, args=table.args, where=f"{key}.args")
    return calls


def _optimizer(job: Job, forms: CallForms, imports: Imports, groups: str) -> Call:
    entry, args = job.optimizer.entry, job.optimizer.args
    if forms.optimizer_is_method:
        return factory(imports, entry, args=args, where="optimizer.args", is_method=True)
    given = "model" if forms.optimizer_takes_model else "model.parameters()"
    if job.optimizer.groups:
        given = f"parameter_groups(model, {groups})"
    return factory(imports, entry, given, args=args, where="optimizer.args")


def parameter_groups(tables: Sequence[GroupTable], imports: Imports) -> Display:
    """Return the list of a job's groups of parameters.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    made = []
    for number, table in enumerate(tables):
        where = f"optimizer.groups[{number}]"
        args = {key: argument(value, imports, f"{where}.args.{key}") for key, value in table.args.items()}
        modules = [Name(imports.name_of(entry)) for entry in table.modules]
        values = {
            "match": table.match,
            "ndim": table.ndim,
            "module": modules if isinstance(table.module, list) else next(iter(modules), None),
            "args": args or None,
            "name": table.name,
        }
        named = keywords({key: value for key, value in values.items() if value is not None}, where)
        made.append(("", Call("Group", named)))
    return Display("[", tuple(made), "]")


def _training_step(job: Job, forms: CallForms, imports: Imports) -> Call:
    """Return how the loss of a micro-batch is computed and, where the job counts them, over how many items it is."""
    entry = job.model.loss or job.model.step
    assert entry is not None
    name = imports.name_of(entry)
    given: tuple[str, ...] = ("model", "batch")
    if job.model.loss:
        given = ("model(inputs)", "targets")
    elif forms.step_is_method:
        name, given = _on_model(name), ("batch",)
    if forms.step_moves_optimizers:
        given += ("optimizers",)
    call = Call(name, tuple(("", text) for text in given))
    if job.model.loss_count is None:
        return call
    count = Call(imports.name_of(job.model.loss_count), (("", "batch"),))
    return Call("with_count", (("", call), ("", count)))


def factory(
    imports: Imports,
    entry: str,
    *positional: str,
    args: Args | None = None,
    where: str = "",
    is_method: bool = False,
) -> Call:
    """Return the call of one `package.module:attribute`; a method is called on the model.

    Args:
        imports: Of the scope in which the call stands; what it needs is imported there.
        entry: What is called.
        positional: Code of its first arguments.
        args: Its named arguments as the job file has them.
        where: Their key, for errors.
        is_method: It is a method of the model's class.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    name = imports.name_of(entry)
    name = _on_model(name) if is_method else name
    values = {key: argument(value, imports, f"{where}.{key}") for key, value in (args or {}).items()}
    return Call(name, (*(("", text) for text in positional), *keywords(values, where)))


def training_data(table: DatasetTable, imports: Imports, args: Args) -> Call:
    """Return the call that makes the training data, given *args*; of a mixture, the calls that make its sets."""
    if table.entry is not None:
        return factory(imports, table.entry, args=args, where="dataset.args")
    sets = [
        factory(imports, each.entry, args=each.args, where=f"dataset.mix[{number}].args")
        for number, each in enumerate(table.mix)
    ]
    return Call("MixedDataset", tuple(("", each) for each in sets))


def collator(table: CollateTable, imports: Imports, where: str) -> Call:
    """Return the code of what makes batches with arguments, whose key is *where*.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    made = factory(imports, table.entry, args=table.args, where=f"{where}.args")
    return partial_of(imports, made) if table.partial else made


def sampler_values(sampler: SamplerTable, imports: Imports) -> str:
    """Return the code of what gives each sample a number or a class: a function, or the name of a column or attribute."""
    values = sampler.values
    return imports.name_of(values) if ":" in values else quoted(values)


def metrics(table: EvaluationTable, where: str, scope: Callable[[str], Imports]) -> dict[str, Any]:
    """Return the code of each metric of an evaluation set.

    Args:
        table: The set.
        where: The key of its table.
        scope: Returns what is imported where the code of a metric, given by name, stands.

    Raises:
        JobRefusedError: an argument has no Python literal.
    """
    return {
        name: _metric(each, f"{where}.metrics.{name}", scope(name)) for name, each in table.metrics.items()
    }


def _metric(metric: str | MetricTable, where: str, imports: Imports) -> Name | Call:
    name = Name(imports.name_of(metric_entry(metric)))
    if isinstance(metric, str):
        return name
    args = {key: argument(value, imports, f"{where}.args.{key}") for key, value in metric.args.items()}
    options = {
        "args": args or None,
        "over": metric.over,
        "outputs": metric.outputs,
        "targets": metric.targets,
    }
    named = keywords({key: value for key, value in options.items() if value is not None}, where)
    return Call("Metric", (("", name.text), *named)) if named else name


def values_of_data(job: Job) -> dict[str, str]:
    """Return the attributes of the training data that the job's arguments name, each with the first key that does."""
    by_name: dict[str, str] = {}
    for path, value in dataset_values(job.model_dump()):
        by_name.setdefault(value.name, ".".join(map(str, path)))
    return by_name


def _on_model(name: str) -> str:
    """Return how a method is called that is known as *name*, `GPT.configure_optimizers`."""
    kind, _, method = name.rpartition(".")
    return f"unwrap_model(model, {kind}).{method}"


def argument(value: Any, imports: Imports, where: str) -> Any:
    """Return a value of the job file with code in place of the objects that its tables mean."""
    if isinstance(value, DatasetValue):
        return Name(f"dataset.values[{quoted(value.name)}]")
    described = object_of(value)
    if described is not None:
        args = {key: argument(item, imports, f"{where}.{key}") for key, item in described.args.items()}
        if described.entry == "builtins:dict" and not described.is_partial:
            return args  # how a dict is written that would be taken for an object
        name = imports.name_of(described.entry)
        call = Call(name, keywords(args, where))
        return partial_of(imports, call) if described.is_partial else call
    if isinstance(value, dict):
        return {key: argument(item, imports, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [argument(item, imports, f"{where}[{number}]") for number, item in enumerate(value)]
    return value


def partial_of(imports: Imports, call: Call) -> Call:
    """Return *call* as `functools.partial` makes it: to be finished by whoever calls the result."""
    return Call(imports.name_of("functools:partial"), (("", call.name), *call.arguments))
