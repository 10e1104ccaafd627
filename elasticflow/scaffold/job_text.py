"""The text of a job file that explains itself: the most common keys, each with a comment."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics.toml_literals import to_toml
from elasticflow.jobfile.entry_points.object_arguments import object_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SCHEMA_NAME = "job.schema.json"
_COMMENTS_AT = 44
_COMMENTED = re.compile(r'((?:"(?:\\.|[^"\\])*"|[^"])*?) \| (.*)')  # the first bar outside of quotes
_COMMENTS = {
    ("model", "entry"): "any callable that returns an nn.Module",
    ("model", "loss"): 'called with outputs and targets; or step = "module:function"',
    ("model", "step"): "called with model and batch; returns the loss",
    ("dataset", "entry"): "returns an object with __len__ and __getitem__",
    ("dataset", "global_batch_size"): "samples per step, the same at any number of workers",
}
_RESTARTS = (
    "[restarts]",
    "budget = 3 | failures that are forgiven; resizes and preemptions are free",
    "",
)
_SNAPSHOTS = (
    "[snapshots]",
    'every = ["10 min", "1 epoch"] | whichever comes first; always at the end and when asked to leave',
    "keep = { last = 3 }",
    '# uri = "s3://bucket/prefix" | any fsspec URL; default: inside the run folder, runs/',
)
_GRACE = (
    "# [snapshots]",
    '# grace = "30 s" | from SIGTERM to the end of a worker: time for a checkpoint of its own',
)
_BESIDE = {
    "optimizer": "# clip_grad_norm = 1.0",
    "dataset": "# num_workers = 2 | loader processes of each worker",
}


def text_of(
    name: str,
    tables: Mapping[str, Mapping[str, Any]],
    *,
    epochs: int,
    workers: int | str,
    path: str = ".",
    evaluation: Iterable[str] = (),
) -> str:
    """Return the text of a job file for a model.

    Args:
        tables: Keys of `[model]`, `[optimizer]` and `[dataset]`, in order.
        epochs: Passes over the data.
        path: Folders of the job's modules, from the project's root.
    """
    lines = [*_head(name), "seed = 1234 | of the samples' order and of every random number"]
    if path != ".":
        lines.append(f"path = [{to_toml(path)}] | where modules are found, from the project's root")
    lines.append("")
    for table, keys in tables.items():
        lines += [f"[{table}]", *_keys(table, keys), ""]
    lines += [
        *evaluation,
        "[train]",
        f"epochs = {epochs} | or steps = 2000",
        '# consistency = "exact" | the same bits at any number of workers',
        "",
        *_nodes(workers),
        '# endpoint = "host:29400" | where they meet',
        "",
        *_RESTARTS,
        *_SNAPSHOTS,
    ]
    return _laid_out(lines)


def text_of_script(
    name: str,
    entry: str,
    *,
    args: Iterable[str],
    required: Iterable[str],
    preload: Iterable[str],
    workers: int | str,
    why: str | None,
    is_joined: bool,
) -> str:
    """Return the text of a job file that runs a training script as it is.

    Args:
        entry: The script, from the project's root.
        required: Required arguments of its parser that are missing in *args*.
        why: Reason for the number of workers, if it comes from the script.
        is_joined: The script calls `elasticflow.join`, so the job file sets its seed and its snapshots.
    """
    lines = _head(name)
    if is_joined:
        lines.append(
            "seed = 1234 | of the samples' order; what elasticflow.join(seed=...) says without a job file"
        )
    asked = ", ".join(required)
    comment = f"it asks for {asked}" if asked else "as on its command line, each word by itself"
    lines += [
        "",
        "[script]",
        f'entry = {to_toml(entry)} | as torchrun starts it; or module = "pkg.train"',
        f"args = {to_toml(list(args))} | {comment}",
        f"# preload = {to_toml(list(preload) or ['torchvision'])} | imported once for all workers and restarts, as torch is",
        '# silence = "20 min" | workers that print nothing for so long hang: a failure',
        "",
        *_nodes(workers, why),
        "",
        *_RESTARTS,
        *(_SNAPSHOTS if is_joined else _GRACE),
    ]
    return _laid_out(lines)


def _laid_out(lines: Iterable[str]) -> str:
    """Return lines as a text with the comments, the parts after ` | `, aligned in one column."""
    return "\n".join(map(_aligned, lines)) + "\n"


def _aligned(line: str) -> str:
    parts = _COMMENTED.fullmatch(line)
    if parts is None:
        return line
    code, comment = parts.groups()
    return f"{code:<{_COMMENTS_AT}}# {comment}" if len(code) < _COMMENTS_AT else f"{code}  # {comment}"


def _head(name: str) -> list[str]:
    return [
        f"#:schema {SCHEMA_NAME}",
        "# What may stand here is in the schema, which editors show; `elasticflow guide CODE` explains what is refused.",
        "",
        "[job]",
        f"name = {to_toml(name)}",
    ]


def _nodes(workers: int | str, why: str | None = None) -> list[str]:
    why = why or 'workers per machine; "auto": one per GPU, else per core'
    return [
        "[nodes]",
        f"nproc_per_node = {to_toml(workers)} | {why}",
        "# max = 4 | machines; others join: run JOB --join HOST:PORT",
    ]


def _keys(table: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table; object arguments come last, each as a table of its own."""
    args = keys.get("args", {})
    objects = {name: made for name, value in args.items() if (made := object_of(value)) is not None}
    plain = {name: value for name, value in args.items() if name not in objects}
    for key, value in keys.items():
        if key != "args":
            comment = _COMMENTS.get((table, key))
            yield f"{key} = {to_toml(value)}" + (f" | {comment}" if comment else "")
        elif not objects and plain:
            yield f"args = {to_toml(plain)}"
        else:  # no inline table may stand beside tables of arguments
            yield from (f"args.{name} = {to_toml(each)}" for name, each in plain.items())
    if table in _BESIDE:
        yield _BESIDE[table]
    for name, made in objects.items():
        yield ""
        yield f"[{table}.args.{name}]"
        yield f"entry = {to_toml(made.entry)}"
        if made.is_partial:
            yield "partial = true"
        if made.args:
            yield f"args = {to_toml(made.args)}"
