"""Intervals, durations and sizes written with units: `500 steps`, `10 min`, `4 GiB` (floor 1, pure)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Unit = Literal["step", "epoch", "sample", "s"]

_SECONDS = {
    "s": 1.0, "sec": 1.0, "second": 1.0,
    "min": 60.0, "minute": 60.0,
    "h": 3600.0, "hour": 3600.0,
    "d": 86400.0, "day": 86400.0,
}  # fmt: skip
_COUNTS: dict[str, Unit] = {"step": "step", "epoch": "epoch", "sample": "sample"}
_BYTES = {
    "B": 1,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(?P<unit>[A-Za-z]+)\s*")
_FORM = re.compile(r"\s*(?P<number>[0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(?P<unit>[a-z]+)\s*")


@dataclass(frozen=True)
class Interval:
    """A positive amount of steps, epochs, samples or seconds.

    Attributes:
        amount: Positive; whole unless *unit* is `s`.
        unit: What is counted.
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


def parse_interval(text: str) -> Interval:
    """Return the interval that *text* states.

    Raises:
        ValueError: no number, an unknown unit, nought, or part of a step, epoch or sample.
    """
    found = _FORM.fullmatch(text)
    if not found:
        raise ValueError('must be a number and a unit, like "500 steps", "10 min" or "1 epoch"')
    amount, word = float(found["number"]), found["unit"]
    singular = word if word in _SECONDS or word in _COUNTS else word.removesuffix("s")
    if amount <= 0:
        raise ValueError("must be more than 0")
    if singular in _COUNTS:
        if amount != int(amount):
            raise ValueError(f"must be a whole number of {_COUNTS[singular]}s")
        return Interval(amount, _COUNTS[singular])
    if singular not in _SECONDS:
        raise ValueError("must have one of the units steps, epochs, samples, s, min, h or d")
    return Interval(amount * _SECONDS[singular], "s")


def parse_duration(text: str) -> float:
    """Return the seconds that *text* states ("30 s", "10 min", "1 h").

    Raises:
        ValueError: not an interval, or one that is not a time.
    """
    interval = parse_interval(text)
    if interval.unit != "s":
        raise ValueError('must be a time, like "30 s" or "10 min"')
    return interval.amount


def parse_size(text: str) -> int:
    """Return the bytes that *text* states ("4 GiB", "500 MB").

    Raises:
        ValueError: no number, no unit of bytes, or less than a byte.
    """
    found = _SIZE.fullmatch(text)
    if not found:
        raise ValueError('must be a number and a unit, like "4 GiB" or "500 MB"')
    if found["unit"] not in _BYTES:
        raise ValueError("must have one of the units B, kB, MB, GB, TB, KiB, MiB, GiB or TiB")
    size = int(float(found["number"]) * _BYTES[found["unit"]])
    if size < 1:
        raise ValueError("must be more than 0")
    return size
