"""`elasticflow init train.py`: a job file that runs a training script as it is, and the way to the next rung."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import counts_of, paint, shell_path
from elasticflow.cli.write.init_files import NewJob, print_only, say_what_is_next, write
from elasticflow.errors import FINISHED, ScaffoldError, ScriptError
from elasticflow.scaffold.candidates import outside
from elasticflow.scaffold.job_text import text_of_script

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.write.init_files import InitOptions
    from elasticflow.lint.script.forms import Form
    from elasticflow.python_source.script import Script

_SLOW = ("transformers", "datasets", "accelerate", "lightning", "torchvision", "timm", "peft", "trl", "torchmetrics", "torchaudio", "pandas", "scipy", "sklearn")  # fmt: skip
_ONE = {
    "alone": "no line of this file trains in several processes; a module that it imports may",
    "unclear": "reading the script did not tell in how many processes it trains: say it here",
    "spawned": "the script can start its own processes",
    "none": "this file shows no training loop: say here in how many processes it trains",
}


def is_script(path: Path) -> bool:
    """Return whether a file trains when it is run, and is not just the module of a model.

    Raises:
        ScriptError: the path is a folder or a notebook.
    """
    from elasticflow.lint.check import read
    from elasticflow.lint.script.forms import trains

    try:
        return trains(read(path, str(path)))
    except ScriptError:
        if path.is_dir() or path.suffix == ".ipynb":
            raise
        return False  # the search for models reports the problem


def finish(
    path: Path,
    options: InitOptions,
    *,
    has_workers: bool,
    only_print: bool,
    pre_commit: bool,
) -> int:
    """Write the job file of a script, print its rung and the changes for the next rung; return the exit code.

    Raises:
        ScaffoldError: a file exists already, or the script lies elsewhere; nothing was written.
        JobRefusedError: the job would not be valid; nothing was written.
        ScriptError: the script cannot be read, or shows no training.
    """
    from elasticflow.cli.write.lint import show_form
    from elasticflow.jobfile.project import project_root_of
    from elasticflow.lint.check import read
    from elasticflow.lint.script.forms import form_of

    script = read(path, str(path))
    form = form_of(script)
    root = project_root_of((options.output or path.parent.absolute() / "job.toml").resolve())
    why = None if has_workers else _ONE.get(form.kind)
    job = _job(path, root, script, form, options, why)
    if only_print:
        return print_only(job)
    write(job, pre_commit=pre_commit)
    show_form(str(path), script, form)
    _tell_findings(path)
    shown = shell_path(job.job_file)
    say_what_is_next(
        [
            (f"elasticflow plan {shown}", "what a run would do"),
            (
                f"elasticflow run {shown}",
                "train; after Ctrl-C, `elasticflow resume` "
                + ("resumes it" if form.rung else "starts it again"),
            ),
            (f"elasticflow lint {shell_path(path)}", "the findings, line by line"),
        ]
    )
    return FINISHED


def _job(path: Path, root: Path, script: Script, form: Form, options: InitOptions, why: str | None) -> NewJob:
    from elasticflow.lint.script.options import required_arguments

    try:
        entry = path.resolve().relative_to(root.resolve()).as_posix()
    except ValueError:
        raise outside(path, root) from None
    try:
        words = tuple(shlex.split(options.args or ""))
    except ValueError as error:
        raise ScaffoldError(
            f"--args {options.args}: {error}", "quote it as for a shell: --args '--lr 0.1'"
        ) from error
    required = [] if words else required_arguments(script)
    name = options.name or _name(path)
    text = text_of_script(
        name,
        entry,
        args=words,
        required=required,
        preload=[name for name in _SLOW if name in script.names.modules],
        workers=1 if why else options.workers,
        why=why,
        is_joined=form.rung > 0,
    )
    asked = f"the script asks for {', '.join(required)}: write them into args before a run"
    job_file = options.output or root / "jobs" / f"{name}.toml"
    return NewJob(root, job_file, text, notes=[asked] if required else [])


def _name(path: Path) -> str:
    """Return a job's name from the name of its script, or from the folder if the script has a common name."""
    stem = path.stem
    if stem in {"train", "main", "run", "__main__"} and (folder := path.resolve().parent.name):
        stem = f"{folder}-{stem}"
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).strip("-_") or "script"


def _tell_findings(path: Path) -> None:
    from elasticflow.cli.write.lint import show_looked_for
    from elasticflow.lint.check import EVERYTHING, lint_file

    found = lint_file(path, str(path))
    told = counts_of(found)
    told = f"{told}: `elasticflow lint {path}` shows the lines" if told else "no warnings"
    click.echo(f"\n{paint('lint', bold=True)}  {told}")
    show_looked_for(found, EVERYTHING)
