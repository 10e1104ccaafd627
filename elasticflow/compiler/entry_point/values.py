"""The job's values for the marked places of the templates."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.compiler.entry_point.factories import values_of_data
from elasticflow.compiler.entry_point.functions import functions_of, of_set
from elasticflow.compiler.entry_point.source_code import (
    Call,
    Code,
    Name,
    call,
    flat,
    given,
    layout,
    literal,
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
from elasticflow.protocol.snapshot_settings import SnapshotSettings
from elasticflow.run_folder import path_from_root
from elasticflow.system.units import intervals

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from elasticflow.compiler.entry_point.factories import CallForms
    from elasticflow.compiler.entry_point.functions import Function
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.types import TextWithSecrets

_USUAL_SETTINGS = SnapshotSettings()
Line = Code | None
"""What stands in a marked line, after what the template has up to `= ` or `return `; None: no line."""


def values_of(job: Job, *, root: str, digest: str, forms: CallForms, taken: Iterable[str]) -> dict[str, Line]:
    """Return all values of train.py's template except those of its header.

    Args:
        root: The project root as seen from the launch folder.
        taken: Names that have a meaning in train.py.
    """
    functions = functions_of(job, forms, taken)
    return {
        "functions": "\n\n\n".join(each.text() for each in functions.values()),
        **_constants(job, root, forms),
        "join": _join(job, digest),
        "sharding": _sharding(job),
        "gradients": _gradients(job, forms),
        **_made_of_data(job, functions),
        **_made_of_model(job, functions, forms),
        **evaluation(job, functions, forms),
        "hooks": _hooks(job, functions, forms),
        "keep": _keep(job, functions, forms),
        **_train(job, forms),
    }


def _made_of_data(job: Job, functions: Mapping[str, Function]) -> dict[str, Line]:
    """Return the lines of main that open the training data, order its samples, and make the batches."""
    table, order, collate = job.dataset, functions.get("build_order"), functions.get("build_collate")
    options = {
        "size": "GLOBAL_BATCH_SIZE",
        **({"epochs": "EPOCHS"} if job.train.epochs is not None else {"steps": "STEPS"}),
        "tail": "TAIL",
        "num_workers": "NUM_WORKERS",
        **({} if table.micro_batch_size is None else {"micro_batch_size": "MICRO_BATCH_SIZE"}),
        **({} if order is None else {"order": "order"}),
        **({} if table.shards is None else {"shards": "SHARDS"}),
        **({} if collate is None else {"collate": "collate"}),
    }
    of_data: dict[str, Any] = {} if table.samples is None else {"samples": Name("SAMPLES")}
    of_data |= {"values": Name("VALUES")} if values_of_data(job) else {}
    of_shards = call("open_shards", "worker", "build_dataset", quoted("train"), "SHARDS")
    return {
        "tf32": None if job.train.tf32 is None else f"float32.set_tf32(enabled={job.train.tf32})",
        "prepare": None if table.prepare is None else call("prepare_data", "worker", "prepare"),
        "dataset": opened(functions["build_dataset"], "train", of_data)
        if table.shards is None
        else of_shards,
        "order": None if order is None else order.call(),
        "collate": None if collate is None else collate.call(),
        "batches": call("run.batches", "dataset", **{key: Name(name) for key, name in options.items()}),
    }


def _made_of_model(job: Job, functions: Mapping[str, Function], forms: CallForms) -> dict[str, Line]:
    """Return the lines of main that make the model and the objects that change it."""
    optimizer = functions["build_optimizer"].call()
    groups, scheduler = functions.get("build_parameter_groups"), functions.get("build_scheduler")
    average, moves = functions.get("build_average"), forms.step_moves_optimizers
    name, is_sharded = _name_of_optimizer(forms), job.parallel is not None
    is_deferred = job.parallel is not None and job.parallel.init == "meta"
    filled = {"build": Name("build")} if is_deferred else {}

    def built(function: Function) -> Call:
        made = function.call()
        return Call("build.call", (("", made.name), *made.arguments)) if is_deferred else made

    return {
        "build": "DeferredBuild(resumes=run.finds_snapshot())" if is_deferred else None,
        "model": built(functions["build_model"]),
        # A sharded model is moved block by block.
        "to_device": None if is_sharded else "model.to(run.device)",
        "load_weights": None if job.model.weights is None else "load_weights(model, WEIGHTS)",
        "channels_last": "to_channels_last(model)" if job.train.channels_last else None,
        "compile": "model.compile()" if job.train.compile else None,
        "whole_average": built(average) if average is not None and is_sharded else None,
        "shard_model": call("shard_model", "worker", "model", "SHARDING", **filled) if is_sharded else None,
        "shard_average": call("shard_model", "worker", "average.module", "SHARDING", **filled)
        if average is not None and is_sharded
        else None,
        "optimizer": None if moves else optimizer,
        "optimizers": optimizer if moves else None,
        "log_groups": None if groups is None else call("log_groups", "worker", name, groups.call()),
        "scheduler": None if scheduler is None else scheduler.call(),
        "follow": None
        if job.lr_scheduler is None or job.lr_scheduler.metric is None
        else "scheduler.follow(worker)",
        "scaler": "GradScaler(worker.device.type)" if _is_fp16(job, forms) else None,
        "average": None if average is None or is_sharded else average.call(),
    }


def _name_of_optimizer(forms: CallForms) -> str:
    return "optimizers" if forms.step_moves_optimizers else "optimizer"


def _is_fp16(job: Job, forms: CallForms) -> bool:
    return job.train.precision == "fp16" and not forms.step_moves_optimizers


def evaluation(job: Job, functions: Mapping[str, Function], forms: CallForms) -> dict[str, Code | None]:
    """Return the lines of main that make the evaluation of one set or of several; none for a job without evaluation."""
    if job.evaluation is None:
        return {"test_set": None, "evaluation": None}
    step = "None" if forms.step_moves_optimizers else "training_step"
    stop_when = {} if job.train.stop_when is None else {"stop_when": _stop_when(job, job.train.stop_when)}
    if isinstance(job.evaluation, EvaluationTable):
        table = job.evaluation
        options = {**_evaluation_options(job, "", table, functions, forms), **stop_when}
        return {
            "test_set": _test_set(job, "", table, functions),
            "evaluation": call("Evaluation", "worker", "model", step, "test_set", "run.schedule", **options),
        }
    made = {}
    for name, table in job.evaluations.items():
        dataset = _test_set(job, name, table, functions)
        options = _evaluation_options(job, name, table, functions, forms)
        made[name] = call("Evaluation", "worker", "model", step, dataset, "run.schedule", **options)
    sets = literal(made, "evaluation")
    return {"test_set": None, "evaluation": call("Evaluations", "worker", "run.schedule", sets, **stop_when)}


def opened(build: Function, name: str, options: Mapping[str, Any]) -> Call:
    """Return the call that opens the data set called *name*, made by *build*."""
    return call("open_dataset", "worker", build.reference(), quoted(name), **options)


def _test_set(job: Job, name: str, table: EvaluationTable, functions: Mapping[str, Function]) -> Call:
    apart = {"apart_from": Name("dataset")} if is_to_be_apart(job.dataset, table) else {}
    return opened(functions[of_set("build_evaluation_dataset", name)], dotted(path_of_set(name)), apart)


def _evaluation_options(
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
        **_evaluation_collate(functions.get(of_set("build_evaluation_collate", name)), functions),
        **({} if job.model.loss else {"uses_loss": False}),
        **({} if weights == "raw" else {"average": Name("average")}),
        **({"also_raw": True} if weights == "both" else {}),
        **({} if table.samples is None else {"samples": table.samples}),
    }


def _evaluation_collate(own: Function | None, functions: Mapping[str, Function]) -> dict[str, Any]:
    if own is not None:
        return {"collate": own.call()}
    return {"collate": Name("collate")} if "build_collate" in functions else {}


def _stop_when(job: Job, text: str) -> Call:
    rule = parse_stop_when(text)
    options = given(evaluations=rule.evaluations, by=rule.by or None, bound=rule.bound)
    return call("StopWhen", quoted(rule.metric), quoted(str(better_of(rule, job.evaluation))), **options)


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


def _hooks(job: Job, functions: Mapping[str, Function], forms: CallForms) -> Line:
    if "build_hooks" not in functions:
        return None
    options: dict[str, Any] = {} if forms.step_moves_optimizers else {"precision": Name("PRECISION")}
    options |= {"is_exact": True} if _is_exact(job) else {}
    options |= {"average": Name("average")} if job.train.ema is not None else {}
    made = call("Hooks", "worker", "model", **options)
    return call("run.call", Call("Hooks", (*made.arguments, ("**", functions["build_hooks"].call()))))


def _train(job: Job, forms: CallForms) -> dict[str, Line]:
    optimizer, moves, table = _name_of_optimizer(forms), forms.step_moves_optimizers, job.lr_scheduler
    parameters = {
        "run": "Run",
        "batches": "Iterable[Batch]",
        "model": "nn.Module",
        optimizer: "Any" if moves else "Optimizer",
        **({} if table is None or table.metric is not None else {"scheduler": "Any"}),
        **({"scaler": "GradScaler"} if _is_fp16(job, forms) else {}),
        **({} if job.train.ema is None else {"average": "AveragedModel"}),
    }
    definition = Call("def train", tuple((f"{name}: ", kind) for name, kind in parameters.items()))
    step_scheduler = None
    if table is not None and table.metric is None:
        step_scheduler = f"run.worker.step_scheduler(scheduler, {optimizer})"
    if table is not None and table.interval == "epoch":
        step_scheduler = f"if batch.end.is_epoch_end:\n            {step_scheduler}"
    passed = ("model", "part.data", *(["optimizers"] if moves else []))
    is_scaled = _is_fp16(job, forms)
    return {
        "train.def": layout(definition, after=" -> None:"),
        "train": call("train", *parameters),
        "zero_grad": None if moves else "optimizer.zero_grad()",
        "gradients_of_step": f"run.gradients(lambda part: training_step({', '.join(passed)}), batch)",
        "unscale": "scaler.unscale_(optimizer)" if is_scaled else None,
        "gradient_norm": None if moves else _gradient_norm(job),
        "move": None if moves else "scaler.step(optimizer)" if is_scaled else "optimizer.step()",
        "update_scale": "scaler.update()" if is_scaled else None,
        "average_step": None if job.train.ema is None else "average.update_parameters(model)",
        "step_scheduler": step_scheduler,
    }


def _gradient_norm(job: Job) -> Line:
    if job.optimizer.clip_grad_norm is None:
        return "run.worker.log_grad_norm_of(model)" if job.logging.grad_norm else None
    clip = call("nn.utils.clip_grad_norm_", "model.parameters()", "CLIP_GRAD_NORM")
    return clip if job.logging.grad_norm is False else call("run.worker.log_grad_norm", clip)


def _constants(job: Job, root: str, forms: CallForms) -> dict[str, Line]:
    """Return the values of train.py's constants; a constant that this job does not use has no line."""
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
        "samples": job.dataset.samples,
        "values": values_of_data(job) or None,
    }
    return {
        **{key: literal(value, key) for key, value in values.items()},
        **{key: None if value is None else literal(value, key) for key, value in optional.items()},
        "root": f"(HERE / {quoted(root)}).resolve()",
        "path": f"[str(ROOT / part) for part in {flat(literal(job.job.path, 'path'))}]",
        "weights": None if job.model.weights is None else flat(from_root(job.model.weights)),
        "snapshots": _snapshot_settings(job),
    }


def _is_exact(job: Job) -> bool:
    return job.train.consistency == "exact"


def from_root(path: str) -> Code:
    """Return the code of a path or URL; relative paths are relative to the project, in whatever folder train.py runs."""
    relative = path_from_root(path)
    return quoted(path) if relative is None else call("str", f"ROOT / {quoted(relative)}")


def _snapshot_settings(job: Job) -> Code:
    settings = job.snapshots.settings()
    options = {
        name: value for name, value in vars(settings).items() if value != getattr(_USUAL_SETTINGS, name)
    }
    keep = call("Keep", **given(**vars(settings.keep)))
    options |= {"uri": settings.uri, "every": settings.every, "keep": keep}
    if settings.uri is not None:
        secret = job.secrets.get(("snapshots", "uri"))
        options["uri"] = Name(flat(from_root(settings.uri))) if secret is None else _looked_up(secret)
    if settings.options:
        options["options"] = _without_secrets(settings.options, job.secrets, ("snapshots", "options"))
    return call("SnapshotSettings", **{name: options[name] for name in vars(settings) if name in options})


def _without_secrets(value: Any, secrets: Mapping[KeyPath, TextWithSecrets], path: KeyPath) -> Any:
    """Return a value in which texts that hold secrets are replaced by code that looks them up."""
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


def _join(job: Job, digest: str) -> Code:
    """Return the call of `join_job`, without arguments that have their defaults."""
    options = {
        "name": job.job.name,
        "digest": digest[:16],
        "folder": Name("HERE"),
        "seed": Name("SEED"),
        "snapshots": Name("SNAPSHOTS"),
        "gradients": Name("GRADIENTS"),
        "shard": None if job.parallel is None else Name("SHARDING"),
        "device": _unless(job.nodes.device_of_workers, "auto"),
        "compare_replicas": job.train.compare_replicas,
        "log_every": _unless(int(job.logging.every.split()[0]), 1),
        "log_level": _unless(job.logging.level, "info"),
        # The order in which a kernel sums depends on the number of threads.
        "threads": job.train.threads or (1 if _is_exact(job) else None),
        "measures": _measures(job),
    }
    return call("join_job", **given(**options))


def _measures(job: Job) -> Code | None:
    """Return the measures that the log has of a step beside its loss; None: the default measures."""
    options = given(
        count_name=job.logging.count_name,
        flops_per_sample=job.model.flops_per_sample,
        peak_flops=job.logging.peak_flops,
        is_half=(job.model.flops_per_sample is not None and job.train.precision != "fp32") or None,
    )
    return call("Measures", **options) if options else None


def _unless(value: Any, usual: Any) -> Any:
    return None if value == usual else value


def _gradients(job: Job, forms: CallForms) -> Code:
    options: dict[str, Any]
    if forms.step_moves_optimizers:
        clips = job.optimizer.clip_grad_norm is not None
        options = {
            "moves_optimizers": True,
            "clip_grad_norm": Name("CLIP_GRAD_NORM") if clips else None,
            "logs_grad_norm": False if job.logging.grad_norm is False else None,
        }
    else:
        ddp = {key: value for key, value in job.ddp if value not in (None, False)}
        options = {
            "precision": Name("PRECISION"),
            "on_nonfinite": job.train.on_nonfinite,
            "virtual_shards": job.train.virtual_shards if _is_exact(job) else None,
            "ddp": None if _is_exact(job) else ddp or None,
        }
    return call("elasticflow.Gradients", **given(**options))


def _sharding(job: Job) -> Line:
    if job.parallel is None:
        return None
    options = given(
        shard=job.parallel.shard,
        wrap=tuple(job.parallel.wrap) or None,
        reshard_after_forward=None if job.parallel.reshard_after_forward else False,
        offload=job.parallel.offload,
    )
    return call("elasticflow.Sharding", **options)


def _keep(job: Job, functions: Mapping[str, Function], forms: CallForms) -> Code:
    optimizer, included = _name_of_optimizer(forms), functions.get("build_included")
    parts = {
        "model": "model",
        optimizer: optimizer,
        "scheduler": "scheduler" if job.lr_scheduler else None,
        "scaler": "scaler" if _is_fp16(job, forms) else None,
        "ema": "average" if job.train.ema is not None else None,
        "evaluation": "evaluation" if job.evaluation else None,
    }
    named = {part: Name(name) for part, name in given(**parts).items()}
    return call("run.keep", **named, **({} if included is None else {"include": included.call()}))
