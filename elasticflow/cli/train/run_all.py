"""`elasticflow run FILE --all`: the cases of a file one after the other."""

from __future__ import annotations

import os
import shlex
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from elasticflow.cli.output import STATUS_COLOURS, interrupt_on_signals, paint, show_warnings, table, warn
from elasticflow.cli.train.run_options import run_id_of
from elasticflow.errors import (
    ANSWER_IS_NO,
    BUDGET_SPENT,
    FINISHED,
    INTERRUPTED,
    KILLED_BY_USER,
    ElasticflowError,
)
from elasticflow.observe.status import read_status
from elasticflow.observe.terminal.formats import number, span
from elasticflow.redaction import public_overrides
from elasticflow.run_folder import RunFolder, new_run_id

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence
    from pathlib import Path

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.load import LoadedJob

_WORDS = {
    FINISHED: "finished",
    ANSWER_IS_NO: "failed",
    BUDGET_SPENT: "failed, restart budget spent",
    INTERRUPTED: "interrupted",
    KILLED_BY_USER: "interrupted",
}
_NOT_BEGUN = "not begun"


class CaseResult(NamedTuple):
    """What became of one case.

    Attributes:
        case: Its name.
        run: Its run folder; it need not exist.
        outcome: A word or two: as in `elasticflow runs`, or why there is no run.
        seconds: Spent on it now; None: nothing was done.
    """

    case: str
    run: RunFolder
    outcome: str
    seconds: float | None = None


def run_all(
    job_file: Path,
    overrides: Sequence[str],
    run_id: str | None,
    but: Container[str],
    train: Callable[[LoadedJob, RunFolder], int],
    *,
    is_quiet: bool,
) -> int:
    """Train every case that is not finished, sum up, and return the exit code.

    A case that fails does not stop the others: the exit code tells of it in the end. A signal does, and it leaves a
    snapshot; with the same run id, the same command goes on with the case that was interrupted.

    Args:
        job_file: A file with [matrix].
        overrides: `--set` values.
        run_id: Of all runs, each ends in its case; default: a new one.
        but: Codes of warnings that do not count.
        train: Trains one case in a run folder and returns its exit code.
        is_quiet: Standard output belongs to records: speak on standard error.

    Raises:
        JobRefusedError: some case has errors; nothing was begun.
    """
    from elasticflow.jobfile.load import require_cases

    jobs = require_cases(job_file, overrides, environment=os.environ)
    whole = run_id or new_run_id()
    runs = [_folder(each, run_id_of(whole, each.case)) for each in jobs]
    results = [CaseResult(str(each.case), run, _NOT_BEGUN) for each, run in zip(jobs, runs, strict=True)]
    shown: set[Diagnostic] = set()
    code = FINISHED
    interrupt_on_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for index, (job, run) in enumerate(zip(jobs, runs, strict=True)):
        blank_line = "\n" if index else ""
        say(f"{blank_line}case {index + 1} of {len(jobs)}: {job.case}, run {run.run_id}", quiet=is_quiet)
        _warn_once(job, shown, but)
        began = time.monotonic()
        try:
            ended, outcome = _train(job, run, train)
        except KeyboardInterrupt:  # before its supervisor stood, or behind it
            ended, outcome = INTERRUPTED, "interrupted"
        seconds = None if outcome == "finished before" else time.monotonic() - began
        results[index] = CaseResult(str(job.case), run, outcome, seconds)
        code = code if ended == FINISHED else ANSWER_IS_NO
        if ended in {INTERRUPTED, KILLED_BY_USER}:
            code = ended
            break
    _sum_up(results, code, _again(job_file, overrides, whole), quiet=is_quiet)
    return code


def _again(job_file: Path, overrides: Sequence[str], run_id: str) -> str:
    flags = [f"--set={text}" for text in public_overrides(overrides)]
    return shlex.join(["elasticflow", "run", str(job_file), "--all", "--run-id", run_id, *flags])


def _sum_up(results: Sequence[CaseResult], code: int, again: str, *, quiet: bool) -> None:
    say("\n" + "\n".join(_results_text(results)), quiet=quiet)
    if code != FINISHED:
        what = "go on with" if code in {INTERRUPTED, KILLED_BY_USER} else "try those that failed again with"
        say(f"\n{what}: {again}", quiet=quiet)


def _results_text(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield the lines of the summary of `run --all`."""
    header = ("CASE", "RUN", "OUTCOME", "STEP", "LOSS", "EVALUATION", "TIME")
    rows = []
    for result in results:
        status = read_status(result.run)
        of = "" if status.steps is None else f"/{status.steps}"
        is_there = status.launch > 0
        rows.append(
            (
                *(result.case, result.run.run_id if is_there else "-", result.outcome),
                f"{status.step}{of}" if is_there else "-",
                number(status.loss),
                status.main_metrics or "-",
                "-" if result.seconds is None else span(result.seconds),
            )
        )

    def paint_outcome(row: int, title: str, cell: str) -> str:
        colour = STATUS_COLOURS.get(results[row].outcome.split(",")[0])
        return paint(cell, colour) if title == "OUTCOME" and colour else cell

    yield from table(header, rows, paint_cell=paint_outcome)


def say(text: str, *, quiet: bool) -> None:
    """Tell a person something."""
    click.echo(text, err=quiet)


def _folder(job: LoadedJob, run_id: str) -> RunFolder:
    assert job.job is not None
    return RunFolder.of(job.project_root, job.job.job.name, run_id)


def _train(job: LoadedJob, run: RunFolder, train: Callable[[LoadedJob, RunFolder], int]) -> tuple[int, str]:
    from elasticflow.observe.runs import is_finished

    if is_finished(run):
        return FINISHED, "finished before"
    try:
        code = train(job, run)
    except ElasticflowError as error:
        warn(f"case {job.case} was not started: {error}")
        return error.exit_code, "not started"
    return code, _WORDS.get(code, "failed")


def _warn_once(job: LoadedJob, shown: set[Diagnostic], but: Container[str]) -> None:
    """Show the warnings about a case that no case before it had."""
    new = [each for each in job.diagnostics if each not in shown]
    shown.update(new)
    show_warnings(job._replace(diagnostics=new), but=but)
