"""Calls of the functions and classes that a job file names: its factories."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticflow.compiler.entry_point.source_code import Call, Display, Name, call, given, keywords, quoted
from elasticflow.jobfile.entry_points.calls import takes_optimizer_later, takes_optimizers
from elasticflow.jobfile.entry_points.object_arguments import dataset_values, object_of
from elasticflow.jobfile.tables.evaluation import metric_entry
from elasticflow.jobfile.type_checks.annotations import DatasetValue
from elasticflow.python_source.modules import Definition, Finder, MethodError, UnresolvedError
from elasticflow.python_source.resolve import Resolver
from elasticflow.python_source.signatures import Signature, signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.compiler.entry_point.source_code import Imports
    from elasticflow.jobfile.tables.evaluation import MetricTable
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.training import DatasetTable, GroupTable
    from elasticflow.jobfile.tables.types import Args, CollateTable


def parameter_groups(tables: Sequence[GroupTable], imports: Imports) -> Display:
    """Return the list of a job's groups of parameters."""
    made = []
    for number, table in enumerate(tables):
        where = f"optimizer.groups[{number}]"
        args = {key: argument(value, imports, f"{where}.args.{key}") for key, value in table.args.items()}
        modules = [Name(imports.name_of(entry)) for entry in table.modules]
        values = given(
            match=table.match,
            ndim=table.ndim,
            module=modules if isinstance(table.module, list) else next(iter(modules), None),
            args=args or None,
            name=table.name,
        )
        made.append(("", Call("Group", keywords(values, where))))
    return Display("[", tuple(made), "]")


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
        imports: Imports of the scope of the call; imports for the call are added.
        positional: Code of the first arguments.
        args: Named arguments as in the job file.
        where: Key of the named arguments, for errors.
        is_method: The factory is a method of the model's class.
    """
    name = imports.name_of(entry)
    name = on_model(name) if is_method else name
    values = {key: argument(value, imports, f"{where}.{key}") for key, value in (args or {}).items()}
    return Call(name, (*(("", text) for text in positional), *keywords(values, where)))


def training_data(table: DatasetTable, imports: Imports, args: Args) -> Call:
    """Return the call that makes the training data with *args*; for a mixture, the calls that make its sets."""
    if table.entry is not None:
        return factory(imports, table.entry, args=args, where="dataset.args")
    sets = [
        factory(imports, each.entry, args=each.args, where=f"dataset.mix[{number}].args")
        for number, each in enumerate(table.mix)
    ]
    return call("MixedDataset", *sets)


def collator(table: CollateTable, imports: Imports, where: str) -> Call:
    """Return the code of a collator with arguments, whose key is *where*."""
    made = factory(imports, table.entry, args=table.args, where=f"{where}.args")
    return partial_of(imports, made) if table.partial else made


def metric(table: str | MetricTable, where: str, imports: Imports) -> Name | Call:
    """Return the code of a metric, whose key is *where*."""
    name = Name(imports.name_of(metric_entry(table)))
    if isinstance(table, str):
        return name
    args = {key: argument(value, imports, f"{where}.args.{key}") for key, value in table.args.items()}
    options = given(args=args or None, over=table.over, outputs=table.outputs, targets=table.targets)
    named = keywords(options, where)
    return Call("Metric", (("", name.text), *named)) if named else name


def values_of_data(job: Job) -> dict[str, str]:
    """Return the attributes of the training data that the job's arguments name, each with the first key that names it."""
    by_name: dict[str, str] = {}
    for path, value in dataset_values(job.as_tables()):
        by_name.setdefault(value.name, ".".join(map(str, path)))
    return by_name


def on_model(name: str) -> str:
    """Return the code of a method on the model; *name*: such as `GPT.configure_optimizers`."""
    kind, _, method = name.rpartition(".")
    return f"unwrap_model(model, {kind}).{method}"


def argument(value: Any, imports: Imports, where: str) -> Any:
    """Return a value of the job file with code in place of the tables that stand for objects."""
    if isinstance(value, DatasetValue):
        imports.needs_data = True
        return Name(f"dataset.values[{quoted(value.name)}]")
    described = object_of(value)
    if described is not None:
        args = {key: argument(item, imports, f"{where}.{key}") for key, item in described.args.items()}
        if described.entry == "builtins:dict" and not described.is_partial:
            return args  # the form of a dict that would be taken for an object
        name = imports.name_of(described.entry)
        call = Call(name, keywords(args, where))
        return partial_of(imports, call) if described.is_partial else call
    if isinstance(value, dict):
        return {key: argument(item, imports, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list):
        return [argument(item, imports, f"{where}[{number}]") for number, item in enumerate(value)]
    return value


def partial_of(imports: Imports, call: Call) -> Call:
    """Return *call* as a `functools.partial`, whose caller gives the other arguments."""
    return Call(imports.name_of("functools:partial"), (("", call.name), *call.arguments))


class CallForms(NamedTuple):
    """The forms in which a job's factories are called, as far as their source tells.

    Attributes:
        optimizer_takes_model: The optimizer's factory takes the model instead of its parameters.
        optimizer_is_method: The optimizer's factory is a method of the model.
        step_is_method: The training step is a method of the model.
        step_moves_optimizers: The training step takes the optimizers after model and batch, and steps them itself.
        schedule_by_name: The learning-rate schedule's factory takes the optimizer by name, after another argument.
        schedule_is_timms: The learning-rate schedule is timm's, which takes the time at each step.
    """

    optimizer_takes_model: bool = False
    optimizer_is_method: bool = False
    step_is_method: bool = False
    step_moves_optimizers: bool = False
    schedule_is_timms: bool = False
    schedule_by_name: bool = False


def call_forms(job: Job, project_root: Path) -> CallForms:
    """Return the forms in which the factories of a job are called."""
    resolver = Resolver(Finder.of_job(project_root, job.job.path))
    optimizer, step = job.optimizer.entry, job.model.step
    optimizer_is_method = is_method(optimizer, resolver)
    step_is_method = step is not None and is_method(step, resolver)
    names = [] if step is None else parameters(step, resolver)
    return CallForms(
        optimizer_takes_model=not optimizer_is_method and parameters(optimizer, resolver)[:1] == ["model"],
        optimizer_is_method=optimizer_is_method,
        step_is_method=step_is_method,
        step_moves_optimizers=takes_optimizers(names, is_method=step_is_method),
        schedule_is_timms=job.lr_scheduler is not None and is_of_timm(job.lr_scheduler.entry, resolver),
        schedule_by_name=job.lr_scheduler is not None
        and takes_optimizer_later(job.lr_scheduler.entry, parameters(job.lr_scheduler.entry, resolver)),
    )


def is_method(entry: str, resolver: Resolver) -> bool:
    """Return whether `package.module:Class.name` is called on an object of its class; False if reading does not tell."""
    try:
        resolver.entry(entry)
    except MethodError:
        return True
    except UnresolvedError:
        pass
    return False


def is_of_timm(entry: str, resolver: Resolver) -> bool:
    """Return whether `package.module:attribute` names a class of timm, also through an import in the job's own code."""
    if entry.startswith("timm."):
        return True
    try:
        resolved = resolver.entry(entry)
    except UnresolvedError:
        return False
    if not isinstance(resolved, Definition) or not isinstance(resolved.node, ast.ClassDef):
        return False
    return resolved.module.name.startswith("timm.")


def parameters(entry: str, resolver: Resolver) -> list[str]:
    """Return the positional parameters of `package.module:attribute` without `self`; none if reading does not tell."""
    try:
        try:
            resolved = resolver.entry(entry)
        except MethodError as method:
            resolved = method.definition
        signature = signature_of(resolved, resolver) if isinstance(resolved, Definition) else Signature()
    except UnresolvedError:
        return []
    return [parameter.name for parameter in (*signature.positional_only, *signature.positional)]
