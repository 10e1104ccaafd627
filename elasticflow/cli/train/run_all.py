"""`elasticflow run FILE --all`: the cases of a file one after the other."""

from __future__ import annotations

import os
import shlex
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.cli.output import (
    STATUS_COLOURS,
    interrupt_on_signals,
    paint,
    show_warnings,
    table,
    terminal_width,
    warn,
)
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
from elasticflow.run_folder import new_run_id
from elasticflow.system.redaction import public_overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Sequence

    from elasticflow.cli.train.run_options import RunOptions
    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.load import LoadedJob
    from elasticflow.run_folder import RunFolder

_WORDS = {
    FINISHED: "finished",
    ANSWER_IS_NO: "failed",
    BUDGET_SPENT: "failed, restart budget spent",
    INTERRUPTED: "interrupted",
    KILLED_BY_USER: "interrupted",
}
_NOT_BEGUN = "not begun"
_FINISHED_BEFORE = "finished before"


class CaseResult(NamedTuple):
    """Result of one case.

    Attributes:
        run: The run folder, which need not exist.
        outcome: Status as in `elasticflow runs`, or the reason why there is no run.
        seconds: Time that this command spent on the case; None: nothing was done.
    """

    case: str
    run: RunFolder
    outcome: str
    seconds: float | None = None


def run_all(options: RunOptions, train: Callable[[LoadedJob, RunFolder], int]) -> int:
    """Train every case that is not finished, print a summary, and return the exit code.

    A case that fails does not stop the others, but shows in the exit code. A signal stops all: the current case takes a
    snapshot, and the same command with the same run id continues with it.

    Args:
        options: The command line; its job file has a [matrix].
        train: Trains one case in a run folder and returns its exit code.

    Raises:
        JobRefusedError: a case has errors; nothing was started.
    """
    from elasticflow.jobfile.load import require_cases

    jobs = require_cases(options.job_file, options.overrides, environment=os.environ)
    options = replace(options, run_id=options.run_id or new_run_id())
    results = [CaseResult(str(job.case), options.folder_of(job), _NOT_BEGUN) for job in jobs]
    shown: set[Diagnostic] = set()
    code = FINISHED
    interrupt_on_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for index, (job, result) in enumerate(zip(jobs, results, strict=True)):
        blank_line = "\n" if index else ""
        options.say(f"{blank_line}case {index + 1} of {len(jobs)}: {result.case}, run {result.run.run_id}")
        _warn_once(job, shown, options.pointless_warnings)
        began = time.monotonic()
        try:
            ended, outcome = _train(job, result.run, train)
        except KeyboardInterrupt:  # before the supervisor ran, or after it had ended
            ended, outcome = INTERRUPTED, "interrupted"
        seconds = None if outcome == _FINISHED_BEFORE else time.monotonic() - began
        results[index] = result._replace(outcome=outcome, seconds=seconds)
        code = code if ended == FINISHED else ANSWER_IS_NO
        if ended in {INTERRUPTED, KILLED_BY_USER}:
            code = ended
            break
    _sum_up(results, code, options)
    return code


def _sum_up(results: Sequence[CaseResult], code: int, options: RunOptions) -> None:
    options.say("\n" + "\n".join(_results_text(results)))
    if code != FINISHED:
        purpose = (
            "continue with" if code in {INTERRUPTED, KILLED_BY_USER} else "try those that failed again with"
        )
        flags = [f"--set={text}" for text in public_overrides(options.overrides)]
        words = ["elasticflow", "run", str(options.job_file), "--all", "--run-id", str(options.run_id)]
        options.say(f"\n{purpose}: {shlex.join([*words, *flags])}")


def _results_text(results: Sequence[CaseResult]) -> Iterator[str]:
    header = ("CASE", "RUN", "OUTCOME", "STEP", "LOSS", "EVALUATION", "TIME")
    rows = []
    for result in results:
        status = read_status(result.run)
        of = "" if status.steps is None else f"/{status.steps}"
        is_there = status.launch > 0
        rows.append(
            (
                *(result.case, result.run.run_id if is_there else "-"),
                paint(result.outcome, STATUS_COLOURS.get(result.outcome.partition(",")[0])),
                f"{status.step}{of}" if is_there else "-",
                number(status.loss),
                status.main_metrics or "-",
                "-" if result.seconds is None else span(result.seconds),
            )
        )
    yield from table(header, rows, width=terminal_width(), first_to_go=("TIME", "LOSS", "STEP", "RUN"))


def _train(job: LoadedJob, run: RunFolder, train: Callable[[LoadedJob, RunFolder], int]) -> tuple[int, str]:
    from elasticflow.observe.runs import is_finished

    if is_finished(run):
        return FINISHED, _FINISHED_BEFORE
    try:
        code = train(job, run)
    except ElasticflowError as error:
        warn(f"case {job.case} was not started: {error}")
        return error.exit_code, "not started"
    return code, _WORDS.get(code, "failed")


def _warn_once(job: LoadedJob, shown: set[Diagnostic], but: Container[str]) -> None:
    """Show the warnings about a case that no earlier case had."""
    new = [diagnostic for diagnostic in job.diagnostics if diagnostic not in shown]
    shown.update(new)
    show_warnings(job._replace(diagnostics=new), but=but)
