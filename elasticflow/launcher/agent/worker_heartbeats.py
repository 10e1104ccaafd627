"""Heartbeats of a node's workers: one slot each in memory shared with the agent; and how long each may make no progress."""

from __future__ import annotations

import math
import mmap
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from elasticflow.protocol.messages import RankFigures
from elasticflow.protocol.worker_environment import (
    FIGURES,
    HEARTBEAT,
    HEARTBEAT_SLOT,
    HELD,
    PROFILE,
    usage_of_numbers,
)
from elasticflow.system.shared_memory import memory_file

if TYPE_CHECKING:
    from collections.abc import Container, Mapping


# Quick steps, too, may stall for so long without a hang.
MIN_LIMIT_S = 60.0
STALL_FACTOR = 10
STALLS_TO_LEARN = 10
# A compiler may take minutes for a new shape after ten that took milliseconds.
UNPREDICTABLE = frozenset({"compile"})
# On one node; the bound of nodes.nproc_per_node.
MOST_WORKERS = 1024
_SIZE = HEARTBEAT_SLOT * MOST_WORKERS
# The agent looks fifty times a second.
_PAUSE_S = 1.0


class HangTimeouts:
    """Seconds without progress after which a worker counts as hung, by phase.

    The limit is *ceiling_s* until a phase has stalled `STALLS_TO_LEARN` times; then `STALL_FACTOR` times the longest stall
    of a rank in that phase, but at least `MIN_LIMIT_S` and at most the ceiling. After a stall that was longer than the
    ceiling and continued, the limit is twice that stall. No lower limit is learned for `UNPREDICTABLE` phases.

    Args:
        ceiling_s: Upper limit in seconds: `restarts.hang_timeout`.
    """

    def __init__(self, ceiling_s: float) -> None:
        self._ceiling_s = ceiling_s
        self._seen: dict[str, tuple[int, float]] = {}  # by phase: how often it stalled, and the longest stall

    def note(self, phase: str, seconds: float) -> None:
        """Note that a rank made no progress for *seconds* in *phase*, and continued."""
        number, longest = self._seen.get(phase, (0, 0.0))
        self._seen[phase] = number + 1, max(longest, seconds)

    def allow_as_long(self, phase: str, seconds: float) -> None:
        """Note that a stall of *seconds* counted as a hang: a stall of that length does not count again."""
        self.note(phase, min(seconds, self._ceiling_s))

    def of(self, phase: str) -> float:
        """Return the limit of *phase* in seconds."""
        number, longest = self._seen.get(phase, (0, 0.0))
        if longest > self._ceiling_s:
            return 2 * longest
        if number < STALLS_TO_LEARN or phase in UNPREDICTABLE:
            return self._ceiling_s
        return min(self._ceiling_s, max(MIN_LIMIT_S, STALL_FACTOR * longest))


class WorkerProgress(NamedTuple):
    """The progress of a local rank: its phase, its finished steps, the seconds since its last progress, and their limit."""

    local_rank: int
    phase: str
    step: int
    seconds: float
    limit_s: float


class WorkerActivity(NamedTuple):
    """The activity of a local rank: its phase, its finished steps, and the seconds since that phase of that step began."""

    phase: str
    step: int
    seconds: float


@dataclass
class _Slot:
    beats: int
    phase: str
    since: float
    step: int = 0
    printed: int = 0
    entered: float = 0.0  # when this phase of this step began


def heartbeat_memory() -> int:
    """Return the descriptor, which processes inherit, of new memory for the heartbeats of a node's workers."""
    descriptor = memory_file("heartbeats")
    os.set_inheritable(descriptor, True)
    os.ftruncate(descriptor, _SIZE)
    return descriptor


class WorkerHeartbeats:
    """The agent's side of the heartbeats: judges if the workers make progress.

    A beat means progress (a new step or phase): a deadlocked rank does not beat.

    Args:
        ceiling_s: Upper limit of a phase without progress, in seconds.
        memory: From `heartbeat_memory`; None: new memory.
        beats_late: Workers run a script, which may never beat: until a worker beats, its output is its progress.
        silence_s: Seconds without output after which such a worker counts as hung; None: never.
    """

    def __init__(
        self,
        ceiling_s: float,
        memory: int | None = None,
        *,
        beats_late: bool = False,
        silence_s: float | None = None,
    ) -> None:
        self._beats_late, self._first = beats_late, "script" if beats_late else "start"
        self._silence_s = math.inf if silence_s is None else silence_s
        self.hang_timeouts = HangTimeouts(ceiling_s)
        self.fd = heartbeat_memory() if memory is None else memory
        self._memory = mmap.mmap(self.fd, _SIZE)
        self._slots: list[_Slot] = []
        self._looked = 0.0

    def reset(self, workers: int) -> None:
        """Begin the next generation, of *workers* local ranks; the timeouts that were learned stay."""
        self._memory[:] = bytes(len(self._memory))
        self._looked = time.monotonic()
        self._slots = [_Slot(0, self._first, self._looked, entered=self._looked) for _ in range(workers)]

    def held(self) -> int | None:
        """Return the newest step whose state all local ranks hold in memory; None if a rank holds no state."""
        offsets = (rank * HEARTBEAT_SLOT + HEARTBEAT.size for rank in range(len(self._slots)))
        return min((HELD.unpack_from(self._memory, offset)[0] for offset in offsets), default=0) or None

    def figures(self, ranks: Mapping[int, int]) -> tuple[RankFigures, ...]:
        """Return the newest figures of the workers that have written some; *ranks*: global ranks by local rank."""
        found = []
        for local_rank in range(len(self._slots)):
            offset = local_rank * HEARTBEAT_SLOT + HEARTBEAT.size + HELD.size + PROFILE.size
            windows, own_s, step_s, *usage, device = FIGURES.unpack_from(self._memory, offset)
            if windows and local_rank in ranks:
                name = device.rstrip(b"\0").decode("ascii", "replace")
                figures = windows, own_s, step_s, name, usage_of_numbers(usage)
                found.append(RankFigures(ranks[local_rank], *figures))
        return tuple(found)

    def request_profile(self, local_rank: int, number: int) -> None:
        """Have a local rank answer request *number* for a trace, after its step."""
        offset = local_rank * HEARTBEAT_SLOT + HEARTBEAT.size + HELD.size
        PROFILE.pack_into(self._memory, offset, number)

    def look(self, gone: Container[int]) -> bool:
        """Take in new beats; return whether every worker not in *gone* has made no progress for longer than its limit.

        While one worker moves, the others may be waiting for it: in a collective, or at the end of an evaluation.
        """
        now = time.monotonic()
        pause_s, self._looked = now - self._looked, now
        is_one_left = does_one_move = False
        for rank, slot in enumerate(self._slots):
            # If the agent was paused, its workers may have been: a laptop that slept, a group that was frozen.
            if pause_s > _PAUSE_S:
                slot.since += pause_s
            beats, step, phase = HEARTBEAT.unpack_from(self._memory, rank * HEARTBEAT_SLOT)
            if beats != slot.beats:
                self.hang_timeouts.note(slot.phase, now - slot.since)
                if (step, self._text(phase)) != (slot.step, slot.phase):
                    slot.step, slot.entered = step, now
                slot.beats, slot.phase, slot.since = beats, self._text(phase), now
            if rank not in gone:
                is_one_left = True
                does_one_move |= now - slot.since <= self._limit_s(slot)
        return is_one_left and not does_one_move

    def silent(self, seconds: float) -> list[int]:
        """Return the local ranks that had made no progress for *seconds* as of the last look."""
        return [rank for rank, slot in enumerate(self._slots) if self._looked - slot.since >= seconds]

    def heard(self, local_rank: int, printed: int) -> None:
        """Take in how many bytes a local rank has printed; a change (also a cut of its files) is progress of a script."""
        slot = self._slots[local_rank]
        if printed != slot.printed:
            slot.printed = printed
            if slot.beats == 0:
                slot.since = time.monotonic()

    def allow_as_long(self) -> None:
        """Stop counting stalls as hangs that last no longer than the present ones."""
        for progress in self.progress():
            self.hang_timeouts.allow_as_long(progress.phase, progress.seconds)

    def awaited(self) -> WorkerActivity | None:
        """Return the activity of the worker for which the others seem to wait, as of the last look; None without workers.

        The others wait within a step, in a collective.
        """
        now = time.monotonic()
        activities = [WorkerActivity(slot.phase, slot.step, now - slot.entered) for slot in self._slots]
        return max(activities, key=lambda each: (each.phase != "step", each.seconds), default=None)

    def progress(self) -> list[WorkerProgress]:
        """Return the progress of each local rank."""
        now = time.monotonic()
        progress = []
        for rank, slot in enumerate(self._slots):
            _, step, phase = HEARTBEAT.unpack_from(self._memory, rank * HEARTBEAT_SLOT)
            limit_s = self._limit_s(slot)
            progress.append(WorkerProgress(rank, self._text(phase), step, now - slot.since, limit_s))
        return progress

    def _limit_s(self, slot: _Slot) -> float:
        if self._beats_late and slot.beats == 0:
            return self._silence_s
        return self.hang_timeouts.of(slot.phase)

    def _text(self, phase: bytes) -> str:
        return phase.rstrip(b"\0").decode("ascii", "replace") or self._first
