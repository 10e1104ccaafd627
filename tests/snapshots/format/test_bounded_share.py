"""When a state is held by itself: at most a fixed share of the time, whatever the clock and single measurements say."""

from __future__ import annotations

from elasticflow.snapshots.format.policy import BoundedShare


def held(share: BoundedShare, now: float, seconds: float) -> None:
    """Note a hold that took *seconds*."""
    share.begin(now)
    share.spent(seconds)


def test_the_first_waits_for_what_it_is_expected_to_take() -> None:
    """0.1 s are expected: due after 5 s."""
    share = BoundedShare(100.0, 0.1)
    assert not share.is_due(104.9)
    assert share.is_due(105.0)


def test_it_takes_a_fiftieth_of_the_time_at_most() -> None:
    """Holds of 20 ms, one as soon as it is due, looked at every 10 ms: 2 % of the time, and not much less."""
    now, taken, share = 0.0, 0.0, BoundedShare(0.0, 1.0)
    while now < 1000:
        now += 0.01
        if share.is_due(now):
            held(share, now, 0.02)
            taken += 0.02
    assert 0.018 * now < taken <= 0.02 * now


def test_parts_of_what_it_took_add_up() -> None:
    """Copying takes 10 ms, comparing 30 ms: due 2 s later."""
    share = BoundedShare(0.0, 0.0)
    share.begin(10.0)
    for seconds in (0.01, 0.03):
        share.spent(seconds)
    assert not share.is_due(11.9)
    assert share.is_due(12.1)


def test_clock_that_was_set_back_begins_the_wait_anew() -> None:
    """Ten years back: due two seconds from there, not in ten years."""
    share = BoundedShare(1e9, 0.04)
    held(share, 1e9, 0.04)
    assert not share.is_due(7e8)
    assert not share.is_due(7e8 + 1.9)
    assert share.is_due(7e8 + 2.1)


def test_clock_that_jumped_ahead_makes_one_hold_early() -> None:
    """An hour ahead: due at once, and then as before."""
    share = BoundedShare(0.0, 0.04)
    held(share, 0.0, 0.04)
    assert share.is_due(3600.0)
    held(share, 3600.0, 0.04)
    assert not share.is_due(3601.9)
    assert share.is_due(3602.1)


def test_one_hold_that_was_suspended_does_not_count() -> None:
    """One of three took ten minutes, since the process was stopped meanwhile: the others decide."""
    share = BoundedShare(0.0, 0.0)
    for now, seconds in ((0.0, 0.02), (10.0, 0.02), (20.0, 600.0)):
        held(share, now, seconds)
    assert not share.is_due(20.9)
    assert share.is_due(21.1)


def test_time_that_a_clock_took_back_counts_as_none() -> None:
    """The clock was set back while it was held."""
    share = BoundedShare(0.0, 0.0)
    held(share, 5.0, -3600.0)
    assert share.is_due(5.0)


def test_lag_of_other_ranks_now_and_then_does_not_count() -> None:
    """Each hold takes 10 ms and an exchange of 5 ms; in three of eight another rank comes a minute late."""
    share = BoundedShare(0.0, 0.0)
    for number in range(8):
        share.begin(number)
        share.spent(0.01, waited=60.0 if number % 3 == 0 else 0.005)
    assert not share.is_due(7.7)
    assert share.is_due(7.8)


def test_ranks_that_always_wait_hold_less_often() -> None:
    """An exchange takes 100 ms on this network."""
    share = BoundedShare(0.0, 0.0)
    share.begin(10.0)
    share.spent(0.01, waited=0.1)
    assert not share.is_due(15.4)
    assert share.is_due(15.6)
