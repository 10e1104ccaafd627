"""Workers that stand still, and who of them the others wait for; pure but for source lines."""

from __future__ import annotations

import linecache
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Where a rank waits for others, or for the store that it shares with them.
_WAITS = re.compile(
    r"/torch/distributed/|/torch/nn/parallel/distributed\.py$|/elasticflow/runtime/(?:replica_checks/captured|training/fixed_order_sum|snapshot/writer_connection)\.py$"
)
_BACKWARD = "_engine_run_backward"  # within it DistributedDataParallel waits
_DATA = re.compile(r"/elasticflow/runtime/data/(?:sample_reader|shard_reader|loader_processes)\.py$")
_NOT_THEIRS = re.compile(
    r"^<|/elasticflow/(?:runtime|launcher|snapshots)/|/site-packages/|/lib/python3[^/]*/"
)
_NOT_A_PLACE = re.compile(r"^<|/site-packages/|/lib/python3[^/]*/")
_STOPPED, _IN_KERNEL = ("T", "t"), "D"


class Frame(NamedTuple):
    """A line of Python that is being run."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True)
class StalledWorker:
    """A worker that stands still.

    Attributes:
        node: Where.
        rank: Its rank.
        phase: What it said that it does.
        step: Steps it has finished.
        seconds: For how long.
        limit_s: For how long it may.
        state: Of its process, as the kernel tells it: R, S, D, T; empty where it does not.
        frames: Its main thread's, innermost first; none if it did not answer.
        loaders: The same of its loader processes, where it waits for them, by process id.
        log: Where all of it can be read.
    """

    node: str
    rank: int
    phase: str
    step: int
    seconds: float
    limit_s: float
    state: str
    frames: tuple[Frame, ...]
    loaders: tuple[tuple[int, tuple[Frame, ...]], ...]
    log: str

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> StalledWorker:
        """Return what JSON made of one."""
        frames = tuple(Frame(*frame) for frame in told["frames"])
        loaders = tuple((pid, tuple(Frame(*frame) for frame in of_it)) for pid, of_it in told["loaders"])
        return cls(**{**told, "frames": frames, "loaders": loaders})

    @property
    def doing(self) -> str:
        """The phase: reading data within a step is `data`."""
        return (
            "data" if self.phase == "step" and any(_DATA.search(f.file) for f in self.frames) else self.phase
        )

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        if not self.frames:
            return False
        inner = self.frames[0]
        return _WAITS.search(inner.file) is not None or inner.function == _BACKWARD

    @property
    def own_frames(self) -> tuple[Frame, ...]:
        """The frames of the job's own code, innermost first: of a loader process where it waits for one."""
        found = [frame for frames in (*(of_it for _, of_it in self.loaders), self.frames) for frame in frames]
        return tuple(frame for frame in found if not _NOT_THEIRS.search(frame.file))

    @property
    def place(self) -> Frame:
        """The innermost frame that is neither torch's nor Python's own, in a loader process where it waits for one."""
        inner = [*(frames for _, frames in self.loaders), self.frames]
        found = (f for frames in inner for f in frames if not _NOT_A_PLACE.search(f.file))
        return next(found, self.frames[0])

    def text(self) -> str:
        """Return its stack, and those of its loader processes, as Python writes them."""
        parts = [("Stack", self.frames), *((f"Loader process {pid}", frames) for pid, frames in self.loaders)]
        return "\n".join(_written(title, frames) for title, frames in parts if frames)


def _written(title: str, frames: Sequence[Frame]) -> str:
    lines = [f"{title} (most recent call last):"]
    for file, line, function in reversed(frames):
        lines.append(f'  File "{file}", line {line}, in {function}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    return "\n".join(lines)


class Culprit(NamedTuple):
    """The rank that the others wait for, and why it is that one."""

    standing: StalledWorker
    reason: str


def find_culprit(found: Sequence[StalledWorker]) -> Culprit:
    """Return who of all ranks that stand still is to blame; never empty *found*."""
    for each in found:
        if each.state in _STOPPED:
            return Culprit(each, "its process was stopped (SIGSTOP)")
    for each in found:
        if not each.frames:
            why = (
                "is in a call of the kernel that does not return"
                if each.state == _IN_KERNEL
                else "does not answer"
            )
            return Culprit(each, f"its process {why}")
    if elsewhere := [each for each in found if not each.waits]:
        first = min(elsewhere, key=lambda s: (s.step, -s.seconds, s.rank))
        return Culprit(first, f"it is at {first.place}{_others(len(found) - len(elsewhere))}")
    return _of_waiting(found)


def _others(waiting: int) -> str:
    if waiting == 0:
        return ""
    return ", and the other rank waits for it" if waiting == 1 else f", and {waiting} other ranks wait for it"


def _of_waiting(found: Sequence[StalledWorker]) -> Culprit:
    """Return who stands in another collective than most: with as many here as there, who stands in the job's own."""

    def place(standing: StalledWorker) -> tuple[int, Frame]:
        return standing.step, standing.place

    counts = Counter(map(place, found))
    first = min(found, key=lambda s: (counts[place(s)], -len(s.own_frames), s.rank))
    if len(counts) == 1:
        return Culprit(
            first, f"all ranks wait for each other at {first.place}: is the network between them cut?"
        )
    other = next(s for s in found if place(s) != place(first))
    return Culprit(first, f"it waits for others at {first.place}, and rank {other.rank} at {other.place}")
