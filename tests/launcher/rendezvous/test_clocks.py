"""Times of machines whose clocks do not agree."""

from __future__ import annotations

import pytest

from elasticflow.launcher.rendezvous.supervisor_channel import on_own_clock


@pytest.mark.parametrize(
    ("noted", "sent", "now", "own"),
    [
        (100.0, 101.0, 101.5, 100.0),
        (100.0, 101.0, 110.0, 100.0),
        (3700.0, 3701.0, 101.5, 100.5),
        (100.0, 101.0, 3701.5, 3700.5),
        (100.0, None, 9999.0, 100.0),
    ],
    ids=["equal", "slow-message", "early", "late", "unknown"],
)
def test_time_of_another_machine_is_told_on_ones_own_clock(
    noted: float, sent: float | None, now: float, own: float
) -> None:
    """Half a minute is the time of a message; more is another clock."""
    assert own == on_own_clock(noted, sent, now)
