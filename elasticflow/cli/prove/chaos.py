"""`elasticflow chaos JOB`: whether it trains the same with faults on cue, and what they cost."""

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
from elasticflow.cli.prove.verify_elastic import tolerance_option

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.prove.trial_view import ChaosView
    from elasticflow.trials.chaos import ChaosOutcome


@click.command("chaos")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@click.option("--plan", "plan_file", metavar="FILE", type=JOB_FILE, help="A fault plan.")
@click.option("--faults", type=click.IntRange(1, 1000), help="Draw so many faults instead.  [default: 5]")
@click.option("--seed", type=int, default=0, show_default=True, help="What they are drawn from.")
@click.option(
    "--steps", type=click.IntRange(1, 10**6), default=50, show_default=True, help="Steps of each run."
)
@click.option(
    "--workers", type=click.IntRange(1, 1024), default=2, show_default=True, help="Workers of each node."
)
@case_option
@overrides_option
@tolerance_option
@click.option(
    "--keep",
    metavar="DIR",
    type=FOLDER_ONLY,
    help="Keep both runs there; default: a temporary folder, kept only if the runs differ.",
)
@format_option
def command(
    job_file: Path,
    plan_file: Path | None,
    faults: int | None,
    seed: int,
    steps: int,
    workers: int,
    case: str | None,
    overrides: tuple[str, ...],
    tolerance: float,
    keep: Path | None,
    form: str,
) -> int:
    """Train JOB briefly, then again with faults on cue: kills, stops, lost nodes, damaged snapshots. Compare.

    All of it happens in a scratch folder: the job's own runs and snapshots are not touched. The table shows what each
    fault cost. Exit code 1 if the disturbed run is not what the undisturbed one is, or does not end; both are kept
    then. How they are compared is what `verify-elastic --help` says: with consistency = "exact" every bit of every
    step that the run went on from, with "batch" the samples of each step and the smoothed loss.

    A fault plan is a TOML file; there are some in examples/faults.

    \b
    elasticflow chaos jobs/mnist.toml --plan examples/faults/workers.toml
    elasticflow chaos jobs/mnist.toml --faults 20 --seed 7 --steps 200
    """
    from elasticflow.cli.prove.trial_view import ChaosView
    from elasticflow.compiler.inputs.missing_imports import require_importable
    from elasticflow.errors import ANSWER_IS_NO, FINISHED, TrialFailedError
    from elasticflow.launcher.launch import check_torch
    from elasticflow.trials import fault_plan, trial
    from elasticflow.trials.chaos import run_with_faults
    from elasticflow.trials.child import TriedJob
    from elasticflow.trials.verify_elastic import count_gpus, scratch_folder

    if plan_file is not None and faults is not None:
        raise click.UsageError("--plan and --faults exclude each other")
    loaded = job_of(job_file, overrides, case)
    job = loaded.job
    assert job is not None  # else it would have raised
    show_warnings(loaded)
    check_torch(warn)
    require_importable(loaded)
    least = trial.check(job, [workers], steps, 0)
    if plan_file is None:
        plan = fault_plan.draw_plan(faults or 5, seed, least, workers)
    else:
        plan = fault_plan.read_plan(plan_file, least)
    steps = trial.check(job, [workers * plan.most_nodes], steps, count_gpus())
    interrupt_on_signals()
    view = ChaosView(job, plan, workers, steps, tolerance, quiet=form == "json")
    subject = TriedJob(job, loaded.files, loaded.project_root)
    with scratch_folder(keep) as folder, view:
        try:
            outcome = run_with_faults(subject, plan, workers, steps, tolerance, folder.path, view.begin)
        except TrialFailedError as error:
            folder.is_kept = True
            raise TrialFailedError(*view.explain(error, folder.path)) from error
        is_same = outcome.comparison.difference is None
        folder.is_kept |= not is_same
    place = folder.path if folder.is_kept else None
    if form == "json":
        print_json(_facts(view, outcome, place, is_same=is_same))
    else:
        view.conclude(outcome, place)
    return FINISHED if is_same else ANSWER_IS_NO


def _facts(view: ChaosView, outcome: ChaosOutcome, place: Path | None, *, is_same: bool) -> dict[str, object]:
    from dataclasses import asdict

    calm, wild = outcome.seconds
    return {
        "job": view.job.job.name,
        "consistency": view.job.train.consistency,
        "plan": view.plan.name,
        "nodes": view.plan.nodes,
        "workers": view.workers,
        "tolerance": None if view.is_exact else view.tolerance,  # of the largest smoothed loss
        "steps": outcome.steps,
        "same": is_same,
        "undisturbed_seconds": round(calm, 3),
        "disturbed_seconds": round(wild, 3),
        "faults": [
            {
                "step": each.fault.step,
                "what": each.fault.what,
                "words": each.words,
                "restarts": each.restarts,
                "seconds": each.seconds,
                "redone": each.redone,
                "snapshots_lost": each.snapshots,
            }
            for each in outcome.costs
        ],
        "undone": outcome.undone,
        "comparison": asdict(outcome.comparison),
        "run": None if place is None else str(outcome.run.path),
    }
