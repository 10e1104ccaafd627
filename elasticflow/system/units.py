"""Intervals, durations and sizes written with units: `500 steps`, `10 min`, `4 GiB`."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

Unit = Literal["step", "epoch", "sample", "s"]

SECONDS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0,
    "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip
COUNTS: dict[str, Unit] = {
    "step": "step", "steps": "step",
    "epoch": "epoch", "epochs": "epoch",
    "sample": "sample", "samples": "sample",
}  # fmt: skip
BYTES = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip

# These patterns decide, here and in editors' JSON Schema: no lookahead, which not every editor's engine knows.
_WHOLE = r"[1-9][0-9]{0,11}"
_SECONDS_FORM = rf"({_WHOLE}(\.[0-9]{{1,6}})?|0\.0{{0,5}}[1-9][0-9]{{0,5}})[ \t]*({'|'.join(SECONDS)})"
_BYTES_FORM = (
    rf"{_WHOLE}[ \t]*B|({_WHOLE}(\.[0-9]{{1,3}})?|0\.([1-9][0-9]{{0,2}}|0[1-9][0-9]?|00[1-9]))"
    rf"[ \t]*({'|'.join(list(BYTES)[1:])})"
)


def _counted(*words: str) -> str:
    return rf"{_WHOLE}(\.0{{1,6}})?[ \t]*({'|'.join(words)})"


INTERVAL = rf"^[ \t]*({_counted(*COUNTS)}|{_SECONDS_FORM})[ \t]*$"
PROGRESS = rf"^[ \t]*({_counted(*list(COUNTS)[:4])}|{_SECONDS_FORM})[ \t]*$"
DURATION = rf"^[ \t]*{_SECONDS_FORM}[ \t]*$"
SIZE = rf"^[ \t]*({_BYTES_FORM})[ \t]*$"
_PARTS = re.compile(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*")


class Interval(NamedTuple):
    """A positive amount of steps, epochs, samples or seconds.

    Attributes:
        amount: Positive; whole unless *unit* is `s`.
        unit: Noun of the counted items.
    """

    amount: float
    unit: Unit

    def __str__(self) -> str:
        if self.unit == "s":
            for name, seconds in (("h", 3600.0), ("min", 60.0)):
                if self.amount % seconds == 0:
                    return f"{self.amount / seconds:g} {name}"
            return f"{self.amount:g} s"
        return f"{self.amount:.0f} {self.unit}{'' if self.amount == 1 else 's'}"


def intervals(every: str | list[str]) -> tuple[str, ...]:
    """Return one or several intervals of the job file as several."""
    return (every,) if isinstance(every, str) else tuple(every)


def parse_interval(text: str) -> Interval:
    """Return the interval that *text* states.

    Raises:
        ValueError: no number, an unknown unit, nought, or part of a step, epoch or sample.
    """
    if not re.fullmatch(INTERVAL, text):
        raise ValueError(_why_no_interval(text))
    amount, word = _parts(text)
    if word in COUNTS:
        return Interval(float(amount), COUNTS[word])
    return Interval(float(amount) * SECONDS[word], "s")


def parse_duration(text: str) -> float:
    """Return the seconds that *text* states ("30 s", "10 min", "1 h").

    Raises:
        ValueError: not an interval, or one that is not a time.
    """
    if re.fullmatch(INTERVAL, text) and (interval := parse_interval(text)).unit == "s":
        return interval.amount
    amount, _ = _parts(text)
    is_nought = amount and not amount.strip("0.")
    raise ValueError("must be more than 0" if is_nought else 'must be a time, like "30 s" or "10 min"')


def parse_size(text: str) -> int:
    """Return the bytes that *text* states ("4 GiB", "500 MB").

    Raises:
        ValueError: no number, no unit of bytes, or less than a byte.
    """
    if not re.fullmatch(SIZE, text):
        raise ValueError(_why_no_size(text))
    amount, word = _parts(text)
    return int(float(amount) * BYTES[word])


def _parts(text: str) -> tuple[str, str]:
    match = _PARTS.fullmatch(text)
    return (match[1], match[2]) if match else ("", "")


def _why_no_interval(text: str) -> str:
    amount, word = _parts(text)
    if word and word not in COUNTS and word not in SECONDS:
        return "must have one of the units steps, epochs, samples, s, min, h or d"
    if amount and not amount.strip("0."):
        return "must be more than 0"
    if word in COUNTS and "." in amount:
        return f"must be a whole number of {COUNTS[word]}s"
    return 'must be a number and a unit, like "500 steps", "10 min" or "1 epoch"'


def _why_no_size(text: str) -> str:
    amount, word = _parts(text)
    if word and word not in BYTES:
        return "must have one of the units B, kB, MB, GB, TB, KiB, MiB, GiB or TiB"
    if amount and not amount.strip("0."):
        return "must be more than 0"
    return 'must be a number and a unit, like "4 GiB" or "500 MB"'
