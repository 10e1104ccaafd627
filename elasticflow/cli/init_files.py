"""What `elasticflow init` writes, checks and says at the end (floor 5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.terminal import paint, short
from elasticflow.errors import ANSWER_IS_NO, FINISHED
from elasticflow.scaffold import beginning
from elasticflow.scaffold.job_text import text_of

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.init_answers import Answers, Asked


def print_only(found: Answers) -> int:
    """Print the job file; what would be written beside it is named on standard error."""
    click.echo(text_of(found.draft), nl=False)
    for name in found.code:
        click.echo(f"note: {name} would be written too", err=True)
    return FINISHED


def finish(found: Answers, asked: Asked, *, gitignore: bool | None, pre_commit: bool) -> int:
    """Write everything, check the job as `validate` does, and say how to go on; return the exit code.

    Raises:
        ScaffoldError: a file is there already; nothing was written.
    """
    files = {found.root / name: text for name, text in found.code.items()}
    files[found.job_file] = text_of(found.draft)
    configuration, by_hand = beginning.hook(found.root) if pre_commit else ({}, "")
    beginning.write(files | beginning.schema_file(found.job_file) | configuration)
    for path in (*files, *configuration):
        click.echo(f"{paint('wrote', 'green')} {short(path.absolute())}")
    _ignore(found.root, asked, gitignore=gitignore)
    for note in found.notes:
        click.echo(f"{paint('note', 'yellow')}  {note}")
    if by_hand:
        click.echo(f"{paint('note', 'yellow')}  add to {beginning.PRE_COMMIT}, under repos:\n{by_hand}")
    return _checked(found.job_file)


def _ignore(root: Path, asked: Asked, *, gitignore: bool | None) -> None:
    if beginning.ignores_runs(root) is not False or gitignore is False:
        return
    question = "add runs/, where snapshots and logs go, to .gitignore?"
    if gitignore is None and asked.may_ask and not click.confirm(question, default=True):
        return
    beginning.ignore_runs(root)
    click.echo(f"{paint('added', 'green')} /runs/ to {short(root / '.gitignore')}")


def _checked(job_file: Path) -> int:
    from elasticflow.spec.findings.diagnostics import render
    from elasticflow.spec.load import load_job

    loaded = load_job(job_file)
    told = [each for each in loaded.diagnostics if each.severity != "note"]
    if told:
        click.echo(render(told), err=True)
    if loaded.job is None:
        return ANSWER_IS_NO
    shown = short(job_file.absolute())
    click.echo(f"\n{paint('next', bold=True)}")
    for command, does in (
        (f"elasticflow plan {shown}", "what a run would do"),
        (f"elasticflow run {shown}", "train; Ctrl-C and `elasticflow resume` at any time"),
        (f"elasticflow doctor {shown}", "whether this machine has what the job needs"),
    ):
        click.echo(f"  {command:<{len(shown) + 22}} {does}")
    return FINISHED
