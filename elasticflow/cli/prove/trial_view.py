"""Output of `verify`: progress while a trial runs, a row for each result, the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import click

from elasticflow.cli.output import ProgressMeter, paint, steps_done, table
from elasticflow.observe.terminal.event_lines import user_frames
from elasticflow.observe.terminal.formats import plural, span
from elasticflow.trials.trial import count as count_trials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from elasticflow.errors import TrialFailedError
    from elasticflow.jobfile.tables.job import Job
    from elasticflow.trials.chaos import ChaosOutcome, FaultCost
    from elasticflow.trials.compare_runs import Divergence
    from elasticflow.trials.faults import FaultPlan
    from elasticflow.trials.trial import Trial, World
    from elasticflow.trials.verify_elastic import TrialOutcome

# Rows are shown one by one as trials end, so their columns cannot wait for the widest cell.
_VERIFY_WIDTHS = (9, 46, 14, 10, 0)
_VERIFY_HEADER = ("WORKERS", "WHAT WAS DONE", "STEPS", "TIME", "RESULT")
_CHAOS_HEADER = ("STEP", "WHAT WAS DONE", "RESTARTS", "LOST", "DONE AGAIN")


class TrialView:
    """Shows results on standard output, and progress on standard error if that is a terminal.

    Args:
        tolerance: Largest difference of losses, as in `compare_losses`.
        quiet: Show the progress only.
    """

    def __init__(self, job: Job, steps: int, tolerance: float, *, quiet: bool) -> None:
        self.job, self.tolerance = job, tolerance
        # A script's first trial shows it.
        self.is_exact = job.script is None and job.train.consistency == "exact"
        self._steps, self._quiet = steps, quiet
        self._meter: ProgressMeter | None = None

    @property
    def consistency(self) -> str:
        """The property of the job's steps that all world sizes share: `exact` bits, or the samples of each `batch`."""
        return "exact" if self.is_exact else "batch"

    def __enter__(self) -> Self:
        if not self._quiet:
            self._introduce()
        return self

    def __exit__(self, *exception: object) -> None:
        self._clear()

    def _introduce(self) -> None:
        raise NotImplementedError

    def _clear(self) -> None:
        if self._meter is not None:
            self._meter.clear()

    def _begin(self, label: str, trial: Trial) -> Callable[[int], None]:
        """Return the function that shows how many steps of *trial* are done, under *label*."""
        self._clear()
        self._meter = ProgressMeter(label, trial.steps, steps_done)
        return self._meter


class VerifyView(TrialView):
    """Shows a verification at the world sizes *worlds*; other arguments as `TrialView` has them."""

    def __init__(
        self, job: Job, worlds: Sequence[World], steps: int, tolerance: float, *, quiet: bool
    ) -> None:
        super().__init__(job, steps, tolerance, quiet=quiet)
        self._worlds, self._begun = worlds, 0

    def _introduce(self) -> None:
        loss = f"the loss within {percent(self.tolerance)}, a restart to the last bit"
        what = "to the last bit" if self.is_exact else loss
        if self.job.script is not None:
            what = f"to the last bit with virtual shards, else {loss}"
        name, sizes = paint(self.job.job.name, bold=True), ", ".join(map(str, self._worlds))
        size = "world size" if self._worlds[0].shard is None else "workers/shard"
        click.echo(f"{name}: the same {plural(self._steps, 'step')} at {size} {sizes}, {what}?\n")
        click.echo(paint(_verify_row(_VERIFY_HEADER), dim=True))

    def explain(self, error: TrialFailedError, kept: Path | None) -> tuple[str, str]:
        """Return the failure with the job's own frames of the traceback, and the place of further records."""
        return _with_frames(error), f"its logs are in {kept}" if kept else "--keep DIR keeps its logs"

    def begin(self, trial: Trial) -> Callable[[int], None]:
        """Return the function that shows how many steps of *trial* are done."""
        self._begun += 1
        noun = "worker" if trial.worlds[-1].workers == 1 else "workers"
        # The reference is tried a second time where the machine may not repeat the job.
        count = max(self._begun, count_trials(self._worlds))
        return self._begin(f"trial {self._begun} of {count}  {_workers(trial)} {noun}", trial)

    def show(self, outcome: TrialOutcome) -> None:
        """Show the row of a trial that is over, and its first difference."""
        self._clear()
        if outcome.comparison is None:
            self.is_exact = outcome.compared == "bits"
        if self._quiet:
            return
        comparison = outcome.comparison
        cells = (
            _workers(outcome.trial),
            _what_was_done(outcome.trial),
            _steps(outcome),
            span(outcome.seconds),
        )
        click.echo(_verify_row((*cells, _result(outcome))))
        if comparison is not None and comparison.difference is not None:
            click.echo(f"{' ' * (_VERIFY_WIDTHS[0] + 2)}{where(comparison.difference)}")

    def conclude(self, outcomes: Sequence[TrialOutcome]) -> None:
        """Show the answer."""
        compared = [outcome for outcome in outcomes if outcome.comparison is not None]
        wrong = [
            (outcome.comparison.difference, outcome.compared)
            for outcome in compared
            if outcome.comparison is not None and outcome.comparison.difference is not None
        ]
        click.echo()
        if not wrong:
            click.echo(f"{paint('same', 'green', bold=True)}: {_agreement(compared)}")
            return
        first, what = min(wrong, key=lambda pair: pair[0].step)
        count = f"{plural(len(wrong), 'trial')} of {len(compared)}"
        click.echo(
            f"{paint('different', 'red', bold=True)}: {count}, first at step {first.step}, {first.name}"
        )
        click.echo(f"help: {_help(first, of_bits=what == 'bits')}", err=True)


class ChaosView(TrialView):
    """Shows a run with the faults of *plan* on nodes with *workers* workers each; other arguments as for `TrialView`."""

    def __init__(
        self, job: Job, plan: FaultPlan, workers: int, steps: int, tolerance: float, *, quiet: bool
    ) -> None:
        super().__init__(job, steps, tolerance, quiet=quiet)
        self.plan, self.workers = plan, workers

    def _introduce(self) -> None:
        name, faults = paint(self.job.job.name, bold=True), plural(len(self.plan.faults), "fault")
        nodes = "" if self.plan.nodes == 1 else f"{self.plan.nodes} nodes of "
        size = f"{nodes}{plural(self.workers, 'worker')}"
        click.echo(f"{name}: {plural(self._steps, 'step')} with {size} and {faults} ({self.plan.name})\n")

    def explain(self, error: TrialFailedError, scratch: Path) -> tuple[str, str]:
        """Return the failure with the job's own frames of the traceback, and the place of further records."""
        return _with_frames(error), f"both runs are in {scratch}"

    def begin(self, trial: Trial) -> Callable[[int], None]:
        """Return the function that shows how many steps of *trial* are done."""
        return self._begin("undisturbed" if trial.plan is None else "disturbed", trial)

    def conclude(self, outcome: ChaosOutcome, kept: Path | None) -> None:
        """Show the cost of each fault, and the answer."""
        self._clear()
        click.echo("\n".join(table(_CHAOS_HEADER, [_cost_row(cost) for cost in outcome.costs])))
        if outcome.undone:
            click.echo(f"{plural(outcome.undone, 'fault')} not done: the run had ended")
        calm, wild = outcome.seconds
        redone = outcome.comparison.redone
        again = f", {plural(redone, 'step')} done again" if redone else ""
        click.echo(f"\n{plural(outcome.steps, 'step')} in {span(wild)}, undisturbed in {span(calm)}{again}")
        difference = outcome.comparison.difference
        if difference is None:
            click.echo(f"{paint('same', 'green', bold=True)}: {self._agreement(outcome)}")
        else:
            click.echo(f"{paint('different', 'red', bold=True)}: {where(difference)}")
        if kept is not None:
            click.echo(f"both runs are in {kept}; the disturbed one: elasticflow why {outcome.run.path}")

    def _agreement(self, outcome: ChaosOutcome) -> str:
        comparison = outcome.comparison
        if self.is_exact:
            values = f"{comparison.values} tensors and numbers of model and optimizer"
            return f"{values}, bit for bit, after each of {comparison.steps} steps"
        far = percent(comparison.distance or 0.0)
        return (
            f"every sample once in {comparison.steps} steps, and the smoothed losses are at most {far} apart"
        )


def where(difference: Divergence) -> str:
    """Return `step 7: model/head.weight is 5b1c, was 3f2a in the reference; 31 more differ there`."""
    step, name = difference.step, difference.name
    if name == "step":
        how = "never done" if difference.found is None else "done, but not by the reference"
        return f"step {step}: {how}"
    when = f"step {step}"
    if difference.is_start and step == 0:
        when = "before the first step"
    elif difference.is_start:
        when = f"where generation {difference.generation} continued, at step {step}"
    elif difference.is_redone:
        when = f"step {step}, done again"
    have, want = (
        value if value is not None else "missing" for value in (difference.found, difference.expected)
    )
    others = f"; {difference.others} more differ there" if difference.others else ""
    return f"{when}: {name} is {have}, was {want} in the reference{others}"


def percent(share: float) -> str:
    """Return a share as `1.5 %`."""
    return f"{100 * share:.3g} %"


def _with_frames(error: TrialFailedError) -> str:
    frames = user_frames(error.traceback) if error.traceback else ()
    return "\n  ".join([error.message, *frames])


def _verify_row(cells: Sequence[str]) -> str:
    return "".join(f"{text:<{width + 2}}" for text, width in zip(cells, _VERIFY_WIDTHS, strict=True)).rstrip()


def _cost_row(cost: FaultCost) -> tuple[str, ...]:
    restarts = ", ".join(cost.restarts) or "none"
    if cost.snapshots:
        restarts += f", {plural(cost.snapshots, 'snapshot')} lost"
    lost = "" if cost.seconds is None else span(cost.seconds)
    return str(cost.fault.step), cost.words, restarts, lost, str(cost.redone) if cost.redone else ""


def _agreement(compared: Sequence[TrialOutcome]) -> str:
    bits, curves = (
        [
            outcome.comparison
            for outcome in compared
            if outcome.compared == what and outcome.comparison is not None
        ]
        for what in ("bits", "curve")
    )
    parts = []
    if curves:
        farthest = max(comparison.distance or 0.0 for comparison in curves)
        parts.append(f"the smoothed losses are at most {percent(farthest)} apart in {curves[0].steps} steps")
    if bits:
        through = " through the restart" if curves else ""
        values = f"{bits[0].values} tensors and numbers of model and optimizer"
        parts.append(f"{values}, bit for bit, after each of {bits[0].steps} steps{through}")
    elif any(outcome.trial.killed_after is not None for outcome in compared):
        parts.append("no two runs of this job have the same bits here, so a restart's cannot be compared")
    return "; ".join(parts)


def _result(outcome: TrialOutcome) -> str:
    comparison = outcome.comparison
    if comparison is None:
        return "reference"
    words = ("same bits", "other bits") if outcome.compared == "bits" else ("same curve", "another curve")
    far = "" if comparison.distance is None else f", {percent(comparison.distance)} off at most"
    is_same = comparison.difference is None
    return paint(f"{words[0] if is_same else words[1]}{far}", "green" if is_same else "red")


def _workers(trial: Trial) -> str:
    return " -> ".join(map(str, trial.worlds))


def _what_was_done(trial: Trial) -> str:
    if trial.killed_after is None:
        return "nothing"
    first, last = trial.worlds[0], trial.worlds[-1]
    then = "drained" if first == last else "cut anew" if first.workers == last.workers else "resized"
    return f"kill -9 after step {trial.killed_after}, {then} after step {trial.drained_after}"


def _steps(outcome: TrialOutcome) -> str:
    redone = outcome.comparison.redone if outcome.comparison is not None else 0
    return f"{outcome.steps}, {redone} again" if redone else str(outcome.steps)


def _help(difference: Divergence, *, of_bits: bool) -> str:
    if not of_bits:
        return "a model with little dropout and large batches stays closer; is anything weighted by the rank or the world size?"
    if difference.generation > 1:
        return (
            "something that training depends on was lost with the worker: a snapshot holds model, optimizer and "
            "what snapshots.include names; `elasticflow validate --deep-step` looks for what it leaves out"
        )
    return "something depends on the rank, the world size or the process: its own random numbers, time, environment, files"
