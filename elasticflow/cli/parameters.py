"""The types of commands' parameters, with completions for a shell; options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticflow import run_folder
from elasticflow.system.units import parse_duration, parse_interval

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from click.shell_completion import CompletionItem

    from elasticflow.jobfile.load import LoadedJob


class _WithCandidates:
    """A parameter's type with completions: `candidates` names the function in `completion_candidates` that yields them.

    They are named, not imported: only a shell that asks needs them.
    """

    candidates: str

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the candidates that begin with *incomplete* and were not given before."""
        from click.shell_completion import CompletionItem

        from elasticflow.cli import completion_candidates

        candidates = dict(getattr(completion_candidates, self.candidates)(ctx, incomplete))
        given = ctx.params.get(param.name or "")
        # A file or a snapshot is given once.
        used = set(map(str, given)) if isinstance(given, tuple) else set()
        return [
            CompletionItem(value, help=about)
            for value, about in candidates.items()
            if value.startswith(incomplete) and value not in used
        ]


class Completed(_WithCandidates, click.types.StringParamType):
    """A word with candidates; another word may be typed."""

    def __init__(self, candidates: str) -> None:
        self.candidates = candidates


class RunId(Completed):
    """The id of a run, which need not exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the id; refuse an id that cannot be a folder's name."""
        if not run_folder.RUN_ID.fullmatch(value):
            self.fail("letters, digits, '.', '_' and '-' only, at most 100", param, ctx)
        return value


class Amount(click.types.StringParamType):
    """A text with a unit, such as "2 h", that is passed on as it was typed.

    Args:
        parse: Raises ValueError for a text of another form.
    """

    def __init__(self, parse: Callable[[str], object]) -> None:
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the text."""
        try:
            self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return value


class CompletedPath(_WithCandidates, click.Path):
    """A path with candidates, given to the command as `Path`."""

    def __init__(self, candidates: str, *, file_okay: bool = True, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, file_okay=file_okay, dir_okay=dir_okay)
        self.candidates = candidates


class JobFile(CompletedPath):
    """A job file by its path, or by its name anywhere in the project: `mnist` for `jobs/mnist.toml`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path. It need not exist; the reader reports a missing file."""
        path = super().convert(value, param, ctx)
        if isinstance(path, Path) and len(path.parts) == 1 and not path.suffix and not path.exists():
            from elasticflow.cli.output import shortest_path
            from elasticflow.jobfile.project import current_project_root, job_file_called

            found = job_file_called(current_project_root(), path.name)
            if found is not None:
                return Path(shortest_path(found))
        return path


JOB_FILE = JobFile("job_files")
MODEL_FILE = CompletedPath("model_files")
SCRIPT_OR_FOLDER = CompletedPath("model_files")
FILE = CompletedPath("files")
FILE_ONLY = CompletedPath("files", dir_okay=False)
FOLDER = CompletedPath("folders")
FOLDER_ONLY = CompletedPath("folders", file_okay=False)
RUN = Completed("runs")
RUN_OR_JOB = Completed("runs_and_job_files")
RUN_ID = RunId("run_ids")
JOB_NAME = Completed("job_names")
# For commands that take a run, or a run and snapshots, as one list of words.
RUN_WORD = Completed("one_run")
RUN_AND_SNAPSHOTS = Completed("one_run_and_snapshots")
OVERRIDE = Completed("assignments")
CASE = Completed("cases")
TOPIC = Completed("topics_and_codes")
EXAMPLE = Completed("examples")
DURATION = Amount(parse_duration)
INTERVAL = Amount(parse_interval)


def set_option(explanation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the option `--set KEY=VALUE`, with its help."""
    return click.option(
        "--set", "overrides", type=OVERRIDE, metavar="KEY=VALUE", multiple=True, help=explanation
    )


overrides_option = set_option("Override one key, e.g. train.epochs=3.")
case_option = click.option(
    "--case",
    type=CASE,
    metavar="NAME",
    help="A case of the file's [matrix]; `elasticflow plan FILE` lists the cases.",
)
format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", help="Default: text."
)

dry_run_option = click.option(
    "--dry-run", is_flag=True, help="Only show what would be removed, and its size."
)
yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")
strict_option = click.option("--strict", is_flag=True, help="Warnings are errors.")


def findings_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--format`, the form in which it prints its findings."""
    from elasticflow.jobfile.diagnostics.render_text import FORMATS

    return click.option(
        "--format",
        "output_format",
        type=click.Choice(FORMATS),
        default="full",
        envvar="ELASTICFLOW_OUTPUT_FORMAT",
        show_default=True,
        show_envvar=True,
        help="How findings are printed.",
    )(command)


def job_of(job_file: Path, overrides: Sequence[str], case: str | None = None) -> LoadedJob:
    """Return the job that a command is about, with variables of this process' environment.

    Raises:
        JobRefusedError: the job has errors; the message is the rendered diagnostics.
        CaseError: the file has a [matrix], and *case* is not among its cases.
    """
    from elasticflow.jobfile.load import require_job

    return require_job(job_file, overrides, case=case, environment=os.environ)
