"""torch's own learning-rate schedules against the length of training."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from elasticflow.jobfile.checks.training_length import counted, length_of_training
from elasticflow.jobfile.diagnostics import codes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from elasticflow.jobfile.diagnostics.diagnostic import Diagnostic
    from elasticflow.jobfile.diagnostics.positions import KeyPath
    from elasticflow.jobfile.tables.job import Args, ValidTables
    from elasticflow.jobfile.text.source import Source

_ENTRY = r"torch\.optim(?:\.lr_scheduler:|:lr_scheduler\.)(\w+)"
# The argument that says when a schedule is over, and what is missed when training ends before.
_ENDS = {
    "CosineAnnealingLR": ("T_max", "the learning rate never gets down to eta_min"),
    "CosineAnnealingWarmRestarts": ("T_0", "there is no warm restart"),
    "ConstantLR": ("total_iters", "the learning rate never gets to its full value"),
    "LinearLR": ("total_iters", "the learning rate never gets to end_factor"),
    "OneCycleLR": ("total_steps", "the learning rate never gets down to its end"),
    "PolynomialLR": ("total_iters", "the learning rate never gets down to nought"),
    "StepLR": ("step_size", "the learning rate is never lowered"),
}
# What happens when training goes on after that.
_AFTER = {
    "CosineAnnealingLR": "the learning rate rises again",
    "PolynomialLR": "the learning rate is nought",
}
_WHOLE = {"T_max", "total_steps", "total_iters"}


def check_schedule(source: Source, tables: ValidTables) -> Iterator[Diagnostic]:
    """Yield what is wrong between a schedule's length and training's, where both are known."""
    scheduler, train = tables.get("lr_scheduler"), tables.get("train")
    match = None if scheduler is None else re.fullmatch(_ENTRY, scheduler.entry)
    if scheduler is None or train is None or match is None:
        return
    # An epoch that is begun and not ended is no step of a schedule: only `epochs` tells how many those are.
    steps = length_of_training(train, tables.get("dataset")).steps
    count = steps if scheduler.interval == "step" else train.epochs
    if count is None:
        return
    schedule = _ScheduleCheck(source, match[1], scheduler.interval, count)
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


class _ScheduleCheck:
    """Compares a schedule's numbers with the length of training."""

    def __init__(self, source: Source, name: str, unit: str, count: int) -> None:
        self.source = source
        self.name = name
        self.unit = unit
        self.count = count
        self.training = f"training is {counted(count, unit)} long"

    def problems_of(self, path: KeyPath, end: int) -> Iterator[Diagnostic]:
        """Yield what is wrong with one number of the schedule's arguments."""
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
        elif end < self.count and self.name in _AFTER:
            message = f"{_AFTER[self.name]} after {counted(end, self.unit)}, and {self.training}"
            yield self._warning(path, message, f"set {key} = {self.count}")

    def _warning(self, path: KeyPath, message: str, remedy: str) -> Diagnostic:
        remedy = self._help(remedy)
        return self.source.problem(codes.SCHEDULE_LENGTH, message, path, severity="warning", remedy=remedy)

    def _help(self, remedy: str) -> str:
        other = "epoch" if self.unit == "step" else "step"
        return f'{remedy}.\nThe schedule counts {self.unit}s; with lr_scheduler.interval = "{other}" it counts {other}s'
