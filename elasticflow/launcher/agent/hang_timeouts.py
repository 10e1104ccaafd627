"""The longest time a rank may make no progress: learned from the run, phase by phase."""

from __future__ import annotations

# Even quick steps may stall for so long without a hang.
FLOOR_S = 60.0
FACTOR = 10
ENOUGH = 10
# Another shape may take minutes where ten took milliseconds: what a compiler took says nothing of what it will take.
UNPREDICTABLE = frozenset({"compile"})


class HangTimeouts:
    """The limit of each phase.

    It is *ceiling_s* (`restarts.hang_timeout`) until a phase was seen `ENOUGH` times; then `FACTOR` times the longest
    stall of a rank in that phase, but at least `FLOOR_S` and at most the ceiling. A run that stalled for longer than the
    ceiling and continued has twice its longest stall. No lower limit is learned for `UNPREDICTABLE` phases.

    Args:
        ceiling_s: Upper limit in seconds.
    """

    def __init__(self, ceiling_s: float) -> None:
        self._ceiling_s = ceiling_s
        self._seen: dict[str, tuple[int, float]] = {}  # by phase: how often it stalled, and the longest stall

    def note(self, phase: str, seconds: float) -> None:
        """Take in that a rank made no progress for *seconds* in *phase*, and continued."""
        number, longest = self._seen.get(phase, (0, 0.0))
        self._seen[phase] = number + 1, max(longest, seconds)

    def allow_as_long(self, phase: str, seconds: float) -> None:
        """Take in that a stall of *seconds* counted as a hang: a stall as long does not count again."""
        self.note(phase, min(seconds, self._ceiling_s))

    def of(self, phase: str) -> float:
        """Return the limit of *phase* in seconds."""
        number, longest = self._seen.get(phase, (0, 0.0))
        if longest > self._ceiling_s:
            return 2 * longest
        if number < ENOUGH or phase in UNPREDICTABLE:
            return self._ceiling_s
        return min(self._ceiling_s, max(FLOOR_S, FACTOR * longest))
