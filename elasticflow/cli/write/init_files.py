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

    from elasticflow.cli.write.init_answers import InitOptions, NewJob
    from elasticflow.jobfile.load import LoadedJob

_DEEP_LIMIT_S = 120


def print_only(new_job: NewJob) -> int:
    """Print the job file, and on standard error the names of the other files that would be written."""
    click.echo(text_of(new_job.draft), nl=False)
    for name in new_job.code:
        click.echo(f"note: {name} would be written too", err=True)
    return FINISHED


def finish(
    new_job: NewJob, options: InitOptions, *, gitignore: bool | None, pre_commit: bool, deep: bool | None
) -> int:
    """Write everything, check the job as `validate --deep` does, and say how to go on; return the exit code.

    *deep* says whether to try the job out; None: where torch is installed.

    Raises:
        ScaffoldError: a file exists already; nothing was written.
    """
    files = {new_job.root / name: text for name, text in new_job.code.items()}
    files = {path: text for path, text in files.items() if not begin.holds_already(path, text)}
    files[new_job.job_file] = text_of(new_job.draft)
    configuration, by_hand = begin.pre_commit_hook(new_job.root) if pre_commit else ({}, "")
    begin.write(files | begin.schema_file(new_job.job_file) | configuration)
    for path in (*files, *configuration):
        click.echo(f"{paint('wrote', 'green')} {shortest_path(path.absolute())}")
    offer_to_ignore_runs(new_job.root, may_ask=options.may_ask, gitignore=gitignore)
    for text in new_job.notes:
        note(text)
    if by_hand:
        note(f"add to {begin.PRE_COMMIT}, under repos:\n{by_hand}")
    return _checked(new_job, deep=deep)


def offer_to_ignore_runs(root: Path, *, may_ask: bool, gitignore: bool | None) -> None:
    """Add the run folders to .gitignore, in a checkout; *gitignore* says whether to, None: ask if that may be."""
    if begin.ignores_runs(root) is not False or gitignore is False:
        return
    question = "add runs/, where snapshots and logs go, to .gitignore?"
    if gitignore is None and may_ask and not click.confirm(question, default=True):
        return
    begin.ignore_runs(root)
    click.echo(f"{paint('added', 'green')} /runs/ to {shortest_path(root / '.gitignore')}")


def _checked(new_job: NewJob, *, deep: bool | None) -> int:
    from elasticflow.jobfile.diagnostics.render_text import render
    from elasticflow.jobfile.load import load_job

    loaded = load_job(new_job.job_file, environment=os.environ)
    problems = [diagnostic for diagnostic in loaded.diagnostics if diagnostic.severity != "note"]
    if problems:
        click.echo(render(problems), err=True)
    if loaded.job is None:
        return ANSWER_IS_NO
    has_torch = util.find_spec("torch") is not None
    if deep is False or (deep is None and not has_torch):
        why = "" if has_torch else ", since torch is not installed here"
        note(f"not tried out{why}: elasticflow validate --deep {shortest_path(new_job.job_file.absolute())}")
    else:
        is_to_be_proved = new_job.has_made_up_data or new_job.draft.loss_is_guessed
        if not tried_out(loaded, new_job.job_file, is_to_be_proved and new_job.to_write is None):
            return ANSWER_IS_NO
    _say_what_is_next(new_job)
    return FINISHED


def tried_out(loaded: LoadedJob, path: Path, with_step: bool) -> bool:
    """Try the own code of the job in *path* out, print what is wrong, and return whether a run could train."""
    from elasticflow.cli.write.deep_options import DeepRequest, report_text, try_out_loaded
    from elasticflow.compiler.provenance.missing_imports import require_importable
    from elasticflow.jobfile.diagnostics.render_text import render

    job_file = shortest_path(path.absolute())
    step = "-step" if with_step else ""
    click.echo(f"{paint('trying it out', dim=True)}  elasticflow validate --deep{step} {job_file}")
    try:
        require_importable(loaded)
        report, findings = try_out_loaded(loaded, (), DeepRequest(bool(step), _DEEP_LIMIT_S))
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
    """Print what a person should know."""
    click.echo(f"{paint('note', 'yellow')}  {text}")


def _say_what_is_next(new_job: NewJob) -> None:
    job_file = new_job.job_file
    shown = shortest_path(job_file.absolute())
    click.echo(f"\n{paint('next', bold=True)}")
    if new_job.to_write is not None:
        click.echo(f"  write the loss in {new_job.to_write}: until then a run fails at its first step")
    for command, does in (
        (f"elasticflow plan {shown}", "what a run would do"),
        (f"elasticflow run {shown}", "train; Ctrl-C and `elasticflow resume` at any time"),
        (f"elasticflow doctor {shown}", "whether this machine has what the job needs"),
    ):
        click.echo(f"  {command:<{len(shown) + 22}} {does}")
