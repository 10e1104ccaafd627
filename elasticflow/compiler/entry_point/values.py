"""What this job puts into the marked places of the entry point's template."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from elasticflow.compiler.entry_point.data_values import reading
from elasticflow.compiler.entry_point.factories import Line, factories, included, metric_functions, metrics
from elasticflow.compiler.entry_point.optimizer_values import LEFT_TO_TRAIN_PY, own_steps
from elasticflow.compiler.entry_point.source_code import Call, Code, Name, call, flat, literal, quoted
from elasticflow.jobfile.checks.evaluation_data import is_to_be_apart
from elasticflow.run_folder import path_from_root

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticflow.compiler.entry_point.factory_calls import CallForms
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.jobfile.tables.types import Spelled


@dataclass
class Values:
    """Code by key, flags of the `if` blocks, and the rows of the `each` blocks."""

    code: dict[str, Line]
    flags: dict[str, bool] = field(default_factory=dict)
    lists: dict[str, list[dict[str, Line]]] = field(default_factory=dict)


def values_of(job: Job, *, root: str, forms: CallForms) -> Values:
    """Return all values of the template but those of its header.

    Raises:
        JobRefusedError: an argument that has no Python literal.
    """
    rows: list[dict[str, Line]] = [{"include.import": line} for line, _ in included(job).values()]
    return Values(
        code=_imports(job, forms)
        | _constants(job, root)
        | factories(job, forms)
        | _main(job, forms)
        | (own_steps(job) if forms.step_moves_optimizers else LEFT_TO_TRAIN_PY),
        flags=_flags(job, forms),
        lists={"metrics": metrics(job), "include": rows},
    )


def _flags(job: Job, forms: CallForms) -> dict[str, bool]:
    scheduler = job.lr_scheduler
    return {
        "epochs": job.train.epochs is not None,
        "loss": job.model.loss is not None,
        "weights": job.model.weights is not None,
        "compile": job.train.compile,
        "clip": job.optimizer.clip_grad_norm is not None,
        "clip_here": job.optimizer.clip_grad_norm is not None and not forms.step_moves_optimizers,
        "step_here": job.train.precision != "fp16" and not forms.step_moves_optimizers,
        "fp16": job.train.precision == "fp16",
        "ema": job.train.ema is not None,
        "exact": _is_exact(job),
        "shards": job.dataset.shards is not None,
        "prepare": job.dataset.prepare is not None,
        "collate": job.dataset.collate is not None,
        "evaluation": job.evaluation is not None,
        "scheduler": scheduler is not None,
        "scheduler_step": scheduler is not None and scheduler.interval == "step",
        "scheduler_epoch": scheduler is not None and scheduler.interval == "epoch",
    }


def _imports(job: Job, forms: CallForms) -> dict[str, Line]:
    """Return the imports of what the entry point uses of the runtime."""
    if job.dataset.shards is None:
        data = ["index_loader", "index_schedule"]
    else:
        opens_by_index = job.dataset.prepare or job.evaluation
        data = [*(["index_loader"] if opens_by_index else []), "shard_loader", "shard_schedule"]
    training = ["exact" if _is_exact(job) else "ddp"]
    if forms.step_moves_optimizers:
        training = ["own_steps", *(["several_optimizers"] if job.lr_scheduler is not None else [])]
    snapshots = ["Keep", "Policy", "Snapshots", *(["load_weights"] if job.model.weights else [])]
    unwrap = forms.optimizer_is_method or forms.step_is_method
    rooms = "from elasticflow.runtime"
    return {
        "import.data": f"{rooms}.data import {', '.join(data)}",
        "import.training": f"{rooms}.training import {', '.join(training)}",
        "import.snapshots": f"{rooms}.snapshot.snapshots import {', '.join(snapshots)}",
        "import.evaluation": f"{rooms}.training.evaluation import Evaluation" if job.evaluation else None,
        "import.count": f"{rooms}.training.loss import with_count" if job.model.loss_count else None,
        "import.unwrap": f"{rooms}.training.unwrap import unwrap_model" if unwrap else None,
    }


def _constants(job: Job, root: str) -> dict[str, Line]:
    ddp = {key: value for key, value in job.ddp.model_dump().items() if value not in (None, False)}
    compare = job.train.compare_replicas
    constants = {
        "job": ("JOB", job.job.name),
        "seed": ("SEED", job.job.seed),
        "epochs": ("EPOCHS", job.train.epochs),
        "steps": ("STEPS", job.train.steps),
        "shards": ("SHARDS", job.dataset.shards),
        "global_batch_size": ("GLOBAL_BATCH_SIZE", job.dataset.global_batch_size),
        "micro_batch_size": ("MICRO_BATCH_SIZE", job.dataset.micro_batch_size),
        "tail": ("TAIL", job.dataset.tail),
        "num_workers": ("NUM_WORKERS", job.dataset.num_workers),
        # The number of threads decides how a kernel sums.
        "threads": ("THREADS", job.train.threads or (1 if _is_exact(job) else None)),
        "virtual_shards": ("VIRTUAL_SHARDS", job.train.virtual_shards),
        "precision": ("PRECISION", job.train.precision),
        "on_nonfinite": ("ON_NONFINITE", job.train.on_nonfinite),
        "clip": ("CLIP_GRAD_NORM", job.optimizer.clip_grad_norm),
        "ema": ("EMA", job.train.ema),
        "ddp": ("DDP: dict[str, Any]", ddp),
        "compare": ("COMPARE_REPLICAS", None if compare == "never" else compare),
        "log_every": ("LOG_EVERY", int(job.logging.every.split()[0])),
        "log_level": ("LOG_LEVEL", job.logging.level),
        "best": ("BEST", job.evaluation.best if job.evaluation else None),
        "evaluate_every": ("EVALUATE_EVERY", intervals(job.evaluation.every) if job.evaluation else ()),
    }
    lines: dict[str, Line] = {
        key: (f"{name} = ", literal(value, name)) for key, (name, value) in constants.items()
    }
    return lines | {
        "import.os": "import os" if job.secrets else None,
        "import.torch": "from torch import Tensor, nn"
        if job.model.loss and not job.model.loss_count
        else "from torch import nn",
        "import.scaler": "from torch.amp import GradScaler" if job.train.precision == "fp16" else None,
        "import.scheduler": "from torch.optim.lr_scheduler import LRScheduler" if job.lr_scheduler else None,
        "import.ema": (
            "from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn" if job.train.ema else None
        ),
        "root": ("ROOT = ", f"(HERE / {quoted(root)}).resolve()"),
        "path": f"sys.path[:0] = [str(ROOT / part) for part in {flat(literal(job.job.path, 'path'))}]",
        "snapshots": ("SNAPSHOTS = ", _policy(job)),
    }


def _is_exact(job: Job) -> bool:
    return job.train.consistency == "exact"


def intervals(every: str | list[str]) -> tuple[str, ...]:
    """Return one or several intervals of the job file as several."""
    return (every,) if isinstance(every, str) else tuple(every)


def from_root(path: str) -> Code:
    """Return the code of a path or URL: relative paths are relative to the project, from wherever train.py runs."""
    relative = path_from_root(path)
    return quoted(path) if relative is None else Call("str", (("", f"ROOT / {quoted(relative)}"),))


def _policy(job: Job) -> Code:
    table = job.snapshots
    keep = table.keep.model_dump(include={"last", "best", "every", "within"})
    optional = {
        "integrity": None if table.integrity == "crc32" else table.integrity,
        "memory": table.memory,
        "staging_limit": table.staging_limit,
        "options": _without_secrets(table.options, job.secrets, ("snapshots", "options")) or None,
        "ignore": tuple(table.ignore) or None,
    }
    uri = None if table.uri is None else Name(flat(from_root(table.uri)))
    if uri is not None and ("snapshots", "uri") in job.secrets:
        uri = _looked_up(job.secrets["snapshots", "uri"])
    return call(
        "Policy",
        uri=uri,
        every=intervals(table.every),
        keep=call("Keep", **{key: value for key, value in keep.items() if value is not None}),
        **{key: value for key, value in optional.items() if value is not None},
    )


def _without_secrets(value: Any, secrets: Mapping[KeyPath, Spelled], path: KeyPath) -> Any:
    """Return a value with code that looks them up in place of texts that hold secrets."""
    if path in secrets:
        return _looked_up(secrets[path])
    if isinstance(value, dict):
        return {key: _without_secrets(each, secrets, (*path, key)) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_secrets(each, secrets, (*path, number)) for number, each in enumerate(value)]
    return value


def _looked_up(text: Spelled) -> Name:
    """Return the code of a text that holds secrets."""
    pieces = []
    for each in text:
        if isinstance(each, str):
            pieces.append(quoted(each))
        elif each.default is None:
            pieces.append(f"os.environ[{quoted(each.name)}]")
        else:
            found = f"os.environ.get({quoted(each.name)}) or {quoted(each.default)}"
            pieces.append(f"({found})" if len(text) > 1 else found)
    return Name(" + ".join(pieces))


def _main(job: Job, forms: CallForms) -> dict[str, Line]:
    """Calls in main() whose arguments depend on the job."""
    length = {"epochs": Name("EPOCHS")} if job.train.epochs is not None else {"steps": Name("STEPS")}
    collate = {"collate": Name("collate")} if job.dataset.collate else {}
    return {
        **reading(job, length, collate),
        "weights": call("load_weights", "model", from_root(job.model.weights)) if job.model.weights else None,
        "group": ("step = ", _group(job)),
        **_evaluate(job, collate, "None" if forms.step_moves_optimizers else "training_step"),
        "state": ("state = ", _state(job, "optimizers" if forms.step_moves_optimizers else "optimizer")),
    }


def _group(job: Job) -> Code:
    maker, own = "ddp.DDPStep", {"ddp": Name("DDP")}
    if _is_exact(job):
        maker, own = "exact.ExactStep", {"virtual_shards": Name("VIRTUAL_SHARDS")}
    scaler = {"scaler": Name("scaler")} if job.train.precision == "fp16" else {}
    arguments = ("me", "model", "training_step")
    named = {"precision": Name("PRECISION"), "on_nonfinite": Name("ON_NONFINITE")}
    return call(maker, *arguments, **named, **own, **scaler)


def _evaluate(job: Job, collate: dict[str, Name], step: str) -> dict[str, Line]:
    table = job.evaluation
    if table is None:
        return {}
    functions = {metric: Name(function) for metric, function in metric_functions(job).items()}
    batch_size = table.batch_size or job.dataset.micro_batch_size
    optional: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    uses_loss = {} if job.model.loss else {"uses_loss": False}
    best_of = _best_of(job)
    optional = optional if best_of is None else {**optional, "best_of": best_of}
    weights = measured_weights(job)
    average = {} if weights == "raw" else {"average": Name("average")}
    also_raw = {"also_raw": True} if weights == "both" else {}
    arguments = ("me", "model", step, "test_set", "schedule")
    named = {"every": Name("EVALUATE_EVERY"), "metrics": Name("metrics"), "best": Name("BEST")}
    apart = {"apart_from": Name("dataset")} if is_to_be_apart(job.dataset, table) else {}
    opened = call(
        "index_loader.open_dataset", "me", "build_evaluation_dataset", quoted("evaluation"), **apart
    )
    return {
        "evaluation.open": ("test_set = ", opened),
        "metrics": (
            "metrics = " if functions else "metrics: dict[str, Any] = ",
            literal(functions, "metrics"),
        ),
        "evaluate": (
            "evaluation = ",
            call(
                "Evaluation",
                *arguments,
                **named,
                **optional,
                **collate,
                **uses_loss,
                **average,
                **also_raw,
            ),
        ),
    }


def _best_of(job: Job) -> str | None:
    """Return the entry of what `evaluation.best` names: a metric's, or that of the loss."""
    if job.evaluation is None or job.evaluation.best is None:
        return None
    name = job.evaluation.best.partition(" ")[2]
    return job.evaluation.metrics.get(name) or job.model.loss or job.model.step


def measured_weights(job: Job) -> Literal["ema", "raw", "both"]:
    """Return which weights evaluations measure; of both, the average's metrics are what `best` goes by."""
    chosen = None if job.evaluation is None else job.evaluation.weights
    return chosen or ("raw" if job.train.ema is None else "ema")


def _state(job: Job, optimizer: str) -> Code:
    parts = {
        "model": "model",
        optimizer: optimizer,
        "scheduler": "scheduler" if job.lr_scheduler else None,
        "scaler": "scaler" if job.train.precision == "fp16" else None,
        "ema": "average" if job.train.ema is not None else None,
        "evaluation": "evaluation" if job.evaluation else None,
    }
    include = {name: Name(code) for name, (_, code) in included(job).items()}
    return call(
        "State",
        **{part: Name(name) for part, name in parts.items() if name is not None},
        **({"include": include} if include else {}),
    )
