"""Repeats operations after transient errors: with growing pauses and jitter, for a bounded time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from elasticflow.storage import errors

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

# The module's own generator belongs to the training that this process may run.
_JITTER = random.SystemRandom()


@dataclass(frozen=True)
class Patience:
    """Time limits for a store in trouble, in seconds.

    Attributes:
        total_s: From the first try to the start of the last one.
        first_s: The first pause. Each pause is twice the one before it; up to half of it is left out by chance.
    """

    total_s: float = 120.0
    first_s: float = 0.2
    most_s: float = 15.0


def call(
    action: Callable[[], T],
    patience: Patience,
    on_retry: Callable[[Exception, int, float], None],
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    chance: Callable[[], float] = _JITTER.random,
) -> T:
    """Return the result of *action*, which is repeated while it fails with a transient error.

    Args:
        action: Must be safe to repeat.
        on_retry: Called before each pause with the error, the number of tries so far and the pause.
        chance: Returns a number in [0, 1) for the jitter.

    Raises:
        Exception: the error of the last try.
    """
    deadline, pause, tries = clock() + patience.total_s, patience.first_s, 0
    while True:
        tries += 1
        try:
            return action()
        except Exception as error:
            wait = pause * (1 - chance() / 2)
            if not errors.is_transient(error) or clock() + wait > deadline:
                raise
            on_retry(error, tries, wait)
        sleep(wait)
        pause = min(2 * pause, patience.most_s)
