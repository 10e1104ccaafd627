"""`elasticflow diff RUN RUN|JOB`: what two runs, or a run and a job file, do not have in common."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.parameters import case_option, job_of, overrides_option

if TYPE_CHECKING:
    from elasticflow.observe.run_inputs import RunInputs


@click.command("diff")
@click.argument("run", metavar="RUN")
@click.argument("other", metavar="RUN|JOB")
@overrides_option
@case_option
@click.option("--sources", is_flag=True, help="Show the text of the job's own files that differ, as a diff.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", help="Default: text.")
def command(
    run: str, other: str, overrides: tuple[str, ...], case: str | None, form: str, *, sources: bool
) -> int:
    """Compare a run with another run, or with a job file as it is now.

    Job, own code, versions, machine, checkout and data are compared, and weighed as if the first were to go on as the
    second. How both went is shown beside it and does not count. A run is a run folder, id, job name (its newest run),
    or its URI where its snapshots are. Exit code: 0 no difference, 1 some, 2 one of them cannot be read.

    \b
    elasticflow diff mnist jobs/mnist.toml               what changed since the newest run
    elasticflow diff 20261120-104500-4f2a nightly --sources
    elasticflow diff s3://bucket/mnist/nightly jobs/mnist.toml --format json
    """
    from elasticflow.cli.look.diff_text import lines_of
    from elasticflow.cli.terminal import print_json
    from elasticflow.errors import ANSWER_IS_NO, FINISHED
    from elasticflow.jobfile.project import current_project_root
    from elasticflow.observe import run_inputs

    old, new = _both_inputs(current_project_root(), run, other, overrides, case)
    differences = run_inputs.differences_of(old, new)
    text = list(run_inputs.source_diff(old, new)) if sources else None
    if form == "json":
        facts = {
            "old": _facts(old),
            "new": _facts(new),
            "equal": not differences,
            "differences": [each.to_json() for each in differences],
        }
        print_json(facts if text is None else {**facts, "sources": text})
    else:
        click.echo("\n".join(lines_of(old, new, differences, text)))
    return ANSWER_IS_NO if differences else FINISHED


def _both_inputs(
    root: Path, run: str, other: str, overrides: tuple[str, ...], case: str | None
) -> tuple[RunInputs, RunInputs]:
    from elasticflow.observe.run_inputs import inputs_of_job, inputs_of_run

    def is_job(text: str) -> bool:
        return text.endswith(".toml") and Path(text).is_file()

    if (overrides or case) and not (is_job(run) or is_job(other)):
        raise click.UsageError("--set and --case are about a job file, and two runs were given")
    if is_job(run):
        other_job = job_of(Path(other), (), case) if is_job(other) else None
        new = inputs_of_run(root, other) if other_job is None else inputs_of_job(other_job, None)
        return inputs_of_job(job_of(Path(run), overrides, case), new), new
    old = inputs_of_run(root, run)
    if is_job(other):
        return old, inputs_of_job(job_of(Path(other), overrides, case), old)
    return old, inputs_of_run(root, other)


def _facts(inputs: RunInputs) -> dict[str, object]:
    from elasticflow.cli.look.diff_text import outcome_of

    return {
        "name": inputs.name,
        "outcome": outcome_of(inputs),
        "data": dict(inputs.data),
        **inputs.made.origins.to_json(),
    }
