"""What `chaos` shows: a line that moves while a run goes on, then what each fault cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import click

from elasticflow.cli.prove.verify_text import Meter, percent, where
from elasticflow.cli.terminal import paint
from elasticflow.observe.terminal.event_lines import user_frames
from elasticflow.observe.terminal.formats import plural, span

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from elasticflow.errors import TrialFailedError
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.trials.chaos import ChaosOutcome, FaultCost
    from elasticflow.trials.fault_plan import FaultPlan
    from elasticflow.trials.trial import Trial

_WIDTHS = (5, 52, 22, 8)
_HEADER = ("STEP", "WHAT WAS DONE", "RESTARTS", "LOST", "DONE AGAIN")


class ChaosView:
    """Shows a trial by faults on standard output, its progress on standard error if that is a terminal.

    Args:
        job: The job.
        plan: What is done.
        workers: Of each node.
        steps: Of each run.
        tolerance: Of `compare_losses`.
        quiet: Show the progress only.
    """

    def __init__(
        self, job: Job, plan: FaultPlan, workers: int, steps: int, tolerance: float, *, quiet: bool
    ) -> None:
        self.job, self.plan, self.workers, self.tolerance = job, plan, workers, tolerance
        self.is_exact = job.train.consistency == "exact"
        self._steps, self._quiet = steps, quiet
        self._meter = Meter()

    def __enter__(self) -> Self:
        if not self._quiet:
            name, faults = paint(self.job.job.name, bold=True), plural(len(self.plan.faults), "fault")
            nodes = "" if self.plan.nodes == 1 else f"{self.plan.nodes} nodes of "
            size = f"{nodes}{plural(self.workers, 'worker')}"
            click.echo(f"{name}: {plural(self._steps, 'step')} with {size} and {faults} ({self.plan.name})\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.clear()

    def explain(self, error: TrialFailedError, place: Path) -> tuple[str, str]:
        """Return what went wrong in the job's own words, and where more of it is."""
        frames = user_frames(error.traceback) if error.traceback else ()
        return "\n  ".join([error.message, *frames]), f"both runs are in {place}"

    def begin(self, trial: Trial) -> Callable[[int], None]:
        """Return what shows the steps of *trial* so far."""
        label = "undisturbed" if trial.plan is None else "disturbed"
        return lambda step: self._meter.show(label, step, trial.steps)

    def conclude(self, outcome: ChaosOutcome, place: Path | None) -> None:
        """Show what each fault cost, and the answer."""
        click.echo(paint(_cells(_HEADER), dim=True))
        for cost in outcome.costs:
            click.echo(_cells(_row(cost)))
        if outcome.undone:
            click.echo(f"{plural(outcome.undone, 'fault')} not done: the run had ended")
        calm, wild = outcome.seconds
        again = (
            f", {plural(outcome.comparison.redone, 'step')} done again" if outcome.comparison.redone else ""
        )
        click.echo(f"\n{plural(outcome.steps, 'step')} in {span(wild)}, undisturbed in {span(calm)}{again}")
        difference = outcome.comparison.difference
        if difference is None:
            click.echo(f"{paint('same', 'green', bold=True)}: {self._agreed(outcome)}")
        else:
            click.echo(f"{paint('different', 'red', bold=True)}: {where(difference)}")
        if place is not None:
            click.echo(f"both runs are in {place}; the disturbed one: elasticflow why {outcome.run.path}")

    def _agreed(self, outcome: ChaosOutcome) -> str:
        found = outcome.comparison
        if self.is_exact:
            return f"{found.values} tensors and numbers of model and optimizer, bit for bit, after each of {found.steps} steps"
        far = percent(found.distance or 0.0)
        return f"every sample once in {found.steps} steps, and the smoothed losses are at most {far} apart"


def _row(cost: FaultCost) -> tuple[str, ...]:
    restarts = ", ".join(cost.restarts) or "none"
    if cost.snapshots:
        restarts += f", {plural(cost.snapshots, 'snapshot')} lost"
    lost = "" if cost.seconds is None else span(cost.seconds)
    return str(cost.fault.step), cost.words, restarts, lost, str(cost.redone) if cost.redone else ""


def _cells(cells: tuple[str, ...]) -> str:
    widths = (*_WIDTHS, 0)
    return "".join(f"{text:<{width + 2}}" for text, width in zip(cells, widths, strict=True)).rstrip()
