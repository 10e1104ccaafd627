"""The files, checks and closing lines of `elasticflow init`, for a job and for an example."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, shell_path, shortest_path
from elasticflow.errors import ANSWER_IS_NO, FINISHED, ElasticflowError, JobRefusedError
from elasticflow.scaffold import files, gallery

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from elasticflow.jobfile.load import LoadedJob

_DEEP_LIMIT_S = 120


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """The command line; see `elasticflow init --help`."""

    model_file: Path | None = None
    output: Path | None = None
    name: str | None = None
    model: str | None = None
    dataset: str | None = None
    loss: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    workers: int | str = 1
    overrides: tuple[str, ...] = ()
    args: str | None = None
    may_ask: bool = False


@dataclass(frozen=True)
class NewJob:
    """A job to write, with its code.

    Attributes:
        code: Text of the Python files to write with it, by path from the root.
    """

    root: Path
    job_file: Path
    text: str
    code: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()


def print_only(new_job: NewJob) -> int:
    """Print the job file, and on standard error the names of the other files that would be written."""
    _checked(new_job)
    return _print(new_job.text, new_job.code)


def _print(text: str, others: Iterable[str]) -> int:
    click.echo(text, nl=False)
    for name in others:
        click.echo(f"note: {name} would be written too", err=True)
    return FINISHED


def write(new_job: NewJob, *, pre_commit: bool) -> LoadedJob:
    """Write the job with its code, the schema for editors and, if wanted, a pre-commit hook; return the loaded job.

    Raises:
        JobRefusedError: the job would not be valid; nothing was written.
        ScaffoldError: a file exists already; nothing was written.
    """
    loaded = _checked(new_job)
    written: dict[Path, str | bytes] = {new_job.root / name: text for name, text in new_job.code.items()}
    written[new_job.job_file] = new_job.text
    configuration, by_hand = files.pre_commit_hook(new_job.root) if pre_commit else ({}, "")
    others = {**files.schema_file(new_job.job_file), **configuration}
    files.write({**written, **others})
    for path in (*written, *others):
        click.echo(f"{paint('wrote', 'green')} {shortest_path(path.absolute())}")
    if by_hand:
        note(f"add to {files.PRE_COMMIT}, under repos:\n{by_hand}")
    for text in new_job.notes:
        note(text)
    return loaded or load(new_job.job_file)


def finish(new_job: NewJob, loaded: LoadedJob, *, deep: bool | None) -> int:
    """Try a written job as `validate --deep` does, and print the next commands; return the exit code.

    *deep* says whether to try the job; None: if torch is installed.
    """
    shown = shell_path(new_job.job_file)
    has_torch = util.find_spec("torch") is not None
    if deep is False or (deep is None and not has_torch):
        why = "" if has_torch else ", since torch is not installed here"
        note(f"not tried out{why}: elasticflow validate --deep {shown}")
    elif not tried_out(loaded, new_job.job_file, with_step=bool(new_job.code)):
        return ANSWER_IS_NO
    say_what_is_next(
        [
            (f"elasticflow plan {shown}", "what a run would do"),
            (f"elasticflow run {shown}", "train; Ctrl-C and `elasticflow resume` at any time"),
            (f"elasticflow doctor {shown}", "checks that this machine has all that the job needs"),
        ]
    )
    return FINISHED


def _checked(new_job: NewJob) -> LoadedJob | None:
    """Return the job of the text; None for an example, whose code does not exist yet.

    Raises:
        JobRefusedError: the job would not be valid.
    """
    return None if new_job.code else load(new_job.job_file, new_job.text)


def load(job_file: Path, text: str | None = None) -> LoadedJob:
    """Return the job in a file, or in *text* as the future content of the file, and print warnings about it.

    Raises:
        JobRefusedError: the job is not valid.
    """
    from elasticflow.jobfile.diagnostics.render_text import render
    from elasticflow.jobfile.load import load_job

    texts = {} if text is None else {os.path.realpath(job_file): text.encode()}
    loaded = load_job(Path(shortest_path(job_file.absolute())), environment=os.environ, texts=texts)
    problems = [diagnostic for diagnostic in loaded.diagnostics if diagnostic.severity != "note"]
    if loaded.valid_job is None:
        ending = (
            ""
            if text is None
            else "\n\nnothing was written; it would be the job that the flags give: `elasticflow init --help`"
        )
        raise JobRefusedError(render(problems) + ending)
    if problems:
        click.echo(render(problems), err=True)
    return loaded


def tried_out(loaded: LoadedJob, path: Path, *, with_step: bool) -> bool:
    """Try the job's own code, print the problems, and return whether a run could train."""
    from elasticflow.cli.write.deep_options import DeepRequest, report_text, try_out_loaded
    from elasticflow.compiler.provenance.missing_imports import require_importable
    from elasticflow.jobfile.diagnostics.render_text import render

    job_file = shell_path(path)
    step = "-step" if with_step else ""
    click.echo(f"{paint('trying it out', dim=True)}  elasticflow validate --deep{step} {job_file}")
    try:
        require_importable(loaded)
        report, findings = try_out_loaded(loaded, DeepRequest(bool(step), _DEEP_LIMIT_S))
    except ElasticflowError as error:
        click.echo(error.message, err=True)
        is_good = False
    else:
        click.echo(render(findings) if findings else f"{paint('works', 'green')} {report_text(report)}")
        is_good = all(finding.severity != "error" for finding in findings)
    if not is_good:
        click.echo(
            f"the job is written; what stands above keeps it from training. Then: elasticflow run {job_file}"
        )
    return is_good


def note(text: str) -> None:
    """Print a note for the user."""
    click.echo(f"{paint('note', 'yellow')}  {text}")


def say_what_is_next(rows: Iterable[tuple[str, str]]) -> None:
    """Print the next commands, each with its purpose."""
    rows = list(rows)
    width = max(24, *(len(command) for command, _ in rows))
    click.echo(f"\n{paint('next', bold=True)}")
    for command, does in rows:
        click.echo(f"  {command:<{width}}  {does}")


def print_example(name: str) -> int:
    """Print the example's job file, and on standard error the names of the other files that would be written."""
    contents = dict(gallery.files_of(name))
    return _print(contents.pop(gallery.JOB_FILE).decode(), [f"{name}/{other}" for other in contents])


def finish_example(name: str, folder: Path | None, *, deep: bool | None) -> int:
    """Write an example, print what it lacks here and the next commands; return the exit code.

    Args:
        folder: Target folder; None for a folder with the example's name.
        deep: Train a step of the example.

    Raises:
        ScaffoldError: there is no such example, or a file exists already; nothing was written.
    """
    folder = folder or Path(name)
    contents = {folder / file: content for file, content in gallery.files_of(name).items()}
    files.write(contents, "choose another folder: -o FOLDER")
    for path in contents:
        click.echo(f"{paint('wrote', 'green')} {path}")
    is_ready = _is_ready(folder / gallery.JOB_FILE, deep=bool(deep))
    say_what_is_next(
        [
            (f"cd {shell_path(folder)}", "README.md describes the example"),
            (f"elasticflow run {gallery.JOB_FILE}", "train; Ctrl-C and `elasticflow resume` at any time"),
        ]
    )
    return FINISHED if is_ready else ANSWER_IS_NO


def _is_ready(job_file: Path, *, deep: bool) -> bool:
    """Return whether the example can train on this machine, and print the obstacles."""
    from elasticflow.compiler.provenance.missing_imports import require_importable

    loaded = load(job_file)
    if deep:
        return tried_out(loaded, job_file, with_step=True)
    try:
        require_importable(loaded)
    except JobRefusedError as error:
        click.echo(f"\n{error.message}")
        return False
    return True
