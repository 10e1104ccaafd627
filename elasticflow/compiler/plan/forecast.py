"""The forecast of a run from known facts: steps, time, evaluations, snapshots and their bytes."""

from __future__ import annotations

import math
from heapq import merge
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.jobfile.checks.training_length import num_steps, samples_per_epoch, steps_per_epoch
from elasticflow.system.units import intervals, parse_interval

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from elasticflow.jobfile.tables.job import Job
    from elasticflow.system.units import Interval

_HOUR_S = 3600.0
# Snapshots that are counted one by one, in a fifth of a second; a run may be as long as a billion epochs.
_MOST_COUNTED = 200_000


class Known(NamedTuple):
    """A fact that the job file alone does not tell, and its source: `dataset.samples`, `--deep` or `run ID`."""

    value: float
    source: str


class KnownSets(NamedTuple):
    """The sets of a mixture: their samples, their shares of all samples drawn, and the source of these facts."""

    samples: tuple[int, ...]
    shares: tuple[float, ...]
    source: str


class Knowledge(NamedTuple):
    """Facts of the data, the model and the machine; None: unknown.

    Attributes:
        block_bytes: Size of the largest part of the model that workers gather as a whole.
        step_s: Seconds from step to step, evaluations and snapshots included.
        workers: Number of workers that took `step_s`.
        standby_bytes: Memory that one standby worker holds for itself.
        standby_s: Seconds in which a standby worker gets ready.
        compile_s: Seconds of a first step that torch.compile takes without its cache.
        compile_cached_s: Seconds of a first step that torch.compile takes with its cache.
    """

    samples: Known | None = None
    parameters: Known | None = None
    snapshot_bytes: Known | None = None
    block_bytes: Known | None = None
    step_s: Known | None = None
    workers: Known | None = None
    standby_bytes: Known | None = None
    standby_s: Known | None = None
    compile_s: Known | None = None
    compile_cached_s: Known | None = None
    compiler_cache_bytes: Known | None = None


class Forecast(NamedTuple):
    """Figures that follow from the job and from known facts; None: unknown.

    Attributes:
        steps_per_epoch: Fewest and most steps of an epoch.
        evaluations: Evaluations in the whole run, including the last one at the end; approximate if several intervals
            coincide. With several sets: by name, without the sets whose number is unknown.
        snapshots: Number in the whole run, without those of new best values; approximate where the clock is among its
            intervals, or there are very many.
        is_least: The rate comes from the clock alone: counted intervals may raise it.
        kept: Most snapshots that stay at the end; while a snapshot is written, there is one more.
    """

    steps: int | None = None
    steps_per_epoch: tuple[int, int] | None = None
    duration_s: float | None = None
    evaluations: int | dict[str, int] | None = None
    snapshots_per_hour: float | None = None
    snapshots: int | None = None
    is_least: bool = False
    bytes_per_hour: float | None = None
    kept: int | None = None
    kept_bytes: float | None = None


class _Pace(NamedTuple):
    """The progress of one hour, in each unit of intervals; None if unknown."""

    steps: float | None
    samples: float | None
    epochs: float | None

    def times_per_hour(self, every: str) -> float | None:
        interval = parse_interval(every)
        if interval.unit == "s":
            return _HOUR_S / interval.amount
        far = {"step": self.steps, "sample": self.samples, "epoch": self.epochs}[interval.unit]
        if far is None or self.steps is None:
            return None
        return min(far / interval.amount, self.steps)  # due at most once per step


def forecast(job: Job, known: Knowledge) -> Forecast:
    """Return the forecast of a run of *job*; it is empty for a script."""
    if job.script is not None:
        return Forecast()
    samples = samples_per_epoch(job.dataset, None if known.samples is None else int(known.samples.value))
    has_end = samples is not None or job.train.steps is not None
    steps = num_steps(job.train, job.dataset, samples or 0) if has_end else None
    step_s = None if known.step_s is None else known.step_s.value
    duration_s = None if steps is None or step_s is None else steps * step_s
    pace = _pace(job, samples, step_s)
    rate, is_least = _rate(job.snapshots.every, pace)
    number = None if steps is None else _num_snapshots(job, samples, steps, step_s)
    kept = _kept(job, pace, duration_s)
    kept = kept if number is None or kept is None else min(kept, number)
    size = None if known.snapshot_bytes is None else known.snapshot_bytes.value
    return Forecast(
        steps=steps,
        steps_per_epoch=None if samples is None else steps_per_epoch(job.dataset, samples),
        duration_s=duration_s,
        evaluations=_evaluations(job, samples, steps, duration_s),
        snapshots_per_hour=rate,
        snapshots=number,
        is_least=is_least,
        bytes_per_hour=None if rate is None or size is None else rate * size,
        kept=kept,
        kept_bytes=None if kept is None or size is None else kept * size,
    )


def _pace(job: Job, samples: int | None, step_s: float | None) -> _Pace:
    if not step_s:
        return _Pace(None, None, None)
    steps = _HOUR_S / step_s
    of_epoch = None if samples is None else _epoch_steps(job, samples)
    return _Pace(steps, steps * job.dataset.global_batch_size, steps / of_epoch if of_epoch else None)


def _epoch_steps(job: Job, samples: int) -> float:
    """Return the average steps of an epoch: with tail = "spill", an epoch may end within a batch."""
    if job.dataset.tail == "spill":
        return samples / job.dataset.global_batch_size
    return steps_per_epoch(job.dataset, samples)[0]


def _rate(every: str | list[str], pace: _Pace) -> tuple[float | None, bool]:
    """Return the rate per hour at which *every* is due, and whether the rate comes from the clock alone."""
    texts = intervals(every)
    timed = [parse_interval(text).amount for text in texts if parse_interval(text).unit == "s"]
    counted = [pace.times_per_hour(text) for text in texts if parse_interval(text).unit != "s"]
    rates = [rate for rate in counted if rate is not None]
    if len(rates) < len(counted):
        return (_HOUR_S / min(timed), True) if timed else (None, False)
    rate, fastest = sum(rates), max(rates, default=0.0)
    if timed and fastest == 0.0:
        rate = _HOUR_S / min(timed)
    elif timed:  # the clock restarts at each snapshot: it is due only in gaps longer than its interval
        rate += fastest * (math.ceil(_HOUR_S / fastest / min(timed)) - 1)
    return rate if pace.steps is None else min(rate, pace.steps), False


def _num_snapshots(job: Job, samples: int | None, steps: int, step_s: float | None) -> int | None:
    """Return the number of steps with a snapshot, the last one included; None if unknown."""
    every = [parse_interval(text) for text in intervals(job.snapshots.every)]
    timed = min((each.amount for each in every if each.unit == "s"), default=None)
    if (timed is not None and not step_s) or (any(each.unit == "epoch" for each in every) and not samples):
        return None
    due = (_due_steps(job, samples, each, steps) for each in every if each.unit != "s")
    # The clock begins anew at each snapshot: it is due only in gaps that take longer than its interval.
    most = math.inf if timed is None or not step_s else max(1, math.ceil(timed / step_s))
    number = last = 0
    for step, _ in groupby(merge(*due, [steps])):
        number += 1 + int((step - last - 1) // most)
        last = step
        if number >= _MOST_COUNTED:
            return round(number * steps / last)
    return number


def _due_steps(job: Job, samples: int | None, every: Interval, steps: int) -> Iterator[int]:
    """Yield the steps up to the last one at which a multiple of a counted interval is reached, in order."""
    amount, batch = int(every.amount), job.dataset.global_batch_size
    if every.unit == "step":
        yield from range(amount, steps + 1, amount)
        return
    is_spilled = job.dataset.tail == "spill" or not samples
    per_epoch = 0 if is_spilled or not samples else steps_per_epoch(job.dataset, samples)[0]
    # Samples between the beginnings of two epochs; with tail = "drop", the last ones of an epoch are never consumed.
    of_epoch = (samples or 0) if job.dataset.tail != "drop" else per_epoch * batch
    if every.unit == "epoch":
        amount *= of_epoch
    reached = amount
    while amount:
        epochs, rest = (0, reached) if is_spilled else divmod(reached, of_epoch)
        step = epochs * per_epoch + math.ceil(rest / batch)
        if step > steps:
            return
        yield step
        reached += amount


def _kept(job: Job, pace: _Pace, duration_s: float | None) -> int | None:
    keep = job.snapshots.keep
    kept: float = keep.last + (keep.best or 0)
    if keep.every is not None:
        times = pace.times_per_hour(keep.every)
        if times is None or duration_s is None:
            return None
        kept += times * duration_s / _HOUR_S
    if keep.within is not None:
        rate, is_least = _rate(job.snapshots.every, pace)
        if rate is None or is_least:
            return None
        kept += rate * parse_interval(keep.within).amount / _HOUR_S
    return math.ceil(kept)


def _evaluations(
    job: Job, samples: int | None, steps: int | None, duration_s: float | None
) -> int | dict[str, int] | None:
    """Return the number of evaluations, with several sets by name: at each multiple of each interval, and at the end."""
    if job.evaluation is None or steps is None:
        return None
    batch, epochs = job.dataset.global_batch_size, job.train.epochs
    lengths: dict[str, float | None] = {
        "step": steps,
        "sample": steps * batch,
        "epoch": epochs,
        "s": duration_s,
    }
    if samples is not None and epochs is not None:
        lengths["sample"] = epochs * samples
    elif samples is not None and (of_epoch := _epoch_steps(job, samples)):
        lengths["epoch"] = steps / of_epoch
    counts = {name: _due(intervals(table.every), lengths) for name, table in job.evaluations.items()}
    if "" in counts:
        return counts[""]
    return {name: count for name, count in counts.items() if count is not None}


def _due(every: Sequence[str], lengths: dict[str, float | None]) -> int | None:
    count, is_at_end = 0, False
    for interval in map(parse_interval, every):
        length = lengths[interval.unit]
        if length is None:
            return None
        count += int(length // interval.amount)
        is_at_end = is_at_end or length % interval.amount == 0
    return count if is_at_end else count + 1
