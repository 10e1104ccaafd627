"""`elasticflow run JOB --dry-run`: the plan, with what the other options of `run` mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from elasticflow.run_folder import RunFolder


def show_plan(
    job_file: Path,
    overrides: Sequence[str],
    *,
    case: str | None,
    run_id: str | None,
    simulate_nodes: int | None,
    scale: str | None,
    endpoint: str | None,
    is_all: bool,
) -> None:
    """Print what `run` would do; the options were checked.

    Raises:
        JobRefusedError: the job has errors.
        ScaleError: it may not have as many nodes as are to be played.
    """
    from elasticflow.cli.parameters import job_of
    from elasticflow.cli.terminal import show_warnings
    from elasticflow.cli.train.run_ids import run_id_of
    from elasticflow.cli.write.plan import newest_run, show, show_cases
    from elasticflow.jobfile.diagnostics import codes
    from elasticflow.launcher.supervisor.scale_schedule import check_scale, parse_scale
    from elasticflow.run_folder import RunFolder

    if endpoint is not None:
        raise click.UsageError(
            "--join takes part in a run as its head started it: there is nothing to plan here; "
            "`elasticflow plan` shows what the head would do"
        )
    if is_all:
        show_cases(job_file, overrides)
        return
    loaded = job_of(job_file, overrides, case)
    assert loaded.job is not None
    asides: dict[str, str] = {}
    is_simulated = simulate_nodes is not None or scale is not None
    show_warnings(loaded, but={codes.NO_ENDPOINT, codes.LOCAL_SNAPSHOTS} if is_simulated else ())
    if is_simulated:
        changes = parse_scale(scale or f"{simulate_nodes}@0s")
        check_scale(changes, loaded.job.nodes)
        told = ", then ".join(
            f"{each.nodes} from {each.at_s:g} s on{' (others are killed)' if each.by_force else ''}"
            for each in changes
        )
        asides["played"] = f"nodes on this machine: {simulate_nodes if scale is None else told}"
    against = newest_run(loaded)
    if run_id is not None:
        run = RunFolder.of(loaded.project_root, loaded.job.job.name, run_id_of(run_id, case))
        asides["run"] = _what_becomes_of(run)
        against = run if run.launch_numbers() else against
    show(loaded, against, asides=asides)


def _what_becomes_of(run: RunFolder) -> str:
    from elasticflow.observe.runs import is_finished

    launches = run.launch_numbers()
    if not launches:
        return f"{run.run_id} is not here: it is made, or gone on with if its snapshots are found"
    if is_finished(run):
        return f"{run.run_id} is finished: nothing would be done"
    return f"{run.run_id} is gone on with, by launch {launches[-1] + 1}"
