from __future__ import annotations

import time
from statistics import median

from tests.benchmarks.cpu_account import Account


def burn(seconds: float) -> None:
    """Use that much CPU time."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_only_what_lies_inside_our_borders_is_counted() -> None:
    """Theirs called from ours is taken out, ours called from theirs is put in again, waiting is nothing."""
    account = Account()
    inner = account.crossing(lambda: burn(0.02), "inner")

    def theirs() -> None:
        burn(0.2)
        inner()

    outward = account.crossing(theirs, None)

    def ours() -> None:
        burn(0.04)
        outward()
        time.sleep(0.1)

    inward = account.crossing(ours, "outer")
    inward()
    assert account.taken() == {}
    for borders in (1, 2):
        account.borders = borders
        inward()
        burn(0.1)
        seconds = account.taken()
        assert 0.02 <= seconds["inner"] < 0.05
        assert 0.04 <= seconds["outer"] < 0.08


def test_what_borders_cost_is_seen_by_doubling_them() -> None:
    """A call that does nothing has next to nothing left of what its borders count."""
    account = Account()
    nothing = account.crossing(lambda: None, "nothing")
    counted: dict[int, list[float]] = {1: [], 2: []}
    for borders in (1, 2) * 500:
        account.borders = borders
        for _ in range(20):
            nothing()
        counted[borders].append(account.taken()["nothing"])
    once, twice = (median(counted[borders]) for borders in (1, 2))
    assert abs(2 * once - twice) < once / 2
