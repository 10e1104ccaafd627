"""`elasticflow plan JOB`: what a run would do, without torch and without running anything (floor 5)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from elasticflow.cli.options import overrides_option

if TYPE_CHECKING:
    from elasticflow.compiler.drift import Difference
    from elasticflow.run_folder import RunFolder
    from elasticflow.spec.job import Job
    from elasticflow.spec.load import LoadedJob


@click.command("plan")
@click.argument("job_file", metavar="JOB", type=click.Path(path_type=Path))
@overrides_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Default: text.")
def command(job_file: Path, overrides: tuple[str, ...], form: str) -> None:
    """Show what a run of a job file would do; nothing is written, run or imported.

    \b
    elasticflow plan jobs/mnist.toml
    elasticflow plan jobs/mnist.toml --set nodes.max=8
    elasticflow plan jobs/mnist.toml --format json
    """
    from elasticflow.cli.plan_text import PlanView, lines_of
    from elasticflow.cli.terminal import print_json, show_warnings
    from elasticflow.compiler.plan import plan_job
    from elasticflow.compiler.split import num_steps, steps_per_epoch
    from elasticflow.spec.load import require_job

    loaded = require_job(job_file, overrides)
    job = loaded.job
    assert job is not None  # else it would have raised
    plan = plan_job(job, project_root=loaded.project_root, job_files=loaded.files).public()
    show_warnings(loaded)
    newest = _newest_run(loaded)
    samples = job.dataset.samples or (None if newest is None else _samples_of(newest))
    is_known = samples is not None or job.train.steps is not None
    steps = num_steps(job, samples or 0) if is_known else None
    drift = None if newest is None else _drift(newest, job)
    if form == "text":
        view = PlanView(plan, job, samples, steps, None if newest is None else newest.run_id, drift)
        click.echo("\n".join(lines_of(view)))
        return
    facts: dict[str, Any] = {
        **plan.model_dump(mode="json"),
        "samples": samples,
        "steps": steps,
        "steps_per_epoch": None if samples is None else steps_per_epoch(job, samples),
        "drift": None,
    }
    if newest is not None and drift is not None:
        facts["drift"] = {"run_id": newest.run_id, "differences": [vars(each) for each in drift]}
    print_json(facts)


def _newest_run(loaded: LoadedJob) -> RunFolder | None:
    from elasticflow.observe.runs import list_runs

    assert loaded.job is not None
    runs = list_runs(loaded.project_root, loaded.job.job.name)
    return next((run for run in runs if run.launch_numbers()), None)


def _samples_of(run: RunFolder) -> int | None:
    """Return the length of the training data the run opened last, if it got that far."""
    from elasticflow import events
    from elasticflow.observe.records import read

    opened = [
        r for r in read(run.events) if r.get("event") == events.DATASET_OPENED and r.get("name") == "train"
    ]
    samples = opened[-1].get("samples") if opened else None
    return samples if isinstance(samples, int) else None


def _drift(run: RunFolder, job: Job) -> list[Difference] | None:
    """Return what changed since the run's newest launch; None if that cannot be read."""
    from elasticflow.compiler.drift import compare
    from elasticflow.compiler.materialize import read_job
    from elasticflow.errors import LaunchFolderError

    try:
        return compare(read_job(run.launch(run.launch_numbers()[-1])), job)
    except LaunchFolderError:
        return None
