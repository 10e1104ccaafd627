from __future__ import annotations

import time

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
    assert account.without_borders() == {}
    for borders in (1, 2):
        account.borders = borders
        inward()
        burn(0.1)
        assert 0.02 <= account.seconds[borders]["inner"] < 0.05
        assert 0.04 <= account.seconds[borders]["outer"] < 0.08


def test_what_borders_cost_is_taken_out() -> None:
    """A call that does nothing has next to nothing left of what its borders count."""
    account = Account()
    nothing = account.crossing(lambda: None, "nothing")
    for borders in (1, 2) * 500:
        account.borders = borders
        for _ in range(20):
            nothing()
    assert abs(account.without_borders()["nothing"]) < account.seconds[1]["nothing"] / 2
