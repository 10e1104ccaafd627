from __future__ import annotations

import errno
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import pytest

from elasticflow.storage import retry
from elasticflow.storage.retry import Patience

if TYPE_CHECKING:
    from collections.abc import Callable


class Time:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def sleep(self, seconds: float) -> None:
        """Let *seconds* pass."""
        self.pauses.append(seconds)
        self.now += seconds

    def call(self, action: Callable[[], str], patience: Patience, chance: float = 0.0) -> str:
        """Try *action* on this clock."""
        return retry.call(
            action, patience, lambda *_: None, sleep=self.sleep, clock=lambda: self.now, chance=lambda: chance
        )


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Return an action that raises *error* so often, then answers."""
    left = [error] * times

    def act() -> str:
        if left:
            raise left.pop()
        return "done"

    return act


def test_pauses_grow_up_to_a_limit() -> None:
    """Each pause is twice the one before until the longest."""
    time = Time()
    patience = Patience(total_s=1000, first_s=0.5, most_s=3.0)
    assert time.call(failing(5, ConnectionResetError("reset")), patience) == "done"
    assert time.pauses == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_takes_up_to_half_of_a_pause() -> None:
    """Many writers that failed together do not come back together."""
    time = Time()
    time.call(failing(2, TimeoutError("no answer")), Patience(first_s=1.0), chance=0.5)
    assert time.pauses == [0.75, 1.5]


def test_time_is_bounded() -> None:
    """A store that never answers is given up: no try begins after the patience is spent."""
    time = Time()
    with pytest.raises(TimeoutError, match="no answer"):
        time.call(failing(10**6, TimeoutError("no answer")), Patience(total_s=60, first_s=1, most_s=8))
    assert time.now <= 160.0
    assert all(before <= after for before, after in pairwise(time.pauses))


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("absent"),
        PermissionError("403"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EROFS, "Read-only file system"),
        ValueError("no bucket of that name can be"),
    ],
    ids=repr,
)
def test_what_does_not_pass_is_told_at_once(error: Exception) -> None:
    """What is refused, absent or full is not tried again."""
    time = Time()
    with pytest.raises(type(error)):
        time.call(failing(1, error), Patience())
    assert time.pauses == []


def test_each_pause_is_told() -> None:
    """Who asked hears the error, how many tries there were and how long the pause is, before it."""
    told: list[tuple[str, int, float]] = []
    retry.call(
        failing(2, ConnectionResetError("reset")),
        Patience(first_s=1.0),
        lambda error, tries, pause: told.append((str(error), tries, pause)),
        sleep=lambda _: None,
        chance=lambda: 0.0,
    )
    assert told == [("reset", 1, 1.0), ("reset", 2, 2.0)]


def test_interrupts_are_not_tried_again() -> None:
    """Ctrl-C ends the operation."""
    time = Time()

    def interrupted() -> NoReturn:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        time.call(interrupted, Patience())
    assert time.pauses == []
