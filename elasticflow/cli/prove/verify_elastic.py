"""`elasticflow verify-elastic JOB`: checks that a job trains the same at several world sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.output import interrupt_on_signals, print_json
from elasticflow.cli.parameters import JOB_FILE
from elasticflow.cli.prove.trial_options import TrialOptions, trial_options

if TYPE_CHECKING:
    from elasticflow.cli.prove.trial_view import VerifyView
    from elasticflow.trials.verify_elastic import TrialOutcome

_MOST_WORKERS = 1024  # as in nodes.nproc_per_node


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(TrialOptions):
    """The command line; see `elasticflow verify-elastic --help`."""

    worlds: tuple[int, ...]
    shards: tuple[int, ...]


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
    "--shards",
    callback=_world_sizes,
    metavar="1,2,4",
    help="Also shard the model (parallel.shard): each world size with each of these degrees that divides it.",
)
@trial_options(
    steps="Steps of each trial.", keep="Keep the trials' runs and records there; default: a temporary folder."
)
def command(**options: Any) -> int:
    """Train JOB briefly at several world sizes, through a kill -9 and a restart, and through a kill -9 and a resize.

    Every step is compared. All of it happens in a scratch folder: the job's own runs and snapshots are not touched.
    Exit code 1 if a trial differs from the first one; the command names the first step and tensor that differ.

    With consistency = "exact", every tensor of model, optimizer and averaged model must have the same bits after
    every step, including steps that were repeated after the kill. A tensor that differs is shown as the CRC-32 of its
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
    elasticflow verify-elastic jobs/mnist.toml --worlds 1,2,3
    elasticflow verify-elastic jobs/mnist.toml --worlds 1,2 --steps 20 --tolerance 0.02
    elasticflow verify-elastic jobs/mnist.toml --worlds 1,3 --set train.consistency=exact \\
        --set train.virtual_shards=4
    elasticflow verify-elastic jobs/gpt.toml --worlds 2,4 --shards 1,2,4
    """
    return _verify(VerifyOptions(**options))


def _verify(options: VerifyOptions) -> int:
    from elasticflow.cli.prove.trial_view import VerifyView
    from elasticflow.errors import ANSWER_IS_NO, FINISHED, TrialFailedError
    from elasticflow.trials import trial
    from elasticflow.trials.verify_elastic import count_gpus, scratch_folder, verify

    subject, is_kept = options.tried_job(), options.keep is not None
    worlds = trial.worlds_of(options.worlds, options.shards)
    steps = trial.check(subject.job, worlds, options.steps, count_gpus())
    interrupt_on_signals()
    view = VerifyView(subject.job, worlds, steps, options.tolerance, quiet=options.is_quiet)
    outcomes = []
    with scratch_folder(options.keep) as scratch, view:
        try:
            for outcome in verify(
                subject, worlds, steps, options.tolerance, scratch.path, view.begin, is_kept=is_kept
            ):
                outcomes.append(outcome)
                view.show(outcome)
        except TrialFailedError as error:
            raise TrialFailedError(*view.explain(error, scratch.path if is_kept else None)) from error
    is_same = all(outcome.comparison is None or outcome.comparison.difference is None for outcome in outcomes)
    if options.is_quiet:
        print_json(_facts(view, outcomes, is_same=is_same, kept=is_kept))
    else:
        view.conclude(outcomes)
    return FINISHED if is_same else ANSWER_IS_NO


def _facts(view: VerifyView, outcomes: list[TrialOutcome], *, is_same: bool, kept: bool) -> dict[str, object]:
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
