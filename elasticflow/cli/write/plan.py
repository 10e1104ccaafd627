"""`elasticflow plan JOB`: the plan of a run, without running anything; with -o, the files of its launch."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import (
    FOLDER,
    JOB_FILE,
    RUN,
    case_option,
    format_option,
    job_of,
    overrides_option,
)
from elasticflow.cli.write.deep_options import deep_options, requested
from elasticflow.errors import ANSWER_IS_NO, FINISHED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from elasticflow.cli.write.deep_options import DeepRequest
    from elasticflow.cli.write.plan_view import Answer, PlanView
    from elasticflow.compiler.plan.forecast import Knowledge, KnownSets
    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.deep.check import DeepReport
    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.observe.estimates import RunFacts
    from elasticflow.run_folder import RunFolder

_WIDTH = 100  # where there is no terminal


@click.command("plan")
@click.argument("job_file", metavar="JOB", type=JOB_FILE)
@case_option
@overrides_option
@click.option(
    "--diff",
    "run",
    type=RUN,
    metavar="RUN",
    help="Compare with this run, not with the newest, and take facts from it.",
)
@format_option
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="DIR",
    type=FOLDER,
    help="Write the launch folder instead: train.py, torchrun.sh, plan.json and the files they are made from.",
)
@click.option("--force", is_flag=True, help="With -o: replace files that were edited or are not ours.")
@deep_options
def command(
    job_file: Path,
    case: str | None,
    overrides: tuple[str, ...],
    run: str | None,
    form: str,
    folder: Path | None,
    *,
    force: bool,
    deep: bool,
    deep_step: bool,
    deep_timeout: int | None,
) -> int:
    """Show what a run of a job file would do; nothing is run, nor imported unless with --deep.

    Facts of data, model and speed come from the job's newest run or from --deep, and the plan names the source. RUN is
    a run folder, a run id, or a job's name. The launch folder that -o writes trains without this command: by
    `bash DIR/torchrun.sh`, or in one process by `python DIR/train.py`.

    \b
    elasticflow plan jobs/mnist.toml
    elasticflow plan jobs/mnist.toml --set nodes.max=8
    elasticflow plan jobs/mnist.toml --deep             imports your code, in a child process
    elasticflow plan jobs/mnist.toml --diff 20261120-104500-4f2a
    elasticflow plan jobs/mnist.toml --format json
    elasticflow plan jobs/mnist.toml -o build          train.py and torchrun.sh, to read and to keep
    elasticflow plan jobs/sweep.toml                   the cases of a file with [matrix]
    elasticflow plan jobs/sweep.toml --case lr0.001-seed1
    """
    from elasticflow.cli.output import show_warnings
    from elasticflow.jobfile.load import has_matrix
    from elasticflow.observe.runs import find_run

    request = requested(deep=deep, deep_step=deep_step, deep_timeout=deep_timeout)
    if folder is not None:
        if run is not None or request is not None or form != "text":
            raise click.UsageError(
                "-o writes files and shows no plan: it goes with --case, --set and --force only"
            )
        _write(job_of(job_file, overrides, case), overrides, case, folder, force=force)
        return FINISHED
    if force:
        raise click.UsageError("--force goes with -o")
    if case is None and has_matrix(job_file, overrides):
        if run is not None or request is not None:
            raise click.UsageError(
                f"{job_file} is several jobs: --deep and --diff are about one of them, give --case"
            )
        show_cases(job_file, overrides, form)
        return FINISHED
    loaded = job_of(job_file, overrides, case)
    show_warnings(loaded)
    against = newest_run(loaded) if run is None else find_run(loaded.project_root, run)
    report, is_wrong = None, False
    if request is not None:
        report, is_wrong = _try_out(loaded, request)
    show(loaded, against, form, report=report)
    return ANSWER_IS_NO if is_wrong else FINISHED


def _write(
    loaded: LoadedJob, overrides: tuple[str, ...], case: str | None, folder: Path, *, force: bool
) -> None:
    from elasticflow.cli.output import shell_path, show_warnings
    from elasticflow.compiler.launch_folder import launch_files, materialize
    from elasticflow.compiler.plan.launch_plan import plan_job

    job, root = loaded.job, loaded.project_root
    plan = plan_job(job, project_root=root, job_files=loaded.files, case=case)
    files = launch_files(plan, job, folder, project_root=root, overrides=overrides)
    materialize(folder, files, force=force)
    show_warnings(loaded)
    torchrun, train = (shell_path(folder / name) for name in ("torchrun.sh", "train.py"))
    if loaded.job.script is not None:
        click.echo(f"wrote {folder}: torchrun.sh, torchrun.args, plan.json, job.json, sources/")
        click.echo(f"  the script by plain torchrun: bash {torchrun}")
        return
    click.echo(f"wrote {folder}: train.py, torchrun.sh, torchrun.args, plan.json, job.json, sources/")
    click.echo(f"  several workers: bash {torchrun}")
    click.echo(f"  one process:     python {train}")


def show(
    loaded: LoadedJob,
    against: RunFolder | None,
    form: str = "text",
    *,
    report: DeepReport | None = None,
    asides: dict[str, str] | None = None,
) -> None:
    """Print the plan of a job without errors.

    Args:
        against: The run that the job is compared with, if any.
        form: `text` or `json`.
    """
    from elasticflow.cli.output import print_json, terminal_width
    from elasticflow.cli.write.plan_view import PlanView, lines_of
    from elasticflow.compiler.plan.forecast import forecast
    from elasticflow.compiler.plan.launch_plan import plan_job
    from elasticflow.observe.estimates import read_run_facts

    job = loaded.job
    plan = plan_job(job, project_root=loaded.project_root, job_files=loaded.files)
    run_facts = None
    if against is not None and against.launch_numbers():
        run_facts = read_run_facts(against, job, plan, loaded.project_root)
    known = _knowledge(loaded, run_facts, report)
    answer = _answer((run_facts and run_facts.drift) or ())
    view = PlanView(
        plan.public(), job, known, forecast(job, known), run_facts, answer, asides or {}, _sets(report)
    )
    if form == "json":
        print_json(_facts(view))
        return
    click.echo("\n".join(lines_of(view, max(60, terminal_width() or _WIDTH))))


def show_cases(job_file: Path, overrides: Sequence[str], form: str = "text") -> None:
    """Print the cases of a file.

    Raises:
        JobRefusedError: a case has errors.
        CaseError: the file has no [matrix].
    """
    from elasticflow.cli.output import print_json
    from elasticflow.jobfile.diagnostics.toml_literals import dotted
    from elasticflow.jobfile.load import require_cases

    jobs = require_cases(job_file, overrides, environment=os.environ)
    if form == "text":
        click.echo("\n".join(_cases_text(job_file, jobs)))
        return
    print_json(
        [
            {
                "case": loaded.case,
                "job": loaded.job.job.name,
                "changes": {dotted(key): value for key, value in loaded.changes.items()},
            }
            for loaded in jobs
        ]
    )


def _cases_text(path: Path, jobs: Sequence[LoadedJob]) -> Iterator[str]:
    """Yield the lines that show the cases of a file, and the keys that each case changes."""
    from elasticflow.cli.output import shell_path, table
    from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
    from elasticflow.observe.terminal.formats import plural

    yield f"{path}: {plural(len(jobs), 'case')} of one file"
    yield ""
    keys = list(dict.fromkeys(key for job in jobs for key in job.changes))
    rows = [
        (job.case or "", *(show(job.changes[key]) if key in job.changes else "-" for key in keys))
        for job in jobs
    ]
    yield from table(("CASE", *map(dotted, keys)), rows)
    yield ""
    file = shell_path(path)
    yield f"one of them:  elasticflow plan {file} --case {jobs[0].case}"
    yield f"train one:    elasticflow run {file} --case {jobs[0].case}"
    yield f"train all:    elasticflow run {file} --all"


def newest_run(loaded: LoadedJob) -> RunFolder | None:
    """Return the job's newest run that was launched, or None."""
    from elasticflow.observe.runs import list_runs

    runs = list_runs(loaded.project_root, loaded.job.job.name)
    return next((run for run in runs if run.launch_numbers()), None)


def _try_out(loaded: LoadedJob, request: DeepRequest) -> tuple[DeepReport, bool]:
    """Try the job out, print findings on standard error, and return the report and whether a finding is an error."""
    from elasticflow.cli.write.deep_options import try_out_loaded
    from elasticflow.jobfile.diagnostics.render_text import render

    report, findings = try_out_loaded(loaded, request)
    if findings:
        click.echo(render(findings) + "\n", err=True)
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    return report, any(finding.severity == "error" for finding in findings)


def _knowledge(loaded: LoadedJob, run_facts: RunFacts | None, report: DeepReport | None) -> Knowledge:
    """Return the known facts: from `--deep`, else from the job file, else from a run."""
    from elasticflow.compiler.plan.forecast import Knowledge, Known

    facts = {} if run_facts is None else dict(run_facts.facts)
    if loaded.job.script is None and loaded.job.dataset.samples is not None:
        facts["samples"] = Known(loaded.job.dataset.samples, "dataset.samples")
    seen = {} if report is None else report.facts.known()
    facts |= {name: Known(value, "--deep") for name, value in seen.items() if name in Knowledge._fields}
    return Knowledge(**facts)


def _sets(report: DeepReport | None) -> KnownSets | None:
    from elasticflow.compiler.plan.forecast import KnownSets

    if report is None or report.facts.sets is None or report.facts.shares is None:
        return None
    return KnownSets(report.facts.sets, report.facts.shares, "--deep")


def _answer(drift: Sequence[Difference]) -> Answer:
    weights = {difference.weight for difference in drift}
    return "refuses" if "corrupting" in weights else "asks" if "trajectory" in weights else "goes on"


def _facts(view: PlanView) -> dict[str, object]:
    from elasticflow.cli.write.plan_facts import drawn_in_words
    from elasticflow.compiler.plan.batch_split import worlds

    run_facts, known, ahead = view.run_facts, view.known, view.ahead
    samples = known.samples
    drift = None
    if run_facts is not None and run_facts.drift is not None:
        differences = [difference.to_json() for difference in run_facts.drift]
        drift = {"run_id": run_facts.run_id, "differences": differences, "going_on": view.answer}
    return {
        **view.plan.model_dump(mode="json"),
        "worlds": [asdict(row) for row in worlds(view.job)],
        "samples": None if samples is None else int(samples.value),
        "steps": ahead.steps,
        "steps_per_epoch": ahead.steps_per_epoch,
        "known": {name: None if fact is None else fact._asdict() for name, fact in known._asdict().items()},
        "forecast": ahead._asdict(),
        "drift": drift,
        "drawn": None if view.plan.script is not None else drawn_in_words(view.job, view.sets),
        "sets": None if view.sets is None else view.sets._asdict(),
    }
