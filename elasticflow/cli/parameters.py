"""Options that several commands have, and the job file they are about."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from elasticflow.trials.compare_runs import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.jobfile.load import LoadedJob

overrides_option = click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key, e.g. train.epochs=3."
)
case_option = click.option(
    "--case", metavar="NAME", help="Which case of the file's [matrix]; `elasticflow plan FILE` lists them."
)


format_option = click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", help="Default: text."
)
tolerance_option = click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=TOLERANCE,
    show_default=True,
    help='For consistency = "batch": how far two smoothed losses may lie apart, as a share of the largest.',
)


def job_of(job_file: Path, overrides: Sequence[str], case: str | None = None) -> LoadedJob:
    """Return the job that a command is about, variables looked up in this process' environment.

    Raises:
        JobRefusedError: it has errors; the message is the rendered diagnostics.
        CaseError: the file has a [matrix], and *case* is none of its cases.
    """
    from elasticflow.jobfile.load import require_job

    return require_job(job_file, overrides, case=case, environment=os.environ)
