"""What `elasticflow init` writes, checks and says at the end."""

from __future__ import annotations

import os
from importlib import util
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, shortest_path
from elasticflow.errors import ANSWER_IS_NO, FINISHED, ElasticflowError
from elasticflow.scaffold import begin
from elasticflow.scaffold.job_text import text_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.write.init_answers import Answers, Asked
    from elasticflow.jobfile.load import LoadedJob

_DEEP_LIMIT_S = 120


def print_only(found: Answers) -> int:
    """Print the job file; what would be written beside it is named on standard error."""
    click.echo(text_of(found.draft), nl=False)
    for name in found.code:
        click.echo(f"note: {name} would be written too", err=True)
    return FINISHED


def finish(
    found: Answers, asked: Asked, *, gitignore: bool | None, pre_commit: bool, deep: bool | None
) -> int:
    """Write everything, check the job as `validate --deep` does, and say how to go on; return the exit code.

    *deep*: try the job out; None: where torch is installed.

    Raises:
        ScaffoldError: a file is there already; nothing was written.
    """
    files = {found.root / name: text for name, text in found.code.items()}
    files = {path: text for path, text in files.items() if not begin.holds_already(path, text)}
    files[found.job_file] = text_of(found.draft)
    configuration, by_hand = begin.pre_commit_hook(found.root) if pre_commit else ({}, "")
    begin.write(files | begin.schema_file(found.job_file) | configuration)
    for path in (*files, *configuration):
        click.echo(f"{paint('wrote', 'green')} {shortest_path(path.absolute())}")
    _ignore(found.root, asked, gitignore=gitignore)
    for text in found.notes:
        note(text)
    if by_hand:
        note(f"add to {begin.PRE_COMMIT}, under repos:\n{by_hand}")
    return _checked(found, deep=deep)


def _ignore(root: Path, asked: Asked, *, gitignore: bool | None) -> None:
    if begin.ignores_runs(root) is not False or gitignore is False:
        return
    question = "add runs/, where snapshots and logs go, to .gitignore?"
    if gitignore is None and asked.may_ask and not click.confirm(question, default=True):
        return
    begin.ignore_runs(root)
    click.echo(f"{paint('added', 'green')} /runs/ to {shortest_path(root / '.gitignore')}")


def _checked(found: Answers, *, deep: bool | None) -> int:
    from elasticflow.jobfile.diagnostics.render_text import render
    from elasticflow.jobfile.load import load_job

    loaded = load_job(found.job_file, environment=os.environ)
    told = [each for each in loaded.diagnostics if each.severity != "note"]
    if told:
        click.echo(render(told), err=True)
    if loaded.job is None:
        return ANSWER_IS_NO
    has_torch = util.find_spec("torch") is not None
    if deep is False or (deep is None and not has_torch):
        why = "" if has_torch else ", since torch is not installed here"
        note(f"not tried out{why}: elasticflow validate --deep {shortest_path(found.job_file.absolute())}")
    elif not _tried_out(loaded, found):
        return ANSWER_IS_NO
    _say_what_is_next(found)
    return FINISHED


def _tried_out(loaded: LoadedJob, found: Answers) -> bool:
    """Return whether the job's own code does what a run needs; what is wrong is told."""
    from elasticflow.cli.write.deep_options import DeepRequest, report_text, try_out_loaded
    from elasticflow.compiler.inputs.missing_imports import require_importable
    from elasticflow.jobfile.diagnostics.render_text import render

    place = shortest_path(found.job_file.absolute())
    is_to_be_proved = found.has_made_up_data or found.draft.loss_is_guessed
    step = "-step" if is_to_be_proved and found.to_write is None else ""
    click.echo(f"{paint('trying it out', dim=True)}  elasticflow validate --deep{step} {place}")
    try:
        require_importable(loaded)
        report, findings = try_out_loaded(loaded, (), DeepRequest(bool(step), _DEEP_LIMIT_S))
    except ElasticflowError as error:
        click.echo(error.message, err=True)
        is_good = False
    else:
        click.echo(render(findings) if findings else f"{paint('works', 'green')} {report_text(report)}")
        is_good = all(each.severity != "error" for each in findings)
    if not is_good:
        click.echo(
            f"the job is written; what stands above keeps it from training. Then: elasticflow run {place}"
        )
    return is_good


def note(text: str) -> None:
    """Print what a person should know."""
    click.echo(f"{paint('note', 'yellow')}  {text}")


def _say_what_is_next(found: Answers) -> None:
    job_file = found.job_file
    shown = shortest_path(job_file.absolute())
    click.echo(f"\n{paint('next', bold=True)}")
    if found.to_write is not None:
        click.echo(f"  write the loss in {found.to_write}: until then a run fails at its first step")
    for command, does in (
        (f"elasticflow plan {shown}", "what a run would do"),
        (f"elasticflow run {shown}", "train; Ctrl-C and `elasticflow resume` at any time"),
        (f"elasticflow doctor {shown}", "whether this machine has what the job needs"),
    ):
        click.echo(f"  {command:<{len(shown) + 22}} {does}")
