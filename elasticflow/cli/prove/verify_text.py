"""What `verify-elastic` shows: a line that moves while a trial runs, a row for each that is over."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

import click

from elasticflow.cli.terminal import paint
from elasticflow.observe.terminal.event_lines import user_frames
from elasticflow.observe.terminal.formats import plural, span
from elasticflow.trials import trial as trials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from types import TracebackType

    from elasticflow.errors import TrialFailedError
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.trials.compare_runs import Divergence
    from elasticflow.trials.trial import Trial
    from elasticflow.trials.verify_elastic import TrialOutcome

_EVERY_S = 0.1
_WIDTHS = (9, 46, 14, 10)
_HEADER = ("WORKERS", "WHAT WAS DONE", "STEPS", "TIME", "RESULT")


class Meter:
    """A line on standard error that moves while a trial runs, if that is a terminal."""

    def __init__(self) -> None:
        self._next = 0.0

    def show(self, label: str, step: int, steps: int) -> None:
        """Show how far it is."""
        now = time.monotonic()
        if now >= self._next and sys.stderr.isatty():
            self._next = now + _EVERY_S
            progress = "starting" if step == 0 else f"step {step} of {steps}"
            sys.stderr.write(f"\r{label}  {progress}\x1b[K")
            sys.stderr.flush()

    def clear(self) -> None:
        """Take the line away."""
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


class VerifyView:
    """Shows a verification on standard output, its progress on standard error if that is a terminal.

    Args:
        job: The job.
        worlds: World sizes.
        steps: Steps of each trial.
        tolerance: Of `compare_losses`.
        quiet: Show the progress only.
    """

    def __init__(self, job: Job, worlds: Sequence[int], steps: int, tolerance: float, *, quiet: bool) -> None:
        self.job, self.tolerance = job, tolerance
        self.is_exact = job.train.consistency == "exact"
        self._worlds, self._steps, self._quiet = worlds, steps, quiet
        self._begun = 0
        self._meter = Meter()

    def __enter__(self) -> Self:
        if not self._quiet:
            loss = f"the loss within {percent(self.tolerance)}, a restart to the last bit"
            what = "to the last bit" if self.is_exact else loss
            name, sizes = paint(self.job.job.name, bold=True), ", ".join(map(str, self._worlds))
            click.echo(f"{name}: the same {plural(self._steps, 'step')} at world size {sizes}, {what}?\n")
            click.echo(paint(_cells(_HEADER), dim=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.clear()

    def explain(self, error: TrialFailedError, kept: Path | None) -> tuple[str, str]:
        """Return what went wrong in the job's own words, and where more of it is."""
        frames = user_frames(error.traceback) if error.traceback else ()
        more = f"its logs are in {kept}" if kept else "--keep DIR keeps its logs"
        return "\n  ".join([error.message, *frames]), more

    def begin(self, trial: Trial) -> Callable[[int], None]:
        """Return what shows the steps of *trial* so far."""
        self._begun += 1
        noun = "worker" if trial.worlds[-1] == 1 else "workers"
        count = max(
            self._begun, trials.count(self._worlds)
        )  # one more, where the machine may not repeat the job
        label = f"trial {self._begun} of {count}  {_workers(trial)} {noun}"

        return lambda step: self._meter.show(label, step, trial.steps)

    def show(self, outcome: TrialOutcome) -> None:
        """Show the row of a trial that is over, and where it first differs."""
        self._meter.clear()
        if self._quiet:
            return
        found = outcome.comparison
        cells = _cells(
            (_workers(outcome.trial), _done_to(outcome.trial), _steps(outcome), span(outcome.seconds))
        )
        click.echo(f"{cells}{_result(outcome)}")
        if found is not None and found.difference is not None:
            click.echo(f"{' ' * (_WIDTHS[0] + 2)}{where(found.difference)}")

    def conclude(self, outcomes: Sequence[TrialOutcome]) -> None:
        """Show the answer."""
        compared = [each for each in outcomes if each.comparison is not None]
        wrong = [
            (each.comparison.difference, each.compared)
            for each in compared
            if each.comparison is not None and each.comparison.difference is not None
        ]
        click.echo()
        if not wrong:
            click.echo(f"{paint('same', 'green', bold=True)}: {_agreed(compared)}")
            return
        first, what = min(wrong, key=lambda each: each[0].step)
        count = plural(len(wrong), "trial")
        click.echo(
            f"{paint('different', 'red', bold=True)}: {count} of {len(compared)}, first at {_place(first)}"
        )
        click.echo(f"help: {_help(first, of_bits=what == 'bits')}", err=True)


def _agreed(compared: Sequence[TrialOutcome]) -> str:
    compare_bits, compare_losses = (
        [each.comparison for each in compared if each.compared == what and each.comparison is not None]
        for what in ("bits", "curve")
    )
    parts = []
    if compare_losses:
        farthest = max(each.distance or 0.0 for each in compare_losses)
        parts.append(
            f"the smoothed losses are at most {percent(farthest)} apart in {compare_losses[0].steps} steps"
        )
    if compare_bits:
        through = " through the restart" if compare_losses else ""
        values = f"{compare_bits[0].values} tensors and numbers of model and optimizer"
        parts.append(f"{values}, bit for bit, after each of {compare_bits[0].steps} steps{through}")
    elif any(each.trial.killed_after is not None for each in compared):
        parts.append("no two runs of this job have the same bits here, so a restart's cannot be compared")
    return "; ".join(parts)


def _result(outcome: TrialOutcome) -> str:
    found = outcome.comparison
    if found is None:
        return "reference"
    words = ("same bits", "other bits") if outcome.compared == "bits" else ("same curve", "another curve")
    far = "" if found.distance is None else f", {percent(found.distance)} off at most"
    is_same = found.difference is None
    return paint(f"{words[0] if is_same else words[1]}{far}", "green" if is_same else "red")


def _cells(cells: Sequence[str]) -> str:
    return "".join(f"{text:<{width + 2}}" for text, width in zip(cells, (*_WIDTHS, 0), strict=False))


def _workers(trial: Trial) -> str:
    return " -> ".join(map(str, trial.worlds))


def _done_to(trial: Trial) -> str:
    if trial.killed_after is None:
        return "nothing"
    then = "resized" if len(set(trial.worlds)) > 1 else "drained"
    return f"kill -9 after step {trial.killed_after}, {then} after step {trial.drained_after}"


def _steps(outcome: TrialOutcome) -> str:
    found = outcome.comparison
    return (
        f"{outcome.steps}, {found.redone} again" if found is not None and found.redone else str(outcome.steps)
    )


def _place(difference: Divergence) -> str:
    return f"step {difference.step}, {difference.name}"


def where(difference: Divergence) -> str:
    """Return `step 7: model/head.weight is 5b1c, was 3f2a in the reference; 31 more differ there`."""
    step, name = difference.step, difference.name
    if name == "step":
        return (
            f"step {step}: {'never done' if difference.found is None else 'done, but not by the reference'}"
        )
    when = f"step {step}"
    if difference.is_start:
        when = (
            "before the first step"
            if step == 0
            else f"where generation {difference.generation} went on, at step {step}"
        )
    elif difference.is_redone:
        when = f"step {step}, done again"
    have, want = (
        value if value is not None else "missing" for value in (difference.found, difference.expected)
    )
    others = f"; {difference.others} more differ there" if difference.others else ""
    return f"{when}: {name} is {have}, was {want} in the reference{others}"


def _help(difference: Divergence, *, of_bits: bool) -> str:
    if not of_bits:
        return "a model with little dropout and large batches stays closer; is anything weighted by the rank or the world size?"
    if difference.generation > 1:
        return (
            "something that training depends on was lost with the worker: a snapshot holds model, optimizer and "
            "what snapshots.include names; `elasticflow validate --deep-step` looks for what it leaves out"
        )
    return "something depends on the rank, the world size or the process: its own random numbers, time, environment, files"


def percent(share: float) -> str:
    """Return a share as `1.5 %`."""
    return f"{100 * share:.3g} %"
