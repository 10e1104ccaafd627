"""Several sets as one, and the order in which a job mixes them."""

from __future__ import annotations

from bisect import bisect_right
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from elasticflow.errors import DatasetError
from elasticflow.runtime.data.dataset import checked_length, source_of
from elasticflow.runtime.data.fingerprint import combined, look_at
from elasticflow.runtime.data.order.mixed import MOST_SHARE

if TYPE_CHECKING:
    from collections.abc import Sequence

_STEPS_OF_SHARE = 1 << 30  # of shares that are no ratio of small numbers


class SetsDifferError(DatasetError, AttributeError):
    """An attribute that all sets of a mixture have, with different values: to whoever only asks for it, it is not there."""


class MixedDataset:
    """Several map-style datasets, one after another.

    An attribute that every set has, with one value, is an attribute of all.

    Args:
        sets: At least one, in the order of the job file.

    Raises:
        DatasetError: a set cannot be read by index, or has no samples.
    """

    def __init__(self, *sets: Any) -> None:
        self.sets = sets
        self.sizes = [
            checked_length(each, f"dataset.mix[{number}]", None) for number, each in enumerate(sets)
        ]
        self._ends = list(accumulate(self.sizes))
        self.look = combined(self.sizes, [look_at(each) for each in sets])
        self.fingerprint = self.look.fingerprint()
        self.source = " + ".join(dict.fromkeys(map(source_of, sets)))

    def __len__(self) -> int:
        """Count the samples of all sets."""
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        """Return a sample; the sets' are numbered one set after another."""
        number, own = self.origin_in_mixture(index)
        return self.sets[number][own]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return samples; of each set that can, all at once."""
        origins = [self.origin_in_mixture(index) for index in indices]
        found: dict[tuple[int, int], Any] = {}
        places: dict[int, list[int]] = {}
        for number, own in origins:
            places.setdefault(number, []).append(own)
        for number, owns in places.items():
            read = getattr(self.sets[number], "__getitems__", None)
            each = self.sets[number]
            samples = [each[own] for own in owns] if read is None else read(owns)
            found.update(zip(((number, own) for own in owns), samples, strict=True))
        return [found[origin] for origin in origins]

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of this name, which all sets have.

        Raises:
            AttributeError: some set does not have it.
            SetsDifferError: they have different values.
        """
        if name.startswith("_") or "sets" not in self.__dict__:
            raise AttributeError(f"a mixture has no attribute '{name}'")
        values = [getattr(each, name) for each in self.sets]
        first = values[0]
        other = next((number for number, value in enumerate(values) if not _is_same(value, first)), None)
        if other is not None:
            raise SetsDifferError(
                f"`{name}` of the mixture is {values[0]!r} in set 0 and {values[other]!r} in set {other}",
                "make the sets agree, or write the value into the job file",
            )
        return first

    def origin_in_mixture(self, index: int) -> tuple[int, int]:
        """Return the number of a sample's set, and the sample's number in that set."""
        number = bisect_right(self._ends, index)
        return number, index - (self._ends[number] - self.sizes[number])


def _is_same(value: Any, other: Any) -> bool:
    try:
        return bool(value is other or value == other)
    except (TypeError, ValueError, RuntimeError):  # arrays
        return False


def shares_of(
    sizes: Sequence[int], weights: Sequence[float] | None = None, temperature: float = 1.0
) -> list[int]:
    """Return the relative frequencies at which the sets are drawn, as whole numbers.

    Args:
        weights: The sets' shares as the job file writes them, exactly these decimals; None: by *temperature*.
        temperature: Each set's share is its size to the power of 1 / temperature: 1 draws sets by their sizes, so that each
            sample of all comes once per epoch; higher ones raise small sets' shares.
    """
    if weights is None and temperature == 1.0:
        exact = [Fraction(size) for size in sizes]
    elif weights is None:
        largest = max(sizes)
        powers = [(size / largest) ** (1 / temperature) for size in sizes]
        # Rounded: the last digit of a power can differ between machines.
        exact = [Fraction(max(1, round(power * _STEPS_OF_SHARE))) for power in powers]
    else:
        exact = [Fraction(Decimal(repr(weight))) for weight in weights]
    whole = lcm(*(each.denominator for each in exact))
    shares = [int(each * whole) for each in exact]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    total = sum(shares)
    if total > MOST_SHARE:
        shares = [max(1, share * MOST_SHARE // (2 * total)) for share in shares]
    return shares


def in_words(sizes: Sequence[int], shares: Sequence[int]) -> str:
    """Describe how often the sets and their samples come in an epoch of the mixture."""
    places, total = sum(sizes), sum(shares)
    parts = [
        f"{share / total:.1%} of dataset.mix[{number}] ({size:,} samples, each {places * share / total / size:.3g} times)"
        for number, (size, share) in enumerate(zip(sizes, shares, strict=True))
    ]
    return f"an epoch of the mixture has {places:,} samples: {', '.join(parts)}"
