"""The functions of train.py that make what the job trains: each imports and calls what one table of the job file names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.factories import (
    argument,
    collator,
    factory,
    metric,
    on_model,
    parameter_groups,
    partial_of,
    training_data,
)
from elasticflow.compiler.entry_point.source_code import (
    Call,
    Code,
    Imports,
    Name,
    call,
    flat,
    keywords,
    layout,
    literal,
    quoted,
)
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import path_of_set
from elasticflow.system.units import intervals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from elasticflow.compiler.entry_point.factories import CallForms
    from elasticflow.jobfile.tables.evaluation import EvaluationTable
    from elasticflow.jobfile.tables.hooks import HookTable
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.training import DatasetTable
    from elasticflow.jobfile.tables.types import Args, CollateTable

_OF_DATA = "dataset: OpenedDataset"
_SAMPLERS = {
    "bucket_by": "samplers.bucket_by_length",
    "weights": "samplers.draw_by_weight",
    "balance_by": "samplers.draw_by_class",
}
# Variables of the functions themselves: their imports have other names.
_VARIABLES = (
    *(
        "model",
        "batch",
        "inputs",
        "targets",
        "optimizer",
        "optimizers",
        "dataset",
        "worker",
        "shard",
        "shards",
    ),
    *("training_step", "build_parameter_groups"),
)


@dataclass(frozen=True)
class Function:
    """A function of train.py.

    Attributes:
        key: The key of the job file that the function is about.
        doc: The docstring, without its full stop.
        value: Code of the result; None: the function returns nothing.
        parameters: Parameters with their annotations; the caller has variables of these names.
        begins: Name of the random state in which the function calls the job's code; None: the caller's state.
        first: Lines before the last one.
    """

    key: str
    name: str
    doc: str
    value: Code | None
    imports: Imports
    parameters: tuple[str, ...] = ()
    returns: str = "Any"
    begins: str | None = None
    first: str | None = None

    def text(self) -> str:
        """Return the lines of the function."""
        imports = self.imports.lines()
        lines = [
            f"def {self.name}({', '.join(self._all_parameters())}) -> {self.returns}:",
            f'    """{self.doc}."""',
            *([] if imports is None else [f"    {imports}", ""]),
            *([] if self.begins is None else [f"    random_streams.begin(SEED, {quoted(self.begins)})"]),
            *([] if self.first is None else [f"    {self.first}"]),
            *([] if self.value is None else [layout(self.value, indent=4, before="return ")]),
        ]
        return "\n".join(lines)

    def call(self) -> Call:
        """Return the call of the function, with variables that have the names of its parameters."""
        return call(self.name, *(each.partition(":")[0] for each in self._all_parameters()))

    def reference(self) -> str:
        """Return the code of a callable that calls the function and takes no arguments."""
        return f"lambda: {flat(self.call())}" if self.imports.needs_data else self.name

    def _all_parameters(self) -> tuple[str, ...]:
        needs_data = self.imports.needs_data and _OF_DATA not in self.parameters
        return (*self.parameters, _OF_DATA) if needs_data else self.parameters


def functions_of(job: Job, forms: CallForms, taken: Iterable[str]) -> dict[str, Function]:
    """Return the functions of the job's train.py by name, in their order.

    Args:
        taken: Names that the functions find outside of themselves.
    """
    return {each.name: each for each in _functions(job, forms, frozenset({*taken, *_VARIABLES}))}


def _functions(job: Job, forms: CallForms, taken: frozenset[str]) -> Iterator[Function]:
    yield from _of_data(job, taken)
    yield _model(job, Imports(taken))
    yield _training_step(job, forms, Imports(taken))
    yield from _optimizers(job, forms, taken)
    if job.train.ema is not None:
        made = "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA))  # type: ignore[no-untyped-call]"
        doc, parameters = "Return the averaged model", ("model: nn.Module",)
        yield Function("train.ema", "build_average", doc, made, Imports(taken), parameters, "AveragedModel")
    for name, table in job.evaluations.items():
        yield from _of_evaluation(name, table, taken)
    if job.hooks is not None and job.hooks.named():
        imports = Imports(taken)
        hooks = {name: _hook(table, imports, name) for name, table in job.hooks.named().items()}
        doc = "Return the hooks by the moment of their call"
        yield _by_name("hooks", "build_hooks", doc, hooks, imports)
    if job.snapshots.include:
        imports = Imports(taken)
        included = {name: Name(imports.name_of(entry)) for name, entry in job.snapshots.include.items()}
        doc = "Return further objects whose state snapshots hold"
        yield _by_name("snapshots.include", "build_included", doc, included, imports)


def _by_name(key: str, name: str, doc: str, values: Mapping[str, Any], imports: Imports) -> Function:
    return Function(key, name, doc, literal(values, key), imports, returns="dict[str, Any]")


def _of_data(job: Job, taken: frozenset[str]) -> Iterator[Function]:
    table, imports = job.dataset, Imports(taken)
    key = "dataset.mix" if table.entry is None else _key("dataset", table.args)
    if table.prepare is not None:
        own = Imports(taken)
        first = flat(factory(own, table.prepare))
        doc = "Prepare the data"
        yield Function("dataset.prepare", "prepare", doc, None, own, (), "None", "data", first)
    if table.shards is not None:
        doc, parameters = (
            "Return an iterable over the samples of one data shard, in order",
            ("shard: int", "shards: int"),
        )
        args = {**table.args, "shard": Name("shard"), "shards": Name("shards")}
        yield Function(key, "build_dataset", doc, training_data(table, imports, args), imports, parameters)
    else:
        made = training_data(table, imports, table.args)
        yield Function(key, "build_dataset", "Return the training data", made, imports, begins="data")
        yield from _order(table, Imports(taken))
    if table.collate is not None:
        yield _collate("build_collate", table.collate, "dataset.collate", Imports(taken), "collate")


def _key(table: str, args: Args) -> str:
    """Return the key of the job file that a factory's call is about: its arguments, if it has any."""
    return f"{table}.args" if args else f"{table}.entry"


def _order(table: DatasetTable, imports: Imports) -> Iterator[Function]:
    """Yield the function that makes the order of samples; nothing for the default order."""
    sampler = table.sampler
    if table.mix:
        key, weights = "dataset.mix", [each.weight for each in table.mix if each.weight is not None]
        shares: dict[str, Any] = {"weights": weights} if weights else {}
        if sampler is not None:
            shares = {"temperature": sampler.temperature}
        made = call("samplers.mix", "worker", "dataset", **shares)
    elif sampler is None:
        return
    else:
        key = f"dataset.sampler.{sampler.kind}"
        values = imports.name_of(sampler.values) if ":" in sampler.values else quoted(sampler.values)
        given = ["worker", "dataset", values]
        options: dict[str, Any] = {} if sampler.draws is None else {"draws": sampler.draws}
        if sampler.kind == "bucket_by":
            given, options = [*given, "GLOBAL_BATCH_SIZE"], {"tail": Name("TAIL")}
        made = call(_SAMPLERS[sampler.kind], *given, **options)
    doc = "Return the order in which samples are drawn"
    yield Function(key, "build_order", doc, made, imports, ("worker: Worker", _OF_DATA), "Order")


def _collate(
    name: str, table: str | CollateTable, key: str, imports: Imports, begins: str | None = None
) -> Function:
    doc = "Return the function that makes a batch from a list of samples"
    if isinstance(table, str):
        return Function(key, name, doc, imports.name_of(table), imports)
    return Function(key, name, doc, collator(table, imports, key), imports, begins=begins)


def _model(job: Job, imports: Imports) -> Function:
    made = factory(imports, job.model.entry, args=job.model.args, where="model.args")
    doc, globs = "Return the model with its initial weights", job.train.gradient_checkpointing
    key = _key("model", job.model.args)
    if globs is False:
        return Function(key, "build_model", doc, made, imports, (), "nn.Module", "model")
    chosen = [literal(globs, "globs")] if isinstance(globs, list) else []
    again = layout(call("checkpoint_activations", "model", *chosen), indent=4)
    first = f"{layout(made, indent=4, before='model = ')}\n{again}".removeprefix("    ")
    return Function(key, "build_model", doc, "model", imports, (), "nn.Module", "model", first)


def _training_step(job: Job, forms: CallForms, imports: Imports) -> Function:
    """Return the function that computes the loss of a micro-batch and, where the job counts items, their number."""
    kind, doc = "Any", "Return the loss of one micro-batch, computed by the job's own step"
    if job.model.loss:
        kind, doc = "Tensor", "Return the mean loss of one micro-batch of (inputs, targets)"
    if job.model.loss_count is not None:
        kind, doc = "dict[str, Any]", f"{doc}, and its number of items"
    parameters: tuple[str, ...] = ("model: nn.Module", "batch: Any")
    if forms.step_moves_optimizers:
        doc = "Train on this worker's samples, step the optimizers, and return the loss"
        parameters += ("optimizers: Any",)
    entry = job.model.loss or job.model.step
    assert entry is not None
    name = imports.name_of(entry)
    given: tuple[str, ...] = ("model", "batch")
    if job.model.loss:
        given = ("model(inputs)", "targets")
    elif forms.step_is_method:
        name, given = on_model(name), ("batch",)
    if forms.step_moves_optimizers:
        given += ("optimizers",)
    value = call(name, *given)
    if job.model.loss_count is not None:
        value = call("with_count", value, call(imports.name_of(job.model.loss_count), "batch"))
    first = "inputs, targets = batch" if job.model.loss else None
    key = "model.loss" if job.model.loss else "model.step"
    return Function(key, "training_step", doc, value, imports, parameters, kind, first=first)


def _optimizers(job: Job, forms: CallForms, taken: frozenset[str]) -> Iterator[Function]:
    table, imports, moves = job.optimizer, Imports(taken), forms.step_moves_optimizers
    given = ["model" if forms.optimizer_takes_model else "model.parameters()"]
    if table.groups:
        own, doc = Imports(taken), "Return the groups of parameters that have options of their own"
        made: Code = parameter_groups(table.groups, own)
        groups = Function("optimizer.groups", "build_parameter_groups", doc, made, own, returns="list[Group]")
        yield groups
        imports.needs_data |= own.needs_data
        given = [f"parameter_groups(model, {flat(groups.call())})"]
    if forms.optimizer_is_method:
        given = []
    key, where, is_method = _key("optimizer", table.args), "optimizer.args", forms.optimizer_is_method
    made = factory(imports, table.entry, *given, args=table.args, where=where, is_method=is_method)
    kind, doc = ("Any", "Return the optimizers") if moves else ("Optimizer", "Return the optimizer")
    yield Function(key, "build_optimizer", doc, made, imports, ("model: nn.Module",), kind, "optimizer")
    if job.lr_scheduler is None:
        return
    entry, args, imports = job.lr_scheduler.entry, job.lr_scheduler.args, Imports(taken)
    name = "optimizers" if moves else "optimizer"
    first = f"optimizer={name}" if forms.schedule_by_name else name
    made = factory(imports, entry, first, args=args, where="lr_scheduler.args")
    if forms.schedule_is_timms:
        made = call("CountedSchedule", made)
    if job.lr_scheduler.metric is not None:
        metric = job.lr_scheduler.metric
        every = intervals(job.evaluations[metric.rpartition(".")[0]].every)
        made = call("MetricSchedule", made, quoted(metric), every=every)
    if moves:
        made = call("Schedules", made)
    key, doc, parameters = (
        _key("lr_scheduler", args),
        "Return the learning-rate schedule",
        (f"{name}: {kind}",),
    )
    yield Function(key, "build_scheduler", doc, made, imports, parameters, begins="scheduler")


def of_set(name: str, of: str) -> str:
    """Return the name of an evaluation set's function; *of*: name of the set, empty if there is only one."""
    return f"{name}_{of}" if of else name


def _of_evaluation(name: str, table: EvaluationTable, taken: frozenset[str]) -> Iterator[Function]:
    key, imports = dotted(path_of_set(name)), Imports(taken)
    made = factory(imports, table.entry, args=table.args, where=f"{key}.args")
    doc = f"Return the data of the evaluation set {name}" if name else "Return the evaluation data"
    build = of_set("build_evaluation_dataset", name)
    yield Function(_key(key, table.args), build, doc, made, imports, begins="data")
    if table.collate is not None:
        build = of_set("build_evaluation_collate", name)
        yield _collate(build, table.collate, f"{key}.collate", Imports(taken))
    if table.step is not None:
        imports, doc = Imports(taken), "Return outputs and targets of one batch, for the metrics"
        made = call(imports.name_of(table.step), "model", "batch")
        build, parameters = of_set("evaluation_step", name), ("model: nn.Module", "batch: Any")
        yield Function(f"{key}.step", build, doc, made, imports, parameters)
    if table.metrics:
        imports, where = Imports(taken), f"{key}.metrics"
        metrics = {name: metric(each, f"{where}.{name}", imports) for name, each in table.metrics.items()}
        yield _by_name(where, of_set("build_metrics", name), "Return the metrics by name", metrics, imports)


def _hook(table: HookTable, imports: Imports, name: str) -> Call:
    where = f"hooks.{name}.args"
    args = {key: argument(value, imports, f"{where}.{key}") for key, value in table.args.items()}
    function = imports.name_of(table.entry)
    called: Code = partial_of(imports, Call(function, keywords(args, where))) if args else function
    options: dict[str, Any] = {}
    if table.every is not None and (steps := int(table.every.split()[0])) != 1:
        options["every"] = steps
    if table.all_ranks:
        options["all_ranks"] = True
    return call("Hook", called, quoted(table.entry), **options)
