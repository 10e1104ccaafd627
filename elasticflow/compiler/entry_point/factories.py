"""Imports and calls of what the job file names, for the entry point."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.imports import Imports
from elasticflow.compiler.entry_point.source_code import Call, Code, Name, flat, import_line, keywords
from elasticflow.jobfile.entry_points.object_arguments import object_of

if TYPE_CHECKING:
    from elasticflow.compiler.entry_point.factory_calls import CallForms
    from elasticflow.jobfile.tables.job import Job

# Names that mean something inside the functions a factory is imported into.
_TAKEN = frozenset(
    {
        "model",
        "optimizer",
        "optimizers",
        "batch",
        "inputs",
        "targets",
        "outputs",
        "samples",
        "shard",
        "shards",
    }
    | {"float", "Any", "nn", "streams", "SEED"}
)

Line = Code | tuple[str, Code] | None
"""A line's expression, or what stands before it and the expression; None: no line."""


def factories(job: Job, forms: CallForms) -> dict[str, Line]:
    """Import and call of everything the job names."""
    found = factory("model", job.model.entry, "return ", args=job.model.args)
    found |= _optimizer(job, forms)
    shards = {} if job.dataset.shards is None else {"shard": Name("shard"), "shards": Name("shards")}
    found |= factory("dataset", job.dataset.entry, "return ", args={**job.dataset.args, **shards})
    found["dataset.def"] = "def build_dataset(shard: int, shards: int) -> Any:"
    found |= _training_step(job, forms)
    if job.lr_scheduler:
        scheduler = job.lr_scheduler
        found |= factory("scheduler", scheduler.entry, "return ", "optimizer", args=scheduler.args)
    if job.dataset.prepare:
        found |= factory("prepare", job.dataset.prepare, "")
    if job.dataset.collate:
        found |= factory("collate", job.dataset.collate, "return ", "samples")
    if job.evaluation:
        found |= factory("evaluation", job.evaluation.entry, "return ", args=job.evaluation.args)
    return found


def _optimizer(job: Job, forms: CallForms) -> dict[str, Line]:
    entry, args = job.optimizer.entry, job.optimizer.args
    if forms.optimizer_is_method:
        return factory("optimizer", entry, "return ", args=args, is_method=True)
    given = "model" if forms.optimizer_takes_model else "model.parameters()"
    return factory("optimizer", entry, "return ", given, args=args)


def _training_step(job: Job, forms: CallForms) -> dict[str, Line]:
    """How the loss of a micro-batch is computed and, where the job counts them, over how many items it is."""
    imports, counts = Imports(_TAKEN), job.model.loss_count
    given: tuple[str, ...]
    if job.model.loss:
        key, entry, given = "loss", job.model.loss, ("model(inputs)", "targets")
    else:
        assert job.model.step is not None
        key, entry, given = "step", job.model.step, ("model", "batch")
    name = imports.name_of(entry)
    if forms.step_is_method:
        name, given = _on_model(name), ("batch",)
    code: Code = Call(name, tuple(("", text) for text in given))
    kind, doc = (
        "Tensor" if job.model.loss else "Any",
        "the mean loss over one micro-batch of (inputs, targets)",
    )
    if job.model.step:
        doc = "the loss of one micro-batch, as the job's own step states it"
    if counts is not None:
        code = Call("with_count", (("", code), ("", Call(imports.name_of(counts), (("", "batch"),)))))
        kind, doc = "dict[str, Any]", f"{doc}, and its items' count"
    return {
        f"{key}.def": f"def training_step(model: nn.Module, batch: Any) -> {kind}:",
        f"{key}.doc": f'"""Return {doc}; every rank."""',
        f"{key}.import": imports.lines(),
        f"{key}.call": ("return ", code),
    }


def factory(
    key: str,
    entry: str,
    before: str,
    *positional: str,
    args: dict[str, Any] | None = None,
    is_method: bool = False,
) -> dict[str, Line]:
    """Return the lines `<key>.import` and `<key>.call` of one `package.module:attribute`; a method is called on the model."""
    imports = Imports(_TAKEN)
    name = imports.name_of(entry)
    name = _on_model(name) if is_method else name
    made = {name: _made(value, imports, f"{key}.args.{name}") for name, value in (args or {}).items()}
    arguments = (*(("", text) for text in positional), *keywords(made, f"{key}.args"))
    return {f"{key}.import": imports.lines(), f"{key}.call": (before, Call(name, arguments))}


def _on_model(name: str) -> str:
    """Return how a method is called that is known as *name*, `GPT.configure_optimizers`."""
    kind, _, method = name.rpartition(".")
    return f"unwrap_model(model, {kind}).{method}"


def _made(value: Any, imports: Imports, where: str) -> Any:
    """Return a value of the job file with code in place of the objects that its tables mean."""
    found = object_of(value)
    if found is not None:
        inside = {key: _made(each, imports, f"{where}.{key}") for key, each in found.args.items()}
        if found.entry == "builtins:dict" and not found.is_partial:
            return inside  # how a dict is written that would be taken for an object
        name, arguments = imports.name_of(found.entry), keywords(inside, where)
        if found.is_partial:
            return Call(imports.name_of("functools:partial"), (("", name), *arguments))
        return Call(name, arguments)
    if isinstance(value, dict):
        return {key: _made(each, imports, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list):
        return [_made(each, imports, f"{where}[{place}]") for place, each in enumerate(value)]
    return value


def metric_functions(job: Job) -> dict[str, str]:
    """Return the name of the function that measures each metric."""
    return {metric: f"measure_{metric}" for metric in (job.evaluation.metrics if job.evaluation else ())}


def metrics(job: Job) -> list[dict[str, Line]]:
    """Return the values of the template's `each: metrics` block, one row per metric."""
    names = ("outputs", "targets") if job.model.loss else ("model", "batch")
    rows: list[dict[str, Line]] = []
    for metric, function in metric_functions(job).items():
        assert job.evaluation is not None
        rows.append(
            {
                "metric.def": f"def {function}({names[0]}: Any, {names[1]}: Any) -> Any:",
                "metric.doc": f'"""Return the metric `{metric}` as a mean over one batch; every rank."""',
                **factory("metric", job.evaluation.metrics[metric], "return ", *names),
            }
        )
    return rows


def included(job: Job) -> dict[str, tuple[str, str]]:
    """Return, for each object of the job's own that snapshots include, its import and its name in train.py."""
    found = {}
    for name, entry in job.snapshots.include.items():
        module, _, attribute = entry.partition(":")
        first, *rest = attribute.split(".")
        found[name] = flat(import_line(module, first, f"own_{name}")), ".".join([f"own_{name}", *rest])
    return found
