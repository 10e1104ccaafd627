"""The options that `verify-elastic` and `chaos` have in common, and the job that they test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import show_warnings, warn
from elasticflow.cli.parameters import FOLDER_ONLY, case_option, format_option, job_of, overrides_option
from elasticflow.trials.compare_runs import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from elasticflow.trials.child import TriedJob


@dataclass(frozen=True, kw_only=True)
class TrialOptions:
    """The options of the command line that both commands have; see `--help`."""

    job_file: Path
    steps: int
    case: str | None
    overrides: tuple[str, ...]
    tolerance: float
    keep: Path | None
    form: str

    @property
    def is_quiet(self) -> bool:
        """True if standard output belongs to JSON."""
        return self.form == "json"

    def tried_job(self) -> TriedJob:
        """Return the job to try; warnings about it and about torch are shown.

        Raises:
            JobRefusedError: the job has errors, or a package that its modules import is not installed here.
            TorchMissingError: there is no torch.
            TrialRefusedError: the job's script has no loop on `elasticflow.join`.
        """
        from elasticflow.compiler.provenance.missing_imports import require_importable
        from elasticflow.launcher.launch import check_torch
        from elasticflow.trials.child import TriedJob
        from elasticflow.trials.own_loop import require_own_loop

        loaded = job_of(self.job_file, self.overrides, self.case)
        assert loaded.job is not None
        show_warnings(loaded)
        check_torch(warn)
        require_importable(loaded)
        require_own_loop(loaded.job, loaded.project_root)
        return TriedJob(loaded.job, loaded.files, loaded.project_root)


def trial_options(*, steps: str, keep: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command these options; *steps* and *keep* are the help of two of them."""
    options = (
        click.option("--steps", type=click.IntRange(1, 10**6), default=50, show_default=True, help=steps),
        case_option,
        overrides_option,
        click.option(
            "--tolerance",
            type=click.FloatRange(0, min_open=True),
            default=TOLERANCE,
            show_default=True,
            help='For consistency = "batch": largest difference of two smoothed losses, as a share of the largest.',
        ),
        click.option("--keep", metavar="DIR", type=FOLDER_ONLY, help=keep),
        format_option,
    )

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return add
