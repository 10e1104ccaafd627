"""Compares two recorded runs; pure.

`bits` asks for the same bits after every step. `curves` asks for the same loss up to a bound, if no more is promised:
at another world size sums are rounded differently, and other workers draw a model's random numbers (dropout) and take
samples together (BatchNorm).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from elasticflow.protocol.trajectory_record import Record

Evaluated = dict[int, "Mapping[str, object]"]
"""Metrics of a run's evaluations, by step."""

TOLERANCE = 0.05
"""Default for `curves`. Measured over 50 steps of jobs/mnist.toml (BatchNorm, dropout, batches of 64, loss 2.3 to 0.02): 1, 2, 3
and 4 workers are 0.8 to 1.5 % apart; gradients twice as large are 15 to 20 % off, half of each batch lost 13 %."""

_WINDOWS = 10  # a tenth of the steps are smoothed over


@dataclass(frozen=True)
class Divergence:
    """The first difference between two runs.

    Attributes:
        step: Finished optimizer steps at the difference; 0: before the first.
        name: The first tensor or number that differs, in the order of the model; or `loss` or `samples`; or `step` if
            one of the runs lacks that step.
        expected: Digest or value in the reference; None: the reference lacks it.
        found: Digest or value in the other run; None: that run lacks it.
        others: Further tensors and numbers that differ at that step.
        generation: Generation that recorded the step; 0: none.
        is_redone: True if an earlier generation had done the step before.
        is_start: True if the difference is in the state that the generation began with.
    """

    step: int
    name: str
    expected: str | None
    found: str | None
    others: int = 0
    generation: int = 0
    is_redone: bool = False
    is_start: bool = False


@dataclass(frozen=True)
class RunComparison:
    """Result of the comparison of a run with the reference.

    Attributes:
        steps: Finished steps that both runs have.
        redone: Steps that the run did more than once; `bits` compares every time, `curves` the last.
        values: Tensors and numbers compared after each step; for `curves`, only the loss.
        distance: For `curves`, the largest distance of the smoothed losses; else None.
    """

    steps: int
    redone: int
    difference: Divergence | None
    values: int = 1
    distance: float | None = None


def compare_bits(reference: Sequence[Record], other: Sequence[Record]) -> RunComparison:
    """Return the comparison of two runs' bits after every step, including steps that were redone.

    The state that a generation began with is compared with the state of the reference after that step.
    """
    expected, done = _finished(reference), _finished(other)
    expected = {r.step: r for r in reference if r.loss is None} | expected
    difference = None
    for record in sorted(other, key=lambda r: r.step):
        want = expected.get(record.step)
        if want is not None and (wrong := list(_differing(want, record))):
            is_redone = any(
                r.step == record.step and r.generation < record.generation and r.loss is not None
                for r in other
            )
            difference = _difference(record, *wrong[0], others=len(wrong) - 1, is_redone=is_redone)
            break
    difference = _earlier(difference, _missing(reference, other))
    values = max((len(r.digests) for r in expected.values()), default=0)
    return RunComparison(len(expected.keys() & done.keys()), redone(other), difference, values)


def evaluated_in(lines: Iterable[Mapping[str, Any]]) -> Evaluated:
    """Return the evaluations on *lines* of metrics.jsonl; after one step, a script may evaluate on several sets."""
    found: Evaluated = {}
    for line in lines:
        if isinstance(line.get("eval"), dict):
            found[int(line["step"])] = {**found.get(int(line["step"]), {}), **line["eval"]}
    return found


def with_evaluations(comparison: RunComparison, reference: Evaluated, other: Evaluated) -> RunComparison:
    """Return *comparison* with that of the evaluations added: the earlier difference counts."""
    for step in sorted(reference.keys() & other.keys()):
        want, have = reference[step], other[step]
        # As text: NaN is equal to NaN.
        wrong = [name for name in {**want, **have} if repr(want.get(name)) != repr(have.get(name))]
        if wrong:
            expected, found = (repr(run[wrong[0]]) if wrong[0] in run else None for run in (want, have))
            difference = Divergence(step, f"evaluation: {wrong[0]}", expected, found, len(wrong) - 1)
            return replace(comparison, difference=_earlier(comparison.difference, difference))
    return comparison


def without_lost_steps(records: Sequence[Record]) -> list[Record]:
    """Return the records without those of steps that a later generation did again."""
    begun = {record.generation: record.step for record in records if record.loss is None}
    kept = []
    for record in records:
        later = [step for generation, step in begun.items() if generation > record.generation]
        if all(record.step <= step for step in later):
            kept.append(record)
    return kept


def compare_losses(reference: Sequence[Record], other: Sequence[Record], tolerance: float) -> RunComparison:
    """Return the comparison of two runs' smoothed losses, which may be *tolerance* apart.

    A loss is smoothed as the mean over the last tenth of all steps. The distance is a share of the reference's largest
    smoothed loss: its first, unless the loss grew. Both runs must have trained on the same number of samples at each
    step.
    """
    mine, theirs = _finished(reference), _finished(other)
    both = sorted(mine.keys() & theirs.keys())
    window = max(1, len(both) // _WINDOWS)
    want, have = (_smoothed([run[step].loss for step in both], window) for run in (mine, theirs))
    scale = max((abs(x) for x in want if math.isfinite(x)), default=0.0)
    distances = [_distance(a, b, scale) for a, b in zip(want, have, strict=True)]
    difference = None
    for step, a, b, distance in zip(both, want, have, distances, strict=True):
        samples = mine[step].samples, theirs[step].samples
        if samples[0] != samples[1]:
            difference = _difference(theirs[step], "samples", *map(str, samples))
        elif distance > tolerance:
            difference = _difference(theirs[step], "loss", f"{a:.6g}", f"{b:.6g}")
        if difference is not None:
            break
    largest = max(distances, default=math.inf)
    return RunComparison(
        len(both),
        redone(other),
        _earlier(difference, _missing(reference, other)),
        distance=largest if math.isfinite(largest) else None,
    )


def _differing(want: Record, have: Record) -> Iterator[tuple[str, str | None, str | None]]:
    """Yield name, expected and found value of each difference: in the model first, then optimizer, loss and samples."""
    for name in {**want.digests, **have.digests}:
        expected, found = want.digests.get(name), have.digests.get(name)
        if expected != found:
            yield name, expected, found
    if have.loss is not None and repr(want.loss) != repr(have.loss):  # as text: NaN is equal to NaN
        yield "loss", repr(want.loss), repr(have.loss)
    if want.samples != have.samples:
        yield "samples", str(want.samples), str(have.samples)


def _difference(
    at: Record,
    name: str,
    expected: str | None,
    found: str | None,
    *,
    others: int = 0,
    is_redone: bool = False,
) -> Divergence:
    return Divergence(
        at.step, name, expected, found, others, at.generation, is_redone, is_start=at.loss is None
    )


def _missing(reference: Sequence[Record], other: Sequence[Record]) -> Divergence | None:
    """Return the first step that only one of the runs has."""
    mine, theirs = _finished(reference), _finished(other)
    only_one = mine.keys() ^ theirs.keys()
    if not only_one:
        return None
    step = min(only_one)
    expected, found = ("done" if step in run else None for run in (mine, theirs))
    return Divergence(step, "step", expected, found, generation=theirs[step].generation if found else 0)


def _earlier(first: Divergence | None, second: Divergence | None) -> Divergence | None:
    return min((d for d in (first, second) if d is not None), key=lambda d: d.step, default=None)


def _finished(records: Sequence[Record]) -> dict[int, Record]:
    """Return the record of each finished step; of a step that was redone, the last, which the run continued from."""
    return {r.step: r for r in records if r.loss is not None}


def redone(records: Sequence[Record]) -> int:
    """Return the number of steps that were done more than once."""
    return sum(r.loss is not None for r in records) - len(_finished(records))


def _smoothed(losses: Sequence[float | None], window: int) -> list[float]:
    values = [math.nan if loss is None else loss for loss in losses]
    parts = (values[max(0, end - window) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]


def _distance(a: float, b: float, scale: float) -> float:
    if repr(a) == repr(b):  # as text: NaN is equal to NaN
        return 0.0
    is_measurable = math.isfinite(a) and math.isfinite(b) and scale > 0
    return abs(a - b) / scale if is_measurable else math.inf
