"""Times that another machine has noted, as this machine's clock has them: hosts need not agree on the time."""

from __future__ import annotations

# Seconds. A smaller difference cannot be told from the time that a message travels or waits to be read.
_LEAST_SKEW_S = 30.0


def on_own_clock(noted: float, sent: float | None, now: float) -> float:
    """Return the Unix time *noted* on another clock as this machine's clock has it.

    Clocks that differ by less than half a minute count as equal.

    Args:
        noted: Time that the other machine noted.
        sent: Unix time at which that machine told it, on its clock; None: it did not say.
        now: Unix time at which it was heard, on this machine's clock.
    """
    if sent is None or abs(now - sent) < _LEAST_SKEW_S:
        return noted
    return noted + now - sent
