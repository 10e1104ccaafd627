"""The types of commands' parameters, which know what a shell can complete; options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from click.shell_completion import CompletionItem

    from elasticflow.cli.completion_candidates import Candidate
    from elasticflow.jobfile.load import LoadedJob

    Candidates = Callable[[click.Context, str], Iterable[Candidate]]


class Completed(click.types.StringParamType):
    """A word with candidates; another word may be typed.

    Args:
        candidates: Takes the context and the word so far, and returns what completes it.
    """

    def __init__(self, candidates: Candidates) -> None:
        self._candidates = candidates

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates that begin with *incomplete* and were not given before."""
        return _items(self._candidates(ctx, incomplete), ctx, param, incomplete)


class CompletedPath(click.Path):
    """A path with candidates, given to the command as `Path`.

    Args:
        candidates: As `Completed` has them; default: folders and files.
        file_okay: A file may stand there.
        dir_okay: A folder may stand there.
    """

    def __init__(
        self, candidates: Candidates | None = None, *, file_okay: bool = True, dir_okay: bool = True
    ) -> None:
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay)
        self._candidates = candidates

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates that begin with *incomplete* and were not given before."""
        from elasticflow.cli.completion_candidates import paths

        if self._candidates is None:
            return _items(paths(incomplete, files=self.file_okay), ctx, param, incomplete)
        return _items(self._candidates(ctx, incomplete), ctx, param, incomplete)


def _items(
    candidates: Iterable[Candidate], context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    given = context.params.get(parameter.name or "")
    # A file or a snapshot is given once.
    used = set(map(str, given)) if isinstance(given, tuple) else set()
    return [
        CompletionItem(value, help=about)
        for value, about in dict(candidates).items()
        if value.startswith(incomplete) and value not in used
    ]


def _job_files(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import job_files

    return job_files(word)


def _model_files(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import paths

    return paths(word, ".py")


def _folders(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import paths

    return paths(word, files=False)


def _runs(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import runs

    return runs(word)


def _runs_and_jobs(context: click.Context, word: str) -> Iterable[Candidate]:
    return [*_runs(context, word), *_job_files(context, word)]


def _run_ids(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import run_ids

    return run_ids()


def _job_names(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import job_names

    return job_names()


def _codes(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import codes

    return codes()


def _cases(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import cases

    return cases(_job_file_typed(context))


def _assignments(context: click.Context, word: str) -> Iterable[Candidate]:
    from elasticflow.cli.completion_candidates import assignments

    return assignments(word, _job_file_typed(context))


def _run_and_snapshots(context: click.Context, word: str) -> Iterable[Candidate]:
    """Return the snapshots of the run that was typed; without one, runs and the newest run's snapshots."""
    from elasticflow.cli.completion_candidates import is_snapshot, snapshots

    given = [typed for typed in context.params.get("words") or () if not is_snapshot(typed)]
    return [*snapshots(given[0] if given else None), *([] if given else _runs(context, word))]


def _run_alone(context: click.Context, word: str) -> Iterable[Candidate]:
    return () if context.params.get("words") else _runs(context, word)


def _job_file_typed(context: click.Context) -> str | None:
    """Return the job file among the words before the cursor, which `completer` puts into the context."""
    return next((typed for typed in context.obj or () if typed.endswith(".toml")), None)


JOB_FILE = CompletedPath(_job_files)
MODEL_FILE = CompletedPath(_model_files)
FILE = CompletedPath()
FILE_ONLY = CompletedPath(dir_okay=False)
FOLDER = CompletedPath(_folders)
FOLDER_ONLY = CompletedPath(file_okay=False)
RUN = Completed(_runs)
RUN_OR_JOB = Completed(_runs_and_jobs)
RUN_ID = Completed(_run_ids)
JOB_NAME = Completed(_job_names)
# For commands that take a run, or a run and snapshots, as one list of words.
RUN_WORD = Completed(_run_alone)
RUN_AND_SNAPSHOTS = Completed(_run_and_snapshots)
CODE = Completed(_codes)
OVERRIDE = Completed(_assignments)


def set_option(explanation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--set KEY=VALUE`, with its help."""
    return click.option(
        "--set", "overrides", type=OVERRIDE, metavar="KEY=VALUE", multiple=True, help=explanation
    )


overrides_option = set_option("Override one key, e.g. train.epochs=3.")
case_option = click.option(
    "--case",
    type=Completed(_cases),
    metavar="NAME",
    help="Which case of the file's [matrix]; `elasticflow plan FILE` lists them.",
)
format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", help="Default: text."
)


def job_of(job_file: Path, overrides: Sequence[str], case: str | None = None) -> LoadedJob:
    """Return the job that a command is about, variables looked up in this process' environment.

    Raises:
        JobRefusedError: it has errors; the message is the rendered diagnostics.
        CaseError: the file has a [matrix], and *case* is none of its cases.
    """
    from elasticflow.jobfile.load import require_job

    return require_job(job_file, overrides, case=case, environment=os.environ)
