"""`elasticflow chaos JOB`: checks that a job trains the same with injected faults, and measures their cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import interrupt_on_signals, print_json
from elasticflow.cli.parameters import JOB_FILE
from elasticflow.cli.prove.trial_options import TrialOptions, trial_options

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.prove.trial_view import ChaosView
    from elasticflow.trials.chaos import ChaosOutcome
    from elasticflow.trials.fault_plan import FaultPlan


@dataclass(frozen=True, kw_only=True)
class ChaosOptions(TrialOptions):
    """The command line; see `elasticflow chaos --help`."""

    plan_file: Path | None
    faults: int | None
    seed: int
    workers: int

    def plan(self, steps: int) -> FaultPlan:
        """Return the faults for a number of steps: those of the file, or a random plan of the given size.

        Raises:
            FaultPlanError: the file is no fault plan, or is a plan for more steps.
        """
        from elasticflow.trials.fault_plan import draw_plan, read_plan

        if self.plan_file is None:
            return draw_plan(self.faults or 5, self.seed, steps, self.workers)
        return read_plan(self.plan_file, steps)


@click.command("chaos")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@click.option("--plan", "plan_file", metavar="FILE", type=JOB_FILE, help="A fault plan.")
@click.option(
    "--faults", type=click.IntRange(1, 1000), help="Number of random faults, without a plan.  [default: 5]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random faults.")
@click.option(
    "--workers", type=click.IntRange(1, 1024), default=2, show_default=True, help="Workers of each node."
)
@trial_options(
    steps="Steps of each run.",
    keep="Keep both runs there; default: a temporary folder, kept only if the runs differ.",
)
def command(**options: Any) -> int:
    """Train JOB briefly, then again with faults on cue: kills, stops, lost nodes, damaged snapshots. Compare.

    All of it happens in a scratch folder: the job's own runs and snapshots are not touched. The table shows the cost of
    each fault. Exit code 1 if the disturbed run differs from the undisturbed one, or does not end; both are kept then.
    `verify-elastic --help` explains the comparison: with consistency = "exact", every bit of every step that the run
    resumed from, with "batch" the samples of each step and the smoothed loss.

    A fault plan is a TOML file; there are some in examples/faults.

    \b
    elasticflow chaos jobs/mnist.toml --plan examples/faults/workers.toml
    elasticflow chaos jobs/mnist.toml --faults 20 --seed 7 --steps 200
    """
    return _disturb(ChaosOptions(**options))


def _disturb(options: ChaosOptions) -> int:
    from elasticflow.cli.prove.trial_view import ChaosView
    from elasticflow.errors import ANSWER_IS_NO, FINISHED, TrialFailedError
    from elasticflow.trials import trial
    from elasticflow.trials.chaos import run_with_faults
    from elasticflow.trials.verify_elastic import count_gpus, scratch_folder

    if options.plan_file is not None and options.faults is not None:
        raise click.UsageError("--plan and --faults exclude each other")
    subject, workers = options.tried_job(), options.workers
    plan = options.plan(trial.check(subject.job, [trial.World(workers)], options.steps, 0))
    steps = trial.check(subject.job, [trial.World(workers * plan.most_nodes)], options.steps, count_gpus())
    interrupt_on_signals()
    view = ChaosView(subject.job, plan, workers, steps, options.tolerance, quiet=options.is_quiet)
    with scratch_folder(options.keep) as scratch, view:
        try:
            outcome = run_with_faults(
                subject, plan, workers, steps, options.tolerance, scratch.path, view.begin
            )
        except TrialFailedError as error:
            scratch.is_kept = True
            raise TrialFailedError(*view.explain(error, scratch.path)) from error
        view.is_exact = outcome.is_exact
        is_same = outcome.comparison.difference is None
        scratch.is_kept |= not is_same
    kept = scratch.path if scratch.is_kept else None
    if options.is_quiet:
        print_json(_facts(view, outcome, kept, is_same=is_same))
    else:
        view.conclude(outcome, kept)
    return FINISHED if is_same else ANSWER_IS_NO


def _facts(view: ChaosView, outcome: ChaosOutcome, kept: Path | None, *, is_same: bool) -> dict[str, object]:
    from dataclasses import asdict

    calm, wild = outcome.seconds
    return {
        "job": view.job.job.name,
        "consistency": view.consistency,
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
                "step": cost.fault.step,
                "what": cost.fault.what,
                "words": cost.words,
                "restarts": cost.restarts,
                "seconds": cost.seconds,
                "redone": cost.redone,
                "snapshots_lost": cost.snapshots,
            }
            for cost in outcome.costs
        ],
        "undone": outcome.undone,
        "comparison": asdict(outcome.comparison),
        "run": None if kept is None else str(outcome.run.path),
    }
