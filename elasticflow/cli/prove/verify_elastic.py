"""`elasticflow verify-elastic JOB`: whether it trains the same at several world sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import interrupt_on_signals, print_json, show_warnings, warn
from elasticflow.cli.parameters import (
    FOLDER_ONLY,
    JOB_FILE,
    case_option,
    format_option,
    job_of,
    overrides_option,
)
from elasticflow.trials.compare_runs import TOLERANCE

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.prove.trial_view import VerifyView
    from elasticflow.trials.verify_elastic import TrialOutcome

_MOST_WORKERS = 1024  # as in nodes.nproc_per_node


tolerance_option = click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=TOLERANCE,
    show_default=True,
    help='For consistency = "batch": how far two smoothed losses may lie apart, as a share of the largest.',
)


def _world_sizes(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Return the world sizes of `1,2,3`."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_WORKERS for part in parts):
        message = f'"{value}" is not a list of world sizes, each from 1 to {_MOST_WORKERS}, such as 1,2,3'
        raise click.BadParameter(message, context, parameter)
    return tuple(map(int, parts))


@click.command("verify-elastic")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@click.option(
    "--worlds",
    callback=_world_sizes,
    required=True,
    metavar="1,2,3",
    help="World sizes to train at; the first is the reference.",
)
@click.option(
    "--steps", type=click.IntRange(1, 10**6), default=50, show_default=True, help="Steps of each trial."
)
@case_option
@overrides_option
@tolerance_option
@click.option(
    "--keep",
    metavar="DIR",
    type=FOLDER_ONLY,
    help="Keep the trials' runs and records there; default: a temporary folder.",
)
@format_option
def command(
    job_file: Path,
    worlds: tuple[int, ...],
    steps: int,
    case: str | None,
    overrides: tuple[str, ...],
    tolerance: float,
    keep: Path | None,
    form: str,
) -> int:
    """Train JOB briefly at several world sizes, through a kill -9 and a restart, and through a kill -9 and a resize.

    Every step is compared. All of it happens in a scratch folder: the job's own runs and snapshots are not touched.
    Exit code 1 if a trial differs from the first one: the first step and tensor that do are named.

    With consistency = "exact", every tensor of model, optimizer and averaged model must have the same bits after
    every step, those that were done again after the kill included. A tensor that differs is shown as the CRC-32 of its
    bytes.

    With either, a run that is killed, drained and goes on with as many workers must have the same bits: that is where
    state that no snapshot holds shows. (If "batch" runs of the job differ among themselves on this machine, their
    losses are compared.)

    With "batch", the same samples make up the same steps, but sums are rounded otherwise at another world size, and
    dropout and BatchNorm see a batch cut into other parts. So losses are compared, each smoothed over the last tenth
    of the steps; they must stay within --tolerance times the reference's largest one. The example of this project
    stays below 2 %; gradients of twice their size, or half of each batch lost, take it beyond 13 %. The table shows
    how close a job came; one without dropout and BatchNorm may ask for far less.

    \b
    elasticflow verify-elastic jobs/mnist.toml --worlds 1,2,3
    elasticflow verify-elastic jobs/mnist.toml --worlds 1,2 --steps 20 --tolerance 0.02
    elasticflow verify-elastic jobs/mnist.toml --worlds 1,3 --set train.consistency=exact \\
        --set train.virtual_shards=4
    """
    from elasticflow.cli.prove.trial_view import VerifyView
    from elasticflow.compiler.inputs.missing_imports import require_importable
    from elasticflow.errors import ANSWER_IS_NO, FINISHED, TrialFailedError
    from elasticflow.launcher.launch import check_torch
    from elasticflow.trials import trial
    from elasticflow.trials.child import TriedJob
    from elasticflow.trials.verify_elastic import count_gpus, scratch_folder, verify

    loaded = job_of(job_file, overrides, case)
    job = loaded.job
    assert job is not None  # else it would have raised
    show_warnings(loaded)
    check_torch(warn)
    require_importable(loaded)
    steps = trial.check(job, worlds, steps, count_gpus())
    interrupt_on_signals()
    view = VerifyView(job, worlds, steps, tolerance, quiet=form == "json")
    subject = TriedJob(job, loaded.files, loaded.project_root)
    outcomes = []
    with scratch_folder(keep) as scratch, view:
        try:
            trying = verify(
                subject, worlds, steps, tolerance, scratch.path, view.begin, is_kept=keep is not None
            )
            for outcome in trying:
                outcomes.append(outcome)
                view.show(outcome)
        except TrialFailedError as error:
            raise TrialFailedError(*view.explain(error, scratch.path if keep else None)) from error
    is_same = all(each.comparison is None or each.comparison.difference is None for each in outcomes)
    if form == "json":
        print_json(_facts(view, outcomes, is_same=is_same, kept=keep is not None))
    else:
        view.conclude(outcomes)
    return FINISHED if is_same else ANSWER_IS_NO


def _facts(view: VerifyView, outcomes: list[TrialOutcome], *, is_same: bool, kept: bool) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "job": view.job.job.name,
        "consistency": view.job.train.consistency,
        "tolerance": None if view.is_exact else view.tolerance,  # of the largest smoothed loss
        "steps": outcomes[0].steps,
        "same": is_same,
        "trials": [
            {
                "worlds": each.trial.worlds,
                "killed_after": each.trial.killed_after,
                "drained_after": each.trial.drained_after,
                "compared": each.compared,
                "steps": each.steps,
                "seconds": round(each.seconds, 3),
                "run": str(each.run.path) if kept else None,
                "comparison": None if each.comparison is None else asdict(each.comparison),
            }
            for each in outcomes
        ],
    }
