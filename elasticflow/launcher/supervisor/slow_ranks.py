"""Names ranks that are slower than the others for a while: data that comes late, a throttled device, a busy machine.

A rank's own time of a step (`runtime/measuring/own_time.py`) is compared with the median of the other ranks'. All wait for the
slowest in each step, so the whole of a step does not tell who it is.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elasticflow.protocol.messages import NodeFigures, RankFigures

FACTOR = 1.5
"""A rank counts as slow in a window of steps if its own time is that many times the others' median ..."""
SHARE = 0.1
"""... and a step would be shorter by this share without the difference: a millisecond more of nearly nothing costs no one."""
WINDOWS = 4
"""A rank is named once it was slow in that many windows in a row, each of some seconds and steps."""


class SlowRank(NamedTuple):
    """A rank that was slow for a while.

    Attributes:
        device: Device of its model, such as `cuda:0`.
        factor: The rank's own time of a step divided by the median of the others'.
        own_s: Seconds of a step that are the rank's own.
        others_s: The median of the same of the other ranks.
    """

    rank: int
    node: str
    device: str
    factor: float
    own_s: float
    others_s: float
    step_s: float


class SlowRanks:
    """Takes in the figures of all nodes of a generation; names each slow rank once."""

    def __init__(self) -> None:
        self._generation = 0
        self._newest: dict[int, RankFigures] = {}
        self._slow_windows: dict[int, int] = {}
        self._named: set[int] = set()

    def hear(self, figures: NodeFigures) -> list[SlowRank]:
        """Take in a node's figures; return the ranks that are to be named now."""
        if figures.generation < self._generation:
            return []
        if figures.generation > self._generation:
            self._generation = figures.generation
            for of_ranks in (self._newest, self._slow_windows, self._named):  # which are other workers now
                of_ranks.clear()
        self._newest |= {each.rank: each for each in figures.ranks}
        if len(self._newest) < 2:
            return []
        of_all = sorted(each.own_s for each in self._newest.values())
        judged = (self._judged(figures.node, each, of_all) for each in figures.ranks)
        return [slow for slow in judged if slow is not None]

    def _judged(self, node: str, mine: RankFigures, of_all: list[float]) -> SlowRank | None:
        place = bisect_left(of_all, mine.own_s)
        # The median of the others, out of the sorted times of all: a thousand ranks may report every few seconds.
        middle = (len(of_all) - 1) // 2
        others = [of_all[n + (n >= place)] for n in ((len(of_all) - 2) // 2, middle)]
        typical = max(sum(others) / 2, 1e-9)
        is_slow = mine.own_s >= FACTOR * typical and mine.own_s - typical >= SHARE * mine.step_s
        self._slow_windows[mine.rank] = self._slow_windows.get(mine.rank, 0) + 1 if is_slow else 0
        if self._slow_windows[mine.rank] < WINDOWS or mine.rank in self._named:
            return None
        self._named.add(mine.rank)
        times = (round(seconds, 6) for seconds in (mine.own_s, typical, mine.step_s))
        return SlowRank(mine.rank, node, mine.device, round(mine.own_s / typical, 2), *times)
