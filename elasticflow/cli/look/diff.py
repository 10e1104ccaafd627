"""`elasticflow diff RUN RUN|JOB`: the differences between two runs, or between a run and a job file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from elasticflow.cli.output import paint, paint_weight, print_json, table
from elasticflow.cli.parameters import RUN, RUN_OR_JOB, case_option, format_option, job_of, overrides_option

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.compiler.provenance.drift import Difference
    from elasticflow.observe.run_inputs import RunInputs

_JOB = "job"
# The tables of differences by what they are about; all other tables are the job file's.
_SUBJECTS: dict[str, frozenset[str]] = {
    _JOB: frozenset(),
    "code": frozenset({"sources", "git"}),
    "data": frozenset({"data"}),
    "environment": frozenset({"versions", "machine"}),
}
_OF_DIFF = {"+": "green", "-": "red", "@": "cyan"}


@click.command("diff")
@click.argument("run", type=RUN, metavar="RUN")
@click.argument("other", type=RUN_OR_JOB, metavar="RUN|JOB")
@overrides_option
@case_option
@click.option("--sources", is_flag=True, help="Show the text of the job's own files that differ, as a diff.")
@format_option
def command(
    run: str, other: str, overrides: tuple[str, ...], case: str | None, form: str, *, sources: bool
) -> int:
    """Compare a run with another run, or with a job file as it is now.

    The command compares job, own code, versions, machine and data. Between a run and a job file it weighs each
    difference: what it would do to the run if it continued as the job. The outcomes of two runs are shown, too, but
    are no difference. A run is a run folder, id, job name (its newest run), or the URI of its snapshots. Exit code: 0 no
    difference, 1 some, 2 one cannot be read.

    \b
    elasticflow diff mnist jobs/mnist.toml               what changed since the newest run
    elasticflow diff 20261120-104500-4f2a nightly --sources
    elasticflow diff s3://bucket/mnist/nightly jobs/mnist.toml --format json
    """
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
            "differences": [difference.to_json() for difference in differences],
        }
        print_json(facts if text is None else {**facts, "sources": text})
    else:
        click.echo("\n".join(_text_of(old, new, differences, text)))
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
    return {
        "name": inputs.name,
        "outcome": _outcome_of(inputs),
        "data": dict(inputs.data),
        **inputs.made.origins.to_json(),
    }


def _text_of(
    old: RunInputs, new: RunInputs, differences: Sequence[Difference], sources: Sequence[str] | None
) -> Iterator[str]:
    from elasticflow.compiler.provenance.drift import lines_of

    # The order is the caller's: the second run may be the older one.
    yield f"{paint('from', bold=True)}  {old.name}"
    yield f"{paint('to', bold=True)}    {new.name}"
    yield ""
    if differences and old.copies is not None and new.copies is not None:
        yield from _by_subject(differences)
    elif differences:
        yield from lines_of(differences, paint_weight)
    else:
        yield "  no difference in job, own code, versions, machine and data"
    yield from _outcomes(old, new)
    if sources is not None:
        yield ""
        yield from (paint(line, _OF_DIFF.get(line[:1])) for line in sources or ["no file differs"])


def _by_subject(differences: Sequence[Difference]) -> Iterator[str]:
    """Yield the differences of two runs by what they are about: neither run continues as the other."""
    from elasticflow.compiler.provenance.drift import change

    keys = max(len(difference.key) for difference in differences)
    for subject in _SUBJECTS:
        rows = [each for each in differences if _subject_of(each) == subject]
        if rows:
            yield f"  {paint(subject, bold=True)}"
        yield from (f"    {each.key:<{keys}}  {change(each)}" for each in rows)


def _subject_of(difference: Difference) -> str:
    table = difference.key.partition(".")[0]
    return next((subject for subject, tables in _SUBJECTS.items() if table in tables), _JOB)


def _outcome_of(inputs: RunInputs) -> dict[str, object] | None:
    """Return the outcome of a run; None without a run folder."""
    from elasticflow.observe.terminal.formats import span

    status = inputs.status
    if status is None:
        return None
    return {
        "status": status.status,
        "launches": status.launch,
        "took": span(sum(status.durations.values())) if status.durations else None,
        "steps": None if status.has_no_steps else status.step,
        "loss": status.loss,
        **{f"evaluation {name}": value for name, value in status.evaluation.items()},
        "best": status.best,
        "restarts": status.restarts,
        "samples_per_s": status.samples_per_s,
    }


def _outcomes(old: RunInputs, new: RunInputs) -> Iterator[str]:
    was, now = _outcome_of(old) or {}, _outcome_of(new) or {}
    names = [name for name in {**was, **now} if was.get(name) is not None or now.get(name) is not None]
    if not names:
        return
    rows = [(name.replace("_per_s", "/s"), _shown(was.get(name)), _shown(now.get(name))) for name in names]
    yield ""
    yield from (f"  {line}" for line in table(("how it went", "from", "to"), rows))


def _shown(value: object) -> str:
    from elasticflow.observe.terminal.formats import number

    return f"{value:,}" if isinstance(value, int) else value if isinstance(value, str) else number(value)
