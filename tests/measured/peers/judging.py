"""What the records of a run prove: lineage of the final weights, samples lost and repeated, steps made twice, pauses."""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Step:
    """A step that a process has applied to its weights.

    Attributes:
        t: Unix time after the step.
        pid: Process that made it.
        rank: Rank of the process, or its replica group.
        step: Number of steps that the weights have made, this one included.
        before: Digest of the samples' counts before the step.
        after: Digest of the counts after the step.
        ids: Samples that the weights have learned from in this step, by all workers.
        parts: Share of each sample in the step, times the global batch; empty: 1 for each.
    """

    t: float
    pid: int
    rank: str
    step: int
    before: str
    after: str
    ids: tuple[int, ...]
    parts: tuple[float, ...] = ()


@dataclass(frozen=True)
class Samples:
    """How often the final weights have learned from the samples, against the plan.

    Attributes:
        lost: Uses that are missing, over all samples.
        repeated: Uses too many, over all samples.
        short: Steps with fewer samples than the global batch.
        is_whole: Whether the lineage reaches back to the first step.
    """

    lost: int
    repeated: int
    short: int
    is_whole: bool


def read_steps(folder: Path) -> list[Step]:
    """Return the steps of all processes, in the order of time; a line that a kill has cut is left out."""
    found = []
    for path in folder.glob("steps-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                record = json.loads(line)
                record.update(ids=tuple(record["ids"]), parts=tuple(record.get("parts", ())))
                found.append(Step(**record))
    return sorted(found, key=lambda step: step.t)


def lineage(steps: Sequence[Step], last: str) -> list[Step]:
    """Return the steps that led to the counts of digest *last*, the first of them first.

    Several processes make each step, and a step that is made again from the same weights with the same samples has the same digests:
    any of them stands for all.
    """
    by_result = {step.after: step for step in steps}
    chain: list[Step] = []
    while (step := by_result.get(last)) is not None and len(chain) <= len(by_result):
        chain.append(step)
        last = step.before
    return chain[::-1]


def judge_samples(chain: Sequence[Step], samples: int, epochs: int, batch: int) -> Samples:
    """Return what a lineage says of *samples* samples that are to be used once in each epoch."""
    uses: Counter[int] = Counter()
    short = 0
    for step in chain:
        whole = min(step.parts, default=1.0)
        parts = step.parts or (1.0,) * len(step.ids)
        of_step = {number: round(part / whole) for number, part in zip(step.ids, parts, strict=True)}
        uses.update(of_step)
        short += sum(of_step.values()) < batch
    lost = sum(max(0, epochs - uses[number]) for number in range(samples))
    repeated = sum(max(0, uses[number] - epochs) for number in range(samples))
    return Samples(lost, repeated, short, bool(chain) and chain[0].step == 1)


def redone(steps: Iterable[Step]) -> int:
    """Return how many steps were made again: of a step that a rank has made three times, two."""
    made: dict[int, Counter[str]] = defaultdict(Counter)
    for step in steps:
        made[step.step][step.rank] += 1
    return sum(max(ranks.values()) - 1 for ranks in made.values())


@dataclass(frozen=True)
class Pause:
    """The longest time without a step after a fault.

    Attributes:
        seconds: From the fault, or from the last step if that came later, to the next step.
        caught_up_s: From the fault to the first step that no worker had made before; None: there was none.
        resumed_from: Number of the step that the next step went out from.
        reached: Highest step before the pause.
    """

    seconds: float
    caught_up_s: float | None
    resumed_from: int
    reached: int


def until_end(steps: Sequence[Step], last: int) -> list[Step]:
    """Return the steps up to the first that is number *last*: a replica that comes back later trains for nobody."""
    end = next((step.t for step in steps if step.step == last), None)
    return [step for step in steps if end is None or step.t <= end]


def pause(steps: Sequence[Step], fault: float) -> Pause | None:
    """Return the longest pause that ends after *fault*; None if no step came after it."""
    ends = [number for number, step in enumerate(steps) if number and step.t > fault]
    if not ends:
        return None
    end = max(ends, key=lambda number: steps[number].t - max(steps[number - 1].t, fault))
    reached = max(step.step for step in steps[:end])
    new = next((step.t for step in steps[end:] if step.step > reached), None)
    return Pause(
        round(steps[end].t - max(steps[end - 1].t, fault), 3),
        None if new is None else round(new - fault, 3),
        steps[end].step - 1,
        reached,
    )


@dataclass(frozen=True)
class Speed:
    """Figures of an undisturbed run.

    Attributes:
        steps_per_s: From the hundredth step to the last.
        stall_ms: Time that a step with a checkpoint takes longer than the median step; the median.
    """

    steps_per_s: float
    stall_ms: float


def speed(steps: Sequence[Step], save_every: int, skipped: int = 100) -> Speed:
    """Return the speed of the process that made most steps; that of rank 0 if several did."""
    by_pid: Mapping[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_pid[step.pid].append(step)
    one = min(by_pid.values(), key=lambda of_pid: (-len(of_pid), of_pid[0].rank))[skipped:]
    took = {a.step: b.t - a.t for a, b in itertools.pairwise(one)}
    usual = statistics.median(took.values())
    saving = [seconds - usual for step, seconds in took.items() if step % save_every == 0]
    return Speed(
        round((len(one) - 1) / (one[-1].t - one[0].t), 1),
        round(statistics.median(saving) * 1000, 1) if saving else 0.0,
    )


@dataclass(frozen=True)
class Final:
    """The weights at the end.

    Attributes:
        path: File that holds them.
        digest: Digest of the model's weights.
        after: Digest of the samples' counts.
        agree: Whether every process that came to the end has the same weights.
    """

    path: Path
    digest: str
    after: str
    agree: bool


def final_of(folder: Path) -> Final | None:
    """Return the newest final weights of a run; None if it did not come to its end."""
    import torch

    every = [(torch.load(path, weights_only=True), path) for path in folder.glob("final-*.pt")]
    if not every:
        return None
    newest, path = max(every, key=lambda entry: float(entry[0]["t"]))
    agree = len({entry["digest"] for entry, _ in every}) == 1
    return Final(path, newest["digest"], newest["after"], agree)


def difference(one: Final, other: Final) -> float:
    """Return the largest difference between two runs' weights."""
    import torch

    pairs = zip(
        *(torch.load(final.path, weights_only=True)["weights"] for final in (one, other)), strict=True
    )
    return float(max((a - b).abs().max() for a, b in pairs))
