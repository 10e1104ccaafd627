"""The text of a job file that teaches: the keys most used, a line of comment for each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elasticflow.jobfile.diagnostics.toml_literals import to_toml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMA_NAME = "job.schema.json"
_COMMENTS_AT = 44


@dataclass(frozen=True)
class Draft:
    """What is to be written into a job file.

    Attributes:
        name: The job's.
        path: Where factories are found, from the project's root.
        model: `module:attribute`.
        dataset: `module:attribute`.
        loss: `module:attribute`; called with outputs and targets.
        step: `module:attribute` that takes the loss's place.
        loss_is_guessed: Nothing told it.
        arguments: Arguments of `model`, `optimizer` and `dataset`, by table.
        evaluation: Lines of an evaluation table, of the example.
        epochs: Passes over the data.
        global_batch_size: Samples per step.
        workers: Per machine.
    """

    name: str
    model: str
    dataset: str
    path: str = "."
    loss: str | None = "torch.nn.functional:cross_entropy"
    step: str | None = None
    loss_is_guessed: bool = False
    arguments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    evaluation: tuple[str, ...] = ()
    epochs: int = 5
    global_batch_size: int = 32
    workers: int | str = 2


def text_of(draft: Draft) -> str:
    """Return the job file's text."""
    return "\n".join(aligned(line) for line in _lines(draft)) + "\n"


def _lines(draft: Draft) -> Iterator[str]:
    yield f"#:schema {SCHEMA_NAME}"
    yield "# What may stand here is in the schema, which editors show; `elasticflow explain` explains what is refused."
    yield ""
    yield "[job]"
    yield f"name = {to_toml(draft.name)}"
    yield "seed = 1234 | of the samples' order and of every random number"
    if draft.path != ".":
        yield f"path = [{to_toml(draft.path)}] | where modules are found, from the project's root"
    yield ""
    yield "[model]"
    yield f"entry = {to_toml(draft.model)} | any callable that returns an nn.Module"
    yield from _arguments(draft, "model")
    if draft.step is not None:
        yield f"step = {to_toml(draft.step)} | called with model and batch; returns the loss"
    else:
        guessed = "a guess: " if draft.loss_is_guessed else ""
        yield f'loss = {to_toml(draft.loss)} | {guessed}called with outputs and targets; or step = "module:function"'
    yield from _objects(draft, "model")
    yield ""
    yield "[optimizer]"
    yield 'entry = "torch.optim:AdamW"'
    yield f"args = {to_toml({'lr': 1e-3, **draft.arguments.get('optimizer', {})})}"
    yield "# clip_grad_norm = 1.0"
    yield ""
    yield "[dataset]"
    yield f"entry = {to_toml(draft.dataset)} | returns an object with __len__ and __getitem__"
    yield from _arguments(draft, "dataset")
    yield f"global_batch_size = {draft.global_batch_size} | samples per step, the same at any number of workers"
    yield "# num_workers = 2 | loader processes of each worker"
    yield from _objects(draft, "dataset")
    yield ""
    yield from draft.evaluation
    yield "[train]"
    yield f"epochs = {draft.epochs} | or steps = 2000"
    yield '# consistency = "exact" | the same bits at any number of workers'
    yield ""
    yield "[nodes]"
    yield f'nproc_per_node = {to_toml(draft.workers)} | workers per machine; "auto": one per GPU, else per core'
    yield "# max = 4 | machines; others join: run JOB --join HOST:PORT"
    yield '# endpoint = "host:29400" | where they meet'
    yield ""
    yield "[restarts]"
    yield "budget = 3 | failures that are forgiven; resizes and preemptions are free"
    yield ""
    yield "[snapshots]"
    yield 'every = ["10 min", "1 epoch"] | whichever comes first; always at the end and when asked to leave'
    yield "keep = { last = 3 }"
    yield '# uri = "s3://bucket/prefix" | any fsspec URL; default: inside the run folder, runs/'


def _arguments(draft: Draft, table: str) -> Iterator[str]:
    plain = {name: value for name, value in draft.arguments.get(table, {}).items() if not is_object(value)}
    if plain:
        yield f"args = {to_toml(plain)}" if not _objects_of(draft, table) else f"args.{_dotted(plain)}"


def _dotted(plain: Mapping[str, Any]) -> str:
    """Return plain arguments as dotted keys: beside tables of arguments no inline table may stand."""
    return "\nargs.".join(f"{name} = {to_toml(value)}" for name, value in plain.items())


def _objects(draft: Draft, table: str) -> Iterator[str]:
    """Yield the arguments that are objects, each as a table of its own, which goes on to the end of the table."""
    for name, value in _objects_of(draft, table).items():
        yield ""
        yield f"[{table}.args.{name}]"
        yield f"entry = {to_toml(value['entry'])}"
        if value.get("args"):
            yield f"args = {to_toml(value['args'])}"


def _objects_of(draft: Draft, table: str) -> dict[str, Any]:
    return {name: value for name, value in draft.arguments.get(table, {}).items() if is_object(value)}


def is_object(value: Any) -> bool:
    """Return whether an argument is an object that is made by an entry of its own."""
    return isinstance(value, dict) and "entry" in value


def aligned(line: str) -> str:
    """Return a line with its comment, the part behind ` | `, in the column of all comments."""
    code, bar, comment = line.partition(" | ")
    if not bar:
        return line
    return f"{code:<{_COMMENTS_AT}}# {comment}" if len(code) < _COMMENTS_AT else f"{code}  # {comment}"
