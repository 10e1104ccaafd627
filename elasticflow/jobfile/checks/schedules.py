"""Learning-rate schedules, torch's and our own, against the length of training."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.evaluation import unmeasured
from elasticflow.jobfile.checks.training_length import counted, length_of_training
from elasticflow.jobfile.diagnostics import codes
from elasticflow.jobfile.diagnostics.toml_literals import dotted, show
from elasticflow.jobfile.tables.evaluation import (
    StopRule,
    better_of,
    evaluation_sets,
    metric_names,
    path_of_set,
)
from elasticflow.system.units import intervals, parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.evaluation import Evaluation
    from elasticflow.jobfile.tables.job import ValidTables
    from elasticflow.jobfile.tables.training import LrSchedulerTable
    from elasticflow.jobfile.tables.types import Args
    from elasticflow.jobfile.text.source import Source

ENTRY = r"(?:torch\.optim(?:\.lr_scheduler:|:lr_scheduler\.)|elasticflow\.schedules:)(\w+)"
_OF_LIGHTNING = "elasticflow.lightning:lr_scheduler"
_OURS = ("warmup_cosine", "warmup_linear", "warmup_stable_decay")
# The argument that says when a schedule is over, and the consequence of training that ends earlier.
_ENDS = {
    "CosineAnnealingLR": ("T_max", "the learning rate never gets down to eta_min"),
    "CosineAnnealingWarmRestarts": ("T_0", "there is no warm restart"),
    "ConstantLR": ("total_iters", "the learning rate never gets to its full value"),
    "LinearLR": ("total_iters", "the learning rate never gets to end_factor"),
    "OneCycleLR": ("total_steps", "the learning rate never gets down to its end"),
    "PolynomialLR": ("total_iters", "the learning rate never gets down to nought"),
    "StepLR": ("step_size", "the learning rate is never lowered"),
    **dict.fromkeys(_OURS, ("total", "the learning rate never gets down to its end")),
}
# The effect when training continues after the end of the schedule.
_AFTER = {
    "CosineAnnealingLR": "the learning rate rises again",
    "PolynomialLR": "the learning rate is nought",
    **dict.fromkeys(_OURS, "the learning rate is nought"),  # unless `final` is given
}
_WHOLE = {"T_max", "total_steps", "total_iters", "total"}
_INTERVAL, _METRIC = ("lr_scheduler", "interval"), ("lr_scheduler", "metric")
_PLATEAU = "ReduceLROnPlateau"


def check_schedule(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of a schedule's length beside the length of training, where both are known."""
    scheduler, train = tables.get("lr_scheduler"), tables.get("train")
    if scheduler is not None and scheduler.entry == _OF_LIGHTNING:
        given = scheduler.args.get("interval", "step")
        if given != scheduler.interval:
            message = f"lr_scheduler.interval is {show(scheduler.interval)}, and lr_scheduler.args.interval {show(given)}"
            remedy = "give both the interval at which the LightningModule steps its schedule"
            yield source.problem(codes.EXCLUSIVE, message, ("lr_scheduler", "entry"), remedy=remedy)
    match = None if scheduler is None else re.fullmatch(ENTRY, scheduler.entry)
    if scheduler is None or match is None:
        return
    wrong = list(_out_of_range(source, scheduler.args)) if match[1] in _OURS else []
    yield from wrong
    if train is None or wrong:
        return
    # An epoch that does not end is no step of a schedule: only `epochs` gives the number of whole epochs.
    steps = length_of_training(train, tables.get("dataset")).steps
    count = {"step": steps, "epoch": train.epochs}.get(scheduler.interval)
    if count is None:
        for path, end in _ends(match[1], scheduler.args):
            if end == train.epochs and scheduler.interval == "step":
                message = f"{dotted(path)} is {end}, as train.epochs is, and the schedule counts steps"
                remedy = 'count epochs: interval = "epoch" in [lr_scheduler]; or write the number of steps'
                yield source.problem(codes.SCHEDULE_LENGTH, message, path, severity="warning", remedy=remedy)
        return
    stays = match[1] in _OURS and scheduler.args.get("final", 0) != 0
    schedule = _ScheduleCheck(source, match[1], scheduler.interval, count, stays=stays)
    for path, end in _ends(match[1], scheduler.args):
        yield from schedule.problems_of(path, end)


def _ends(name: str, args: Args) -> Iterator[tuple[KeyPath, int]]:
    """Yield each number of steps after which a schedule has something to do, with its place."""
    base = ("lr_scheduler", "args")
    if name == "MultiStepLR" and isinstance(args.get("milestones"), list):
        for number, each in enumerate(args["milestones"]):
            if _is_count(each):
                yield (*base, "milestones", number), each
        return
    key = _ENDS.get(name, ("", ""))[0]
    if _is_count(args.get(key)):
        yield (*base, key), args[key]
    elif name == "OneCycleLR" and _is_count(args.get("epochs")) and _is_count(args.get("steps_per_epoch")):
        yield (*base, "steps_per_epoch"), args["epochs"] * args["steps_per_epoch"]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _out_of_range(source: Source, args: Args) -> Iterator[Diagnostic]:
    """Yield the numbers that a schedule of ours refuses; values that are no numbers are reported by the check of types."""
    base = ("lr_scheduler", "args")
    for key in ("warmup", "total", "decay"):
        value = args.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 0:
            message = f"lr_scheduler.args.{key} must be at least 0, not {show(value)}"
            yield source.problem(codes.OUT_OF_RANGE, message, (*base, key))
            return
    final = args.get("final")
    if isinstance(final, int | float) and not isinstance(final, bool) and not 0 <= final <= 1:
        message = f"lr_scheduler.args.final must be from 0 to 1, not {show(final)}"
        remedy = "it is a part of the optimizer's own rate: 0.1 for a tenth of it"
        yield source.problem(codes.OUT_OF_RANGE, message, (*base, "final"), remedy=remedy)
    lengths = [args.get("warmup"), args.get("total"), args.get("decay", 0)]
    if all(isinstance(each, int) and not isinstance(each, bool) for each in lengths):
        warmup, total, decay = lengths
        if warmup + decay > total:
            both = "warmup and decay take" if decay else "the warm-up takes"
            message = (
                f"{both} {counted(warmup + decay, 'step')}, and the whole schedule {counted(total, 'step')}"
            )
            remedy = "set total to the length of training, or the others lower"
            yield source.problem(codes.OUT_OF_RANGE, message, (*base, "warmup"), remedy=remedy)


class _ScheduleCheck:
    """Compares a schedule's numbers with the length of training; `stays`: the rate after the schedule's end is not zero."""

    def __init__(self, source: Source, name: str, unit: str, count: int, *, stays: bool = False) -> None:
        self.source = source
        self.name = name
        self.unit = unit
        self.count = count
        self.stays = stays
        self.training = f"training is {counted(count, unit)} long"

    def problems_of(self, path: KeyPath, end: int) -> Iterator[Diagnostic]:
        """Yield the problems of one number among the schedule's arguments."""
        key = path[2]
        if self.name == "MultiStepLR":
            if end >= self.count:
                message = f"the milestone {end} is never reached: {self.training}"
                yield self._warning(path, message, "take it out, or set it lower")
        elif self.name == "StepLR":
            if end >= self.count:
                message = f"the learning rate is never lowered: step_size is {end}, and {self.training}"
                yield self._warning(path, message, "set it lower")
        elif end > self.count:
            message = (
                f"{_ENDS[self.name][1]}: the schedule takes {counted(end, self.unit)}, and {self.training}"
            )
            yield self._warning(path, message, f"set {key} = {self.count}" if key in _WHOLE else "shorten it")
        elif end < self.count and self.name == "OneCycleLR":
            message = (
                f"OneCycleLR stops training with an error after {counted(end, self.unit)}: {self.training}"
            )
            remedy = f"let it end with training: total_steps = {self.count}"
            yield self.source.problem(codes.SCHEDULE_ENDS, message, path, remedy=self._help(remedy))
        elif end < self.count and self.name in _AFTER and not self.stays:
            message = f"{_AFTER[self.name]} after {counted(end, self.unit)}, and {self.training}"
            yield self._warning(path, message, f"set {key} = {self.count}")

    def _warning(self, path: KeyPath, message: str, remedy: str) -> Diagnostic:
        remedy = self._help(remedy)
        return self.source.problem(codes.SCHEDULE_LENGTH, message, path, severity="warning", remedy=remedy)

    def _help(self, remedy: str) -> str:
        other = "epoch" if self.unit == "step" else "step"
        return f'{remedy}.\nThe schedule counts {self.unit}s; with lr_scheduler.interval = "{other}" it counts {other}s'


def check_schedule_metric(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield the problems of a schedule that goes by a metric, or would have to."""
    scheduler = tables.get("lr_scheduler")
    if scheduler is None or "evaluation" not in tables:
        return
    evaluation, metric = tables["evaluation"], scheduler.metric
    names = list(metric_names(evaluation))
    mode = scheduler.args.get("mode", "min")
    fitting = [each for each in names if better_of(StopRule(each, None), evaluation) == mode]
    unknown = [each for each in names if better_of(StopRule(each, None), evaluation) is None]
    example = next(iter([*fitting, *unknown, *names]), "loss")
    needs_data = "" if names else "; and [evaluation] with the data that is held back"
    name = scheduler.entry.rpartition(":")[2].rpartition(".")[2]
    if name == _PLATEAU and metric is None:
        message = "ReduceLROnPlateau goes by a metric of the evaluations, and lr_scheduler names none"
        remedy = f'add to [lr_scheduler]: interval = "evaluation" and metric = "{example}"{needs_data}'
        yield source.problem(codes.NEEDS_METRIC, message, ("lr_scheduler", "entry"), remedy=remedy)
    elif metric is None and scheduler.interval == "evaluation":
        message = 'lr_scheduler.interval = "evaluation" needs the metric that the schedule goes by'
        remedy = f'add to [lr_scheduler]: metric = "{example}"{needs_data}'
        yield source.problem(codes.NEEDS_METRIC, message, _INTERVAL, remedy=remedy)
    elif metric is not None and scheduler.interval != "evaluation":
        message = f'lr_scheduler.metric is measured by evaluations, and lr_scheduler.interval is "{scheduler.interval}"'
        remedy = 'set interval = "evaluation", or leave metric out'
        yield source.problem(codes.NEEDS_METRIC, message, _METRIC, remedy=remedy)
    elif metric is None:
        return
    elif (problem := unmeasured("lr_scheduler.metric", metric, evaluation, metric)) is not None:
        message, remedy_of_name = problem
        yield source.problem(codes.NEEDS_METRIC, message, _METRIC, remedy=remedy_of_name)
    else:
        yield from _of_schedule(source, scheduler, metric, evaluation)


def _of_schedule(
    source: Source, scheduler: LrSchedulerTable, metric: str, evaluation: Evaluation | None
) -> Iterator[Diagnostic]:
    known = re.fullmatch(ENTRY, scheduler.entry)
    if known is not None and known[1] != _PLATEAU:
        message = f"{known[1]} counts steps or epochs, and takes no metric"
        remedy = 'leave metric out, with interval = "step" or "epoch"; ReduceLROnPlateau goes by a metric'
        yield source.problem(codes.NEEDS_METRIC, message, ("lr_scheduler", "entry"), remedy=remedy)
        return
    name = metric.rpartition(".")[0]
    every = evaluation_sets(evaluation)[name].every
    for text in intervals(every):
        if parse_interval(text).unit == "s":
            where = (*path_of_set(name), "every")
            message = (
                f'{dotted(where)} = "{text}" goes by the clock, and the learning rate by this evaluation: '
                "no two runs would be alike"
            )
            remedy = 'evaluate by "steps", "samples" or "epochs"'
            yield source.problem(codes.NEEDS_METRIC, message, where, remedy=remedy)
    better, mode = better_of(StopRule(metric, None), evaluation), scheduler.args.get("mode", "min")
    if known is not None and better is not None and mode in ("min", "max") and mode != better:
        smaller, given = ("larger", "smaller") if better == "max" else ("smaller", "larger")
        message = (
            f"{metric} is better where it is {smaller}, and ReduceLROnPlateau takes {given} values for better"
        )
        remedy = f'set lr_scheduler.args.mode = "{better}"'
        yield source.problem(codes.NEEDS_METRIC, message, _METRIC, severity="warning", remedy=remedy)
