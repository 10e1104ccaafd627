"""The text of a job file that teaches: the keys most used, a line of comment for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics.toml_literals import to_toml
from elasticflow.jobfile.entry_points.object_arguments import object_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SCHEMA_NAME = "job.schema.json"
_COMMENTS_AT = 44
_COMMENTS = {
    ("model", "entry"): "any callable that returns an nn.Module",
    ("model", "loss"): 'called with outputs and targets; or step = "module:function"',
    ("model", "step"): "called with model and batch; returns the loss",
    ("dataset", "entry"): "returns an object with __len__ and __getitem__",
    ("dataset", "global_batch_size"): "samples per step, the same at any number of workers",
}
_BESIDE = {
    "optimizer": "# clip_grad_norm = 1.0",
    "dataset": "# num_workers = 2 | loader processes of each worker",
}


@dataclass(frozen=True)
class Draft:
    """What is to be written into a job file.

    Attributes:
        name: The job's.
        tables: Keys of `[model]`, `[optimizer]` and `[dataset]`, in their order.
        path: Where factories are found, from the project's root.
        evaluation: Lines of an evaluation table.
        epochs: Passes over the data.
        workers: Per machine.
    """

    name: str
    tables: Mapping[str, Mapping[str, Any]]
    path: str = "."
    evaluation: tuple[str, ...] = ()
    epochs: int = 5
    workers: int | str = 2


def text_of(draft: Draft) -> str:
    """Return the job file's text."""
    return laid_out(_lines(draft))


def laid_out(lines: Iterable[str]) -> str:
    """Return a job file's text, with its comments, the parts of lines behind ` | `, in one column."""
    return "\n".join(_aligned(line) for line in lines) + "\n"


def _aligned(line: str) -> str:
    code, bar, comment = line.partition(" | ")
    if not bar:
        return line
    return f"{code:<{_COMMENTS_AT}}# {comment}" if len(code) < _COMMENTS_AT else f"{code}  # {comment}"


def _lines(draft: Draft) -> Iterator[str]:
    yield from head(draft.name)
    yield "seed = 1234 | of the samples' order and of every random number"
    if draft.path != ".":
        yield f"path = [{to_toml(draft.path)}] | where modules are found, from the project's root"
    yield ""
    for table, keys in draft.tables.items():
        yield f"[{table}]"
        yield from _keys(table, keys)
        yield ""
    yield from draft.evaluation
    yield "[train]"
    yield f"epochs = {draft.epochs} | or steps = 2000"
    yield '# consistency = "exact" | the same bits at any number of workers'
    yield ""
    yield from nodes(draft.workers)
    yield '# endpoint = "host:29400" | where they meet'
    yield ""
    yield from restarts()
    yield from snapshots()


def _keys(table: str, keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a table; arguments that are objects come last, each as a table of its own."""
    args = keys.get("args", {})
    objects = {name: made for name, value in args.items() if (made := object_of(value)) is not None}
    plain = {name: value for name, value in args.items() if name not in objects}
    for key, value in keys.items():
        if key != "args":
            comment = _COMMENTS.get((table, key))
            yield f"{key} = {to_toml(value)}" + (f" | {comment}" if comment else "")
        elif not objects and plain:
            yield f"args = {to_toml(plain)}"
        else:  # beside tables of arguments no inline table may stand
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


def head(name: str) -> Iterator[str]:
    """Yield how a job file begins."""
    yield f"#:schema {SCHEMA_NAME}"
    yield "# What may stand here is in the schema, which editors show; `elasticflow explain` explains what is refused."
    yield ""
    yield "[job]"
    yield f"name = {to_toml(name)}"


def nodes(workers: int | str, why: str | None = None) -> Iterator[str]:
    """Yield the table of machines; *why* says why it is that number of workers."""
    yield "[nodes]"
    why = why or 'workers per machine; "auto": one per GPU, else per core'
    yield f"nproc_per_node = {to_toml(workers)} | {why}"
    yield "# max = 4 | machines; others join: run JOB --join HOST:PORT"


def restarts() -> Iterator[str]:
    """Yield the table of restarts."""
    yield "[restarts]"
    yield "budget = 3 | failures that are forgiven; resizes and preemptions are free"
    yield ""


def snapshots() -> Iterator[str]:
    """Yield the table of snapshots."""
    yield "[snapshots]"
    yield 'every = ["10 min", "1 epoch"] | whichever comes first; always at the end and when asked to leave'
    yield "keep = { last = 3 }"
    yield '# uri = "s3://bucket/prefix" | any fsspec URL; default: inside the run folder, runs/'
