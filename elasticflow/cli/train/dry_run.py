"""`elasticflow run JOB --dry-run`: the plan, with the effects of the other options of `run`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from elasticflow.cli.train.run_options import RunOptions
    from elasticflow.run_folder import RunFolder


def show_plan(options: RunOptions) -> None:
    """Print the plan that `run` would follow.

    Raises:
        JobRefusedError: the job has errors.
        ScaleError: the options simulate more nodes than the job may have.
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.cli.parameters import job_of
    from elasticflow.cli.write.plan import newest_run, show, show_cases
    from elasticflow.launcher.supervisor.scale_schedule import check_scale

    if options.endpoint is not None:
        raise click.UsageError(
            "--join takes part in a run as it was started elsewhere: there is nothing to plan here; "
            "`elasticflow plan` shows what the machine that starts it would do"
        )
    if options.is_all:
        show_cases(options.job_file, options.overrides)
        return
    loaded = job_of(options.job_file, options.overrides, options.case)
    assert loaded.job is not None
    asides: dict[str, str] = {}
    show_warnings(loaded, but=options.pointless_warnings)
    if options.is_simulated:
        changes = options.scale_changes()
        check_scale(changes, loaded.job.nodes)
        schedule = ", then ".join(
            f"{change.nodes} from {change.at_s:g} s on{' (others are killed)' if change.by_force else ''}"
            for change in changes
        )
        asides["played"] = (
            f"nodes on this machine: {options.simulate_nodes if options.scale is None else schedule}"
        )
    against = newest_run(loaded)
    if options.run_id is not None:
        run = options.folder_of(loaded)
        asides["run"] = _what_becomes_of(run)
        against = run if run.launch_numbers() else against
    show(loaded, against, asides=asides)


def _what_becomes_of(run: RunFolder) -> str:
    from elasticflow.observe.runs import is_finished

    launches = run.launch_numbers()
    if not launches:
        return f"{run.run_id} is not here: it is made, or resumed if its snapshots are found"
    if is_finished(run):
        return f"{run.run_id} is finished: nothing would be done"
    return f"{run.run_id} is resumed, by launch {launches[-1] + 1}"
