"""`elasticflow verify JOB`: checks that a job trains the same at several world sizes, or with injected faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import interrupt_on_signals, print_json, show_warnings, warn
from elasticflow.cli.parameters import (
    FOLDER_ONLY,
    JOB_FILE,
    CompletedPath,
    case_option,
    format_option,
    job_of,
    overrides_option,
)
from elasticflow.trials.compare_runs import TOLERANCE

if TYPE_CHECKING:
    from pathlib import Path

    from elasticflow.cli.prove.trial_view import ChaosView, VerifyView
    from elasticflow.trials.chaos import ChaosOutcome
    from elasticflow.trials.child import TriedJob
    from elasticflow.trials.faults import FaultPlan
    from elasticflow.trials.verify_elastic import TrialOutcome

_MOST_WORKERS = 1024  # as in nodes.nproc_per_node
_MOST_FAULTS = 1000
# Options of one of the two comparisons, with which the other has nothing to do.
_OF_WORLDS, _OF_FAULTS = ("worlds", "shards"), ("seed", "workers")


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """The command line; see `elasticflow verify --help`."""

    job_file: Path
    worlds: tuple[int, ...]
    shards: tuple[int, ...]
    faults: int | Path | None
    seed: int
    workers: int
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

    def plan(self, steps: int) -> FaultPlan:
        """Return the faults for a number of steps: those of the file, or a random plan of the given size.

        Raises:
            FaultPlanError: the file is no fault plan, or is a plan for more steps.
        """
        from elasticflow.trials.faults import draw_plan, read_plan

        assert self.faults is not None
        if isinstance(self.faults, int):
            return draw_plan(self.faults, self.seed, steps, self.workers)
        return read_plan(self.faults, steps)

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
        from elasticflow.trials.trial import require_own_loop

        loaded = job_of(self.job_file, self.overrides, self.case)
        show_warnings(loaded)
        check_torch(warn)
        require_importable(loaded)
        require_own_loop(loaded.job, loaded.project_root)
        return TriedJob(loaded.job, loaded.files, loaded.project_root)


class _Faults(CompletedPath):
    """A number of random faults, or a file with a fault plan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or the path, which need not exist: the reader of plans reports a missing file."""
        if not str(value).isdecimal():
            return super().convert(value, param, ctx)
        return click.IntRange(1, _MOST_FAULTS).convert(value, param, ctx)


def _world_sizes(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Return the world sizes, or degrees, of `1,2,3`."""
    if value is None:
        return ()
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MOST_WORKERS for part in parts):
        kind = "degrees" if parameter.name == "shards" else "world sizes"
        message = f'"{value}" is not a list of {kind}, each from 1 to {_MOST_WORKERS}, such as 1,2,3'
        raise click.BadParameter(message, context, parameter)
    return tuple(map(int, parts))


@click.command("verify")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@click.option(
    "--worlds",
    callback=_world_sizes,
    default="1,2",
    show_default=True,
    metavar="1,2,3",
    help="World sizes to train at; the first is the reference.",
)
@click.option(
    "--shards",
    callback=_world_sizes,
    metavar="1,2,4",
    help="Also shard the model (parallel.shard): each world size with each of these degrees that divides it.",
)
@click.option(
    "--faults",
    type=_Faults("job_files"),
    metavar="N|PLAN",
    help="Instead of world sizes, try this number of random faults, or the faults of a plan.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="With --faults: seed of the random faults."
)
@click.option(
    "--workers",
    type=click.IntRange(1, _MOST_WORKERS),
    default=2,
    show_default=True,
    help="With --faults: workers of each node.",
)
@click.option(
    "--steps", type=click.IntRange(1, 10**6), default=50, show_default=True, help="Steps of each run."
)
@case_option
@overrides_option
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    default=TOLERANCE,
    show_default=True,
    help='For consistency = "batch": largest difference of two smoothed losses, as a share of the largest.',
)
@click.option(
    "--keep",
    metavar="DIR",
    type=FOLDER_ONLY,
    help="Keep all runs and records there; default: a temporary folder, which stays only if a fault changed the outcome.",
)
@format_option
def command(**options: Any) -> int:
    """Train JOB briefly in several ways, and compare: it must train the same, whatever happens to it.

    Without --faults: at several world sizes, through a kill -9 and a restart, and through a kill -9 and a resize. With
    --faults: undisturbed, then with kills, stops, lost nodes and damaged snapshots on cue; the table shows the cost of
    each fault. A fault plan is a TOML file; there are some in examples/faults.

    All of it happens in a scratch folder: the job's own runs and snapshots are not touched. Exit code 1 if a run
    differs, or a disturbed run does not end; the command names the first step and tensor that differ.

    With consistency = "exact", every tensor of model, optimizer and averaged model must have the same bits after
    every step, including steps that were repeated after a kill. A tensor that differs is shown as the CRC-32 of its
    bytes.

    With either consistency, a run that is killed, drained and continued with as many workers must have the same bits:
    this reveals state that no snapshot holds. (If "batch" runs of the job differ among themselves on this machine, the
    command compares their losses.)

    With "batch", the same samples make up the same steps, but another world size rounds sums differently, and dropout
    and BatchNorm see a batch cut into other parts. The command therefore compares losses, each smoothed over the last
    tenth of the steps; they must stay within --tolerance times the reference's largest loss. The example of this
    project stays below 2 %; gradients of twice their size, or half of each batch lost, take it beyond 13 %. The table
    shows the difference of each trial; a job without dropout and BatchNorm may use a far smaller tolerance.

    \b
    elasticflow verify jobs/mnist.toml --worlds 1,2,3
    elasticflow verify jobs/mnist.toml --worlds 1,3 --set train.consistency=exact \\
        --set train.virtual_shards=4
    elasticflow verify jobs/gpt.toml --worlds 2,4 --shards 1,2,4
    elasticflow verify jobs/mnist.toml --faults 20 --seed 7 --steps 200
    elasticflow verify jobs/mnist.toml --faults examples/faults/workers.toml
    """
    has_faults = options["faults"] is not None
    context = click.get_current_context()
    for name in _OF_WORLDS if has_faults else _OF_FAULTS:
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name} {'does not go with' if has_faults else 'goes with'} --faults")
    return (_disturb if has_faults else _verify)(VerifyOptions(**options))


def _verify(options: VerifyOptions) -> int:
    from elasticflow.cli.prove.trial_view import VerifyView
    from elasticflow.errors import ANSWER_IS_NO, FINISHED, TrialFailedError
    from elasticflow.trials import trial
    from elasticflow.trials.verify_elastic import Verification, count_gpus, scratch_folder

    subject, is_kept = options.tried_job(), options.keep is not None
    worlds = trial.worlds_of(options.worlds, options.shards)
    steps = trial.check(subject.job, worlds, options.steps, count_gpus())
    interrupt_on_signals()
    view = VerifyView(subject.job, worlds, steps, options.tolerance, quiet=options.is_quiet)
    outcomes = []
    with scratch_folder(options.keep) as scratch, view:
        try:
            trials = Verification(subject, worlds, options.tolerance, scratch.path, view.begin, is_kept)
            for outcome in trials.outcomes(steps):
                outcomes.append(outcome)
                view.show(outcome)
        except TrialFailedError as error:
            raise TrialFailedError(*view.explain(error, scratch.path if is_kept else None)) from error
    is_same = all(outcome.comparison is None or outcome.comparison.difference is None for outcome in outcomes)
    if options.is_quiet:
        print_json(_facts_of_trials(view, outcomes, is_same=is_same, kept=is_kept))
    else:
        view.conclude(outcomes)
    return FINISHED if is_same else ANSWER_IS_NO


def _facts_of_trials(
    view: VerifyView, outcomes: list[TrialOutcome], *, is_same: bool, kept: bool
) -> dict[str, object]:
    from dataclasses import asdict

    return {
        "job": view.job.job.name,
        "consistency": view.consistency,
        "tolerance": None if view.is_exact else view.tolerance,  # of the largest smoothed loss
        "steps": outcomes[0].steps,
        "same": is_same,
        "trials": [
            {
                "worlds": [world.workers for world in outcome.trial.worlds],
                "shards": [world.shard for world in outcome.trial.worlds],
                "killed_after": outcome.trial.killed_after,
                "drained_after": outcome.trial.drained_after,
                "compared": outcome.compared,
                "steps": outcome.steps,
                "seconds": round(outcome.seconds, 3),
                "run": str(outcome.run.path) if kept else None,
                "comparison": None if outcome.comparison is None else asdict(outcome.comparison),
            }
            for outcome in outcomes
        ],
    }


def _disturb(options: VerifyOptions) -> int:
    from elasticflow.cli.prove.trial_view import ChaosView
    from elasticflow.errors import ANSWER_IS_NO, FINISHED, TrialFailedError
    from elasticflow.trials import trial
    from elasticflow.trials.chaos import run_with_faults
    from elasticflow.trials.verify_elastic import count_gpus, scratch_folder

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
        print_json(_facts_of_faults(view, outcome, kept, is_same=is_same))
    else:
        view.conclude(outcome, kept)
    return FINISHED if is_same else ANSWER_IS_NO


def _facts_of_faults(
    view: ChaosView, outcome: ChaosOutcome, kept: Path | None, *, is_same: bool
) -> dict[str, object]:
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
