"""What this job puts into the marked places of the templates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.compiler.entry_point.data_calls import collate_of_set, data
from elasticflow.compiler.entry_point.evaluation_calls import evaluation
from elasticflow.compiler.entry_point.factories import (
    collator,
    factories,
    factory,
    metrics,
    parameter_groups,
    sampler_values,
    training_data,
    values_of_data,
)
from elasticflow.compiler.entry_point.hook_calls import hook_rows, hooks
from elasticflow.compiler.entry_point.imports import Imports
from elasticflow.compiler.entry_point.measured import clip_gradient, measures
from elasticflow.compiler.entry_point.source_code import (
    Call,
    Code,
    Name,
    call,
    flat,
    keywords,
    literal,
    quoted,
)
from elasticflow.jobfile.diagnostics.toml_literals import dotted
from elasticflow.jobfile.tables.evaluation import EvaluationTable, path_of_set
from elasticflow.jobfile.tables.types import CollateTable
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.run_folder import path_from_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elasticflow.compiler.entry_point.factory_calls import CallForms
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.types import TextWithSecrets

_USUAL_SETTINGS = SnapshotSettings()
Line = Code | None
"""What stands in a marked line, after what the template has up to `= ` or `return `; None: no line."""


@dataclass
class Values:
    """Code by key, flags of the `if` blocks, and the rows of the `each` blocks."""

    code: dict[str, Line]
    flags: dict[str, bool] = field(default_factory=dict)
    lists: dict[str, list[dict[str, Line]]] = field(default_factory=dict)


def values_of(job: Job, *, root: str, digest: str, forms: CallForms, taken: Iterable[str]) -> Values:
    """Return all values of train.py's template but those of its header.

    Args:
        job: The job.
        root: The project root as seen from the launch folder.
        digest: The job's.
        forms: How the job's factories are called.
        taken: Names that mean something in train.py.

    Raises:
        JobRefusedError: an argument that has no Python literal.
    """
    if not isinstance(job.dataset.collate, CollateTable):
        taken = {*taken} - {"collator"}  # which is no name of such a train.py
    first = Imports(taken)  # before the data is prepared, nothing else is imported
    prepare = None if job.dataset.prepare is None else first.name_of(job.dataset.prepare)
    imports = Imports({*taken, *first.names()})
    calls = factories(job, forms, lambda _: imports)
    code: dict[str, Line] = {
        **_constants(job, root, forms),
        **calls,
        **_step_definition(job, forms),
        **data(job, calls["dataset"], imports),
        **evaluation(job, calls, imports, forms),
        **hooks(job, imports, moves_optimizers=forms.step_moves_optimizers),
        "join": _join(job, digest),
        "prepare.import": first.lines(),
        "prepare": None if prepare is None else call("prepare_data", "worker", prepare),
        "checkpointing": _checkpointing(job),
        "weights": call("load_weights", "model", from_root(job.model.weights)) if job.model.weights else None,
        "gradients": _gradients(job, forms),
        "keep": _keep(job, forms, imports),
    }
    if job.optimizer.groups:
        code["groups"] = parameter_groups(job.optimizer.groups, imports)
    if isinstance(made := job.dataset.collate, CollateTable):
        code["collator"] = collator(made, imports, "dataset.collate")
    if forms.step_moves_optimizers and job.lr_scheduler is not None:
        code["scheduler"] = call("Schedules", calls["scheduler"])
    optimizer = "optimizers" if forms.step_moves_optimizers else "optimizer"
    code |= {
        "loss": _loss(forms),
        "step_scheduler": f"worker.step_scheduler(scheduler, {optimizer})",
        "step": "run.step(loss=loss)",
        "clip_gradient": clip_gradient(job),
        "log_groups": f"log_groups(worker, {optimizer}, groups)",
        "imports": imports.lines(),  # what all the calls above need
    }
    return Values(code=code, flags=_flags(job, forms))


def values_of_factories(job: Job, *, root: str, forms: CallForms, taken: Iterable[str]) -> Values:
    """Return all values of the template that has a function for each of the job's factories; as `values_of`."""
    scopes: dict[str, Imports] = {}

    def scope(key: str) -> Imports:
        return scopes.setdefault(key, Imports(taken))

    args = job.dataset.args
    if job.dataset.shards is not None:
        args = {**args, "shard": Name("shard"), "shards": Name("shards")}
    code: dict[str, Line] = {
        **factories(job, forms, scope, "parameter_groups_of_job()"),
        **_step_definition(job, forms),
        "checkpointing": _checkpointing(job),
        "dataset": training_data(job.dataset, scope("dataset"), args),
        "dataset.def": "def build_dataset(shard: int, shards: int) -> Any:",
        "root": call("Path", quoted(root)),
        "path": _path(job),
        "seed": literal(job.job.seed, "SEED"),
        "values": literal(values_of_data(job), "VALUES"),
        "scheduler.def": f"def build_scheduler({'optimizers' if forms.step_moves_optimizers else 'optimizer'}: Any) -> Any:",
    }
    if job.optimizer.groups:
        code["groups"] = parameter_groups(job.optimizer.groups, scope("groups"))
    if job.dataset.sampler is not None and _has_values(job):
        code["sampler"] = sampler_values(job.dataset.sampler, scope("sampler"))
    if isinstance(made := job.dataset.collate, CollateTable):
        code["collator"] = collator(made, scope("collator"), "dataset.collate")
    elif made is not None:
        code["collate"] = factory(scope("collate"), made, "samples")
    code |= {f"{key}.import": imports.lines() for key, imports in scopes.items()}
    return Values(
        code=code,
        flags=_flags(job, forms),
        lists={**_rows_of_sets(job, code, scopes, taken), "hooks": hook_rows(job, taken)},
    )


def _rows_of_sets(
    job: Job, code: Mapping[str, Line], scopes: Mapping[str, Imports], taken: Iterable[str]
) -> dict[str, list[dict[str, Line]]]:
    """Return the functions that open each of several evaluation sets, make its batches, and return a metric."""
    sets: list[dict[str, Line]] = []
    collates: list[dict[str, Line]] = []
    rows: list[dict[str, Line]] = []
    for number, (name, table) in enumerate(job.evaluations.items()):
        key = dotted(path_of_set(name))
        if name:
            imports = scopes[key].lines()
            signature = f"def build_evaluation_dataset_{name}() -> Any:"
            sets.append({"set.def": signature, "set.import": imports, "set": code[key]})
        if table.collate is not None:
            own_scope = Imports(taken)
            made = collate_of_set(job, table, own_scope, key)["collate"]
            made = made.text if isinstance(made, Name) else made
            signature = f"def collate_of_set_{number}() -> Any:"
            collates.append({"own.def": signature, "own": made, "own.import": own_scope.lines()})
        own = {metric: Imports(taken) for metric in table.metrics}
        for metric, measure in metrics(table, key, own.__getitem__).items():
            signature = f"def metric_{number}_{metric}() -> Any:"
            measured = measure.text if isinstance(measure, Name) else measure
            rows.append({"metric.def": signature, "metric": measured, "metric.import": own[metric].lines()})
    return {"sets": sets, "collates": collates, "metrics": rows}


def _has_values(job: Job) -> bool:
    """Return whether the job's sampler goes by a number or a class of each sample."""
    return job.dataset.sampler is not None and job.dataset.sampler.temperature is None


def _flags(job: Job, forms: CallForms) -> dict[str, bool]:
    scheduler, moves = job.lr_scheduler, forms.step_moves_optimizers
    return {
        "sample": False,
        "weights": job.model.weights is not None,
        "compile": job.train.compile,
        "checkpointing": job.train.gradient_checkpointing is not False,
        "optimizer": not moves,
        "manual": moves,
        "groups": bool(job.optimizer.groups),
        "values": bool(values_of_data(job)),
        "clip_here": job.optimizer.clip_grad_norm is not None and not moves,
        "norm_here": bool(job.logging.grad_norm) and job.optimizer.clip_grad_norm is None and not moves,
        "step_here": job.train.precision != "fp16" and not moves,
        "fp16": job.train.precision == "fp16",
        "ema": job.train.ema is not None,
        "shards": job.dataset.shards is not None,
        "prepare": job.dataset.prepare is not None,
        "sampler": _has_values(job),
        "collate": isinstance(job.dataset.collate, str),
        "collator": isinstance(job.dataset.collate, CollateTable),
        "evaluation": job.evaluation is not None,
        "hooks": job.hooks is not None and bool(job.hooks.named()),
        "evaluation_of_one": isinstance(job.evaluation, EvaluationTable),
        "evaluation_of_several": isinstance(job.evaluation, dict),
        "scheduler": scheduler is not None,
        "scheduler_of_one": scheduler is not None and not moves,
        "scheduler_of_several": scheduler is not None and moves,
        "scheduler_step": scheduler is not None and scheduler.interval == "step",
        "scheduler_epoch": scheduler is not None and scheduler.interval == "epoch",
    }


def _constants(job: Job, root: str, forms: CallForms) -> dict[str, Line]:
    """Return the values of train.py's constants; a constant that says nothing about this job has no line."""
    values = {
        "seed": job.job.seed,
        "global_batch_size": job.dataset.global_batch_size,
        "tail": job.dataset.tail,
        "num_workers": job.dataset.num_workers,
    }
    moves = forms.step_moves_optimizers
    optional = {
        "precision": None if moves else job.train.precision,
        "micro_batch_size": job.dataset.micro_batch_size,
        "epochs": job.train.epochs,
        "steps": job.train.steps,
        "shards": job.dataset.shards,
        "clip": job.optimizer.clip_grad_norm,
        "ema": job.train.ema,
    }
    return {
        **{key: literal(value, key) for key, value in values.items()},
        **{key: None if value is None else literal(value, key) for key, value in optional.items()},
        "root": f"(HERE / {quoted(root)}).resolve()",
        "path": _path(job),
        "snapshots": _policy(job),
    }


def _path(job: Job) -> Code:
    return f"[str(ROOT / part) for part in {flat(literal(job.job.path, 'path'))}]"


def _ddp_options(job: Job) -> Mapping[str, Any]:
    return {key: value for key, value in job.ddp.model_dump().items() if value not in (None, False)}


def _is_exact(job: Job) -> bool:
    return job.train.consistency == "exact"


def from_root(path: str) -> Code:
    """Return the code of a path or URL: relative paths are relative to the project, from wherever train.py runs."""
    relative = path_from_root(path)
    return quoted(path) if relative is None else Call("str", (("", f"ROOT / {quoted(relative)}"),))


def _policy(job: Job) -> Code:
    settings = job.snapshots.settings()
    given = {name: value for name, value in vars(settings).items() if value != getattr(_USUAL_SETTINGS, name)}
    kept = {name: value for name, value in vars(settings.keep).items() if value is not None}
    given |= {"uri": settings.uri, "every": settings.every, "keep": call("Keep", **kept)}
    if settings.uri is not None:
        secret = job.secrets.get(("snapshots", "uri"))
        given["uri"] = Name(flat(from_root(settings.uri))) if secret is None else _looked_up(secret)
    if settings.options:
        given["options"] = _without_secrets(settings.options, job.secrets, ("snapshots", "options"))
    return call("Policy", **{name: given[name] for name in vars(settings) if name in given})


def _without_secrets(value: Any, secrets: Mapping[KeyPath, TextWithSecrets], path: KeyPath) -> Any:
    """Return a value with code that looks them up in place of texts that hold secrets."""
    if path in secrets:
        return _looked_up(secrets[path])
    if isinstance(value, dict):
        return {key: _without_secrets(item, secrets, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_secrets(item, secrets, (*path, number)) for number, item in enumerate(value)]
    return value


def _looked_up(text: TextWithSecrets) -> Name:
    """Return the code of a text that holds secrets."""
    pieces = []
    for piece in text:
        if isinstance(piece, str):
            pieces.append(quoted(piece))
        elif piece.default is None:
            pieces.append(f"os.environ[{quoted(piece.name)}]")
        else:
            lookup = f"os.environ.get({quoted(piece.name)}) or {quoted(piece.default)}"
            pieces.append(f"({lookup})" if len(text) > 1 else lookup)
    return Name(" + ".join(pieces))


def _step_definition(job: Job, forms: CallForms) -> dict[str, Line]:
    """Return the first lines of `training_step`, whose last one is the factory `step.call`."""
    kind, doc = "Any", "Return the loss of one micro-batch, as the job's own step states it"
    if job.model.loss:
        kind, doc = "Tensor", "Return the mean loss of one micro-batch of (inputs, targets)"
    if job.model.loss_count is not None:
        kind, doc = "dict[str, Any]", f"{doc}, and its items' count"
    arguments = "model: nn.Module, batch: Any"
    if forms.step_moves_optimizers:
        doc = "Make a step with this worker's samples, which moves the optimizers; return its loss"
        arguments += ", optimizers: Any"
    return {
        "step.def": f"def training_step({arguments}) -> {kind}:",
        "step.doc": f'"""{doc}."""',
        "step.unpack": "batch" if job.model.loss else None,
    }


def _join(job: Job, digest: str) -> Code:
    """Return the call that joins; defaults of `join_job` are left out."""
    options = {
        "name": job.job.name,
        "digest": digest[:16],
        "folder": Name("HERE"),
        "seed": Name("SEED"),
        "snapshots": Name("SNAPSHOTS"),
        "gradients": Name("GRADIENTS"),
        "compare_replicas": job.train.compare_replicas,
        "log_every": _unless(int(job.logging.every.split()[0]), 1),
        "log_level": _unless(job.logging.level, "info"),
        # The number of threads decides how a kernel sums.
        "threads": job.train.threads or (1 if _is_exact(job) else None),
        "measures": measures(job),
    }
    given = {key: value for key, value in options.items() if value is not None}
    return Call("join_job", keywords(given, "join"))


def _unless(value: Any, usual: Any) -> Any:
    return None if value == usual else value


def _checkpointing(job: Job) -> Code:
    globs = job.train.gradient_checkpointing
    chosen = (flat(literal(globs, "globs")),) if isinstance(globs, list) else ()
    return call("checkpoint_activations", "model", *chosen)


def _gradients(job: Job, forms: CallForms) -> Code:
    """Return how the gradients of a step are made."""
    options: dict[str, Any]
    if forms.step_moves_optimizers:
        clips = job.optimizer.clip_grad_norm is not None
        options = {
            "moves_optimizers": True,
            "clip_grad_norm": Name("CLIP_GRAD_NORM") if clips else None,
            "logs_grad_norm": False if job.logging.grad_norm is False else None,
        }
    else:
        options = {
            "precision": Name("PRECISION"),
            "on_nonfinite": job.train.on_nonfinite,
            "virtual_shards": job.train.virtual_shards if _is_exact(job) else None,
            "ddp": None if _is_exact(job) else _ddp_options(job) or None,
        }
    return call(
        "elasticflow.Gradients", **{key: value for key, value in options.items() if value is not None}
    )


def _loss(forms: CallForms) -> Code:
    """Return the call that leaves a step's gradients in the parameters."""
    given = ("model", "part.data", *(["optimizers"] if forms.step_moves_optimizers else []))
    return f"run.gradients(lambda part: training_step({', '.join(given)}), batch)"


def _keep(job: Job, forms: CallForms, imports: Imports) -> Code:
    optimizer = "optimizers" if forms.step_moves_optimizers else "optimizer"
    parts = {
        "model": "model",
        optimizer: optimizer,
        "scheduler": "scheduler" if job.lr_scheduler else None,
        "scaler": "scaler" if job.train.precision == "fp16" else None,
        "ema": "average" if job.train.ema is not None else None,
        "evaluation": "evaluation" if job.evaluation else None,
    }
    include = {name: Name(imports.name_of(entry)) for name, entry in job.snapshots.include.items()}
    return call(
        "run.keep",
        **{part: Name(name) for part, name in parts.items() if name is not None},
        **({"include": include} if include else {}),
    )
